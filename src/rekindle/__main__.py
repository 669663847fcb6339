"""``python -m rekindle``: the command line."""

from rekindle.cli import main

if __name__ == "__main__":
    main()
