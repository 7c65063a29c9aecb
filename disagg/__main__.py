"""`python -m disagg`: the command line, if `disagg` is not in PATH."""

import os

try:
    from disagg.cli import main
except KeyboardInterrupt:  # `main` handles those that come later
    os.write(2, b"interrupted\n")
    os._exit(130)

main()
