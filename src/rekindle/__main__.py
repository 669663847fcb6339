"""The command line: ``rekindle``, ``python -m rekindle``."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C gives exit code 130, while it is still being imported too."""
    try:
        from rekindle.cli.main import main as command  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
