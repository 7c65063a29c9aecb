"""`python -m disagg`: the command line, if `disagg` is not in PATH."""

from disagg.cli import main

main()
