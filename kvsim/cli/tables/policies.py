"""What ``kvsim policies`` prints."""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvsim.model.engine_versions import ENGINE_VERSIONS, SCHEDULERS
from policies import GROUPS, Preset


def show_policies(console: Console, presets: Collection[Preset]) -> None:
    """Print a line for each, and the schedulers; of plug-ins where they come from, and its version."""
    standard, papers = ([p for p in presets if p.group == group] for group in GROUPS)
    described = {p.name: p.summary if p.origin is None else f"{p.summary} ({p.origin})" for p in standard}
    described |= {p.name: f"{p.summary} ({p.engine})" for p in standard if p.engine and p.engine not in p.summary}
    console.print(_pairs(described))
    console.print("\nideas from papers (kvsim compare --group papers):", highlight=False)
    console.print(_pairs({p.name: p.summary for p in papers}))
    console.print("\nschedulers (server.scheduler):", highlight=False)
    console.print(_pairs(SCHEDULERS))


def show_scheduler(console: Console, name: str) -> None:
    """Print one scheduler."""
    console.print(f"[bold]{name}[/] (server.scheduler): {SCHEDULERS[name]}", highlight=False)


def show_preset(console: Console, p: Preset) -> None:
    """Print one policy: its four choices, parameters and source."""
    console.print(f"[bold]{p.name}[/]: {p.summary}", highlight=False)
    engine = _engine(p)
    parameters = ", ".join(f"cache.{key}" for key in p.parameters)
    console.print(
        _pairs(
            {
                "layout": p.layout,
                "compactor": p.compactor,
                "trigger": p.trigger,
                "storage": "any: cache.type_k, cache.type_v",
                "attention": p.kernel,
                **({"engine": engine} if engine else {}),
                "parameters": f"cache.cells; {parameters}" if parameters else "cache.cells",
                "source": p.source,
                **({"compared with": p.against} if p.against else {}),
                **({"measured": p.measured} if p.measured else {}),
            }
        )
    )


def _engine(p: Preset) -> str:
    """The version that it stands for, with the defaults that hold where a scenario says nothing."""
    version = ENGINE_VERSIONS.get(p.engine)
    if version is None:
        return p.engine
    held = [
        words for key, words in version.defaults.items() if key in ("flash_attention", "slot_context", *p.parameters)
    ]
    return f"{version}; where the scenario says nothing: {', '.join(held)}"


def _pairs(described: dict[str, str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in described.items():
        table.add_row(f"[bold]{name}[/]", escape(text))
    return table
