"""The command ``kvsim``, also as ``python -m kvsim``."""

import atexit
import gc
import sys

_ALLOCATIONS = 50_000
"""Allocations between two garbage collections; at Python's own threshold, imports alone cause dozens of them."""


def main() -> None:
    """Run the command line; an interrupt ends it with exit code 130, also while modules are still being imported."""
    gc.set_threshold(_ALLOCATIONS)
    atexit.register(gc.freeze)  # The system takes the memory back anyway; collecting it first takes up to 50 ms.
    try:
        from kvsim.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
