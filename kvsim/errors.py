"""What goes wrong through the user's input, as opposed to through a fault of ours."""

from __future__ import annotations


class UserError(ValueError):
    """The user's input is wrong. The message is one line (a line for each fault) and says what is accepted."""
