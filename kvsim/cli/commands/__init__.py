"""The commands, one module for each; its ``app`` is imported when the command is called.

A command imports what it needs in its function, so that its ``--help`` answers at once.
"""
