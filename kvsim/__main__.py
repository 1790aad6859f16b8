"""The command ``kvsim``, also as ``python -m kvsim``."""

import sys


def main() -> None:
    """Run the command line; an interrupt ends it with exit code 130, also while everything is still being imported."""
    try:
        from kvsim.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
