"""The program ``kvsim``: all commands in one group, and how it ends.

Exit codes: 0 done, 1 a check failed, 2 the user's input is wrong, 130 interrupted.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from kvsim.cli.console import fail, plain_warnings
from kvsim.errors import Divergence, NoTimes, UserError
from kvsim.installation import NAME, described, install_extra

COMMANDS = {
    "run": "Run one scenario under one policy.",
    "compare": "Compare policies on one scenario: by default those of engines, and ours.",
    "sweep": "Run many settings under several policies; an interrupted sweep continues when run again.",
    "why": "Explain why requests are slow: what each second was spent on, early against late and fast against slow.",
    "recommend": "Recommend a policy and its settings for your traffic, service level and memory, and what to type.",
    "plan": "Show how much memory a model takes under llama.cpp and vLLM, part by part, and what fits.",
    "check": "Say what a server's command line will do: what fits, what each user gets, what misleads, what to change.",
    "report": "Write one self-contained HTML page about saved results; it needs no network and opens from disk.",
    "questions": "Answer common questions, each with a command to try.",
    "policies": "List the installed policies and the schedulers with their versions, or explain one.",
    "scenario": "List the built-in scenarios, or show one with every default filled in.",
    "workload": "Describe request streams, and fit generators to them.",
    "prefix-cache": "Show how often a prefix cache would hit, by its size and eviction order.",
    "record": "Run a scenario on llama.cpp and record every operation and every cell, for kvsim conform.",
    "profile": "List, show and make profiles: the times of a model on a device.",
    "observe": "Record your own traffic: a proxy that keeps times, token counts and hashes, never text.",
    "calibrate": "Measure an engine on this machine, or a server that runs, and write a profile of it.",
    "validate": "Compare predicted times with those of a real engine here, of recorded servers, or of running ones.",
    "tune": "Look at a server, observe its traffic, measure it, search its settings, try them, and say what to type.",
    "conform": "Replay recorded runs of a real engine on our policies, comparing the state after every operation.",
    "memory": "Measure where an engine's memory goes: a naive set-up, then one remedy after another.",
    "accuracy": "Measure how much accuracy narrower K and V cost, or token eviction.",
    "generate": "Generate text with the NumPy engine, on a cache under any policy.",
}
"""Each command and its line in the list of commands; the module in ``kvsim.cli.commands`` bears the same name."""


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
        _check_given_once(command, args)
        return command.make_context(info_name, args, parent=parent, **extra)


_SEVERAL = {"--device", "--model", "--weights", "--tp", "--kv"}
"""Options of which ``recommend`` takes several."""


def _check_given_once(command: Any, args: list[str]) -> None:
    """Raise ``UserError`` for a model or device beside another, where only the last would count in silence."""
    single = {name for p in command.params if not getattr(p, "multiple", True) for name in p.opts} & _SEVERAL
    given = [word.partition("=")[0] for word in args]
    for name in sorted(single) if "--device" in single else ():
        if given.count(name) > 1:
            raise UserError(f"{name}: given {given.count(name)} times; one is expected; {NAME} recommend takes several")


_entrance = typer.Typer(
    name=NAME,
    help="Which KV-cache allocation policy, with which settings, will serve my traffic on my machine, and why?",
    epilog="Common questions, each with a command and its answer: kvsim questions",
    no_args_is_help=True,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(described())
        raise typer.Exit()


@_entrance.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Accept the options that belong to no command."""


_group = get_command(_entrance)
assert isinstance(_group, TyperGroup), "it has a callback"
app: TyperGroup = _group
app.commands.update(
    {name: LazyCommand(name, f"kvsim.cli.commands.{name.replace('-', '_')}", help) for name, help in COMMANDS.items()}
)


_Misuse: Any = typer.BadParameter.__base__
"""What Typer raises where an option, an argument or a command is not as expected."""


def main() -> None:
    """Run the command line; wrong input ends it with one line for each fault and exit code 2."""
    try:
        with plain_warnings():
            sys.exit(app(prog_name=NAME, standalone_mode=False))
    except _Misuse as e:
        if type(e).__name__ == "NoArgsIsHelpError":
            sys.exit(e.show() or 2)
        asked = e.ctx.command_path if e.ctx else NAME
        sys.exit(fail(f"{e.format_message().rstrip('.')}; see {asked} --help", 2))
    except Divergence as e:
        sys.exit(fail(str(e), 1))
    except NoTimes as e:
        sys.exit(fail(_with_memory(e), 2))
    except ValueError as e:
        from workloads import MissingExtraError, WorkloadError

        if not isinstance(e, UserError | WorkloadError):
            raise
        hint = f"; install it with: {install_extra(e.extra)}" if isinstance(e, MissingExtraError) else ""
        sys.exit(fail(f"{e}{hint}", 2))


def _with_memory(error: NoTimes) -> str:
    """The message, and a line with what memory says of the scenario, which needs no times."""
    if error.scenario is None:
        return str(error)
    from kvsim.advice.memory.scenario_memory import describe_memory

    return f"{error}\n{describe_memory(error.scenario)}"
