"""`python -m mheads` is the command line."""

from mheads.cli.main import main

if __name__ == "__main__":
    main()
