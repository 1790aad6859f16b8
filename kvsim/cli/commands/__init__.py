"""Commands that are more than a few lines: a module each, put together in ``kvsim.cli.app``."""
