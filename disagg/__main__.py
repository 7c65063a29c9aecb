"""`python -m disagg`: the command line, where no `disagg` is in PATH."""

from disagg.cli import main

main()
