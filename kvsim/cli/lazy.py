"""Commands whose modules are imported only when they are called."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from typer.core import TyperCommand
from typer.main import get_command


class LazyCommand(TyperCommand):
    """Stands for a command, or a group of commands, until it is called; listings and completion need only its name.

    ``module`` has the command as a ``typer.Typer`` called ``app``.
    """

    def __init__(self, name: str, module: str, help: str):
        super().__init__(name, help=help)
        self.module = module

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command and have it parse its arguments; the context is that of the command itself."""
        command = get_command(import_module(self.module).app)
        command.name = self.name
        return command.make_context(info_name, args, parent=parent, **extra)
