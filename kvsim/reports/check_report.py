"""The report of a command line that was checked (``kvsim check``)."""

from __future__ import annotations

from kvsim.advice.memory.check import Check
from kvsim.advice.memory.command_line import PROGRAM_TITLES
from kvsim.reports.memory_report import parts_table, types_of
from kvsim.reports.report import Report, Section


def check_report(found: Check) -> Report:
    """What the command will do, what is misleading in it, and what to change; then its memory by part."""
    made = found.made
    where = made.device or "the given memory"
    lines = [
        *(f"misleading: {line}" for line in found.misleading),
        *(f"change: {line}" for line in found.changes),
        *(f"note: {line}" for line in (*found.assumed, *made.notes)),
    ]
    if found.line.engine == "vllm":
        lines.append("note: K and V fill what the parts below leave of vLLM's share")
    title = f"{PROGRAM_TITLES[found.line.program]}: {made.shape.name} on {where}, K and V as {types_of(made)}"
    return Report(
        title,
        conclusions=list(found.gives),
        sections=[
            Section("Command", lines or ["nothing in it is misleading"]),
            Section("Memory", tables=[parts_table(made, blocks=found.line.engine == "vllm")]),
        ],
    )
