"""The reports of ``kvsim policies``: what is installed, and what a policy is."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvsim.model.engine_versions import ENGINE_VERSIONS
from kvsim.reports.report import Column, Report, Section, Table
from kvsim.scenario.server_defaults import SCHEDULERS
from policies import GROUPS, Preset


def policies_report(presets: Collection[Preset]) -> Report:
    """A line for each policy, and the schedulers; of plug-ins where they come from, and their version."""
    standard, papers = ([p for p in presets if p.group == group] for group in GROUPS)
    described = {p.name: p.summary if p.origin is None else f"{p.summary} ({p.origin})" for p in standard}
    described |= {p.name: f"{p.summary} ({p.engine})" for p in standard if p.engine and p.engine not in p.summary}
    return Report(
        sections=[
            Section(tables=[_pairs(described)]),
            Section(
                text=["ideas from papers (kvsim compare --group papers):"],
                tables=[_pairs({p.name: p.summary for p in papers})],
            ),
            Section(
                text=["schedulers (server.scheduler):"],
                tables=[_pairs({name: SCHEDULERS.summary(name) for name in SCHEDULERS.names()})],
            ),
        ]
    )


def scheduler_report(name: str) -> Report:
    """One scheduler."""
    return Report(f"{name} (server.scheduler): {SCHEDULERS.summary(name)}")


def preset_report(p: Preset) -> Report:
    """One policy: its four choices, parameters and source."""
    parameters = ", ".join(f"cache.{key}" for key in p.parameters)
    choices = {
        "layout": p.layout,
        "compactor": p.compactor,
        "trigger": p.trigger,
        "storage": "any: cache.type_k, cache.type_v",
        "attention": p.kernel,
        "engine": _engine(p),
        "parameters": f"cache.cells; {parameters}" if parameters else "cache.cells",
        "source": p.source,
        "compared with": p.against,
        "measured": p.measured,
    }
    known = {name: text for name, text in choices.items() if text}
    return Report(f"{p.name}: {p.summary}", sections=[Section(tables=[_pairs(known)])])


def _engine(p: Preset) -> str:
    """The version that it stands for, with the defaults that hold where a scenario says nothing."""
    version = ENGINE_VERSIONS.get(p.engine)
    if version is None:
        return p.engine
    held = [
        words for key, words in version.defaults.items() if key in ("flash_attention", "slot_context", *p.parameters)
    ]
    return f"{version}; where the scenario says nothing: {', '.join(held)}"


def _pairs(described: Mapping[str, str]) -> Table:
    """Names, and what they are; without headings."""
    return Table("", [Column("", 0), Column("", 1)], list(described.items()))
