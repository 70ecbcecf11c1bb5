"""`python -m edgespec`."""

from edgespec.cli.commands import main

if __name__ == "__main__":
    main()
