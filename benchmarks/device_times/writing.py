"""Writes ``efficiencies.json``."""

from __future__ import annotations

import json
from pathlib import Path

from kvsim.costs.efficiency import EngineEfficiency

FILE = Path(__file__).parents[2] / "kvsim" / "costs" / "efficiencies.json"


def write(engine: str, makes: dict[str, EngineEfficiency]) -> None:
    """Replace what the file has of an engine."""
    table = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    table[engine] = {make: found.model_dump(exclude_none=True) for make, found in makes.items()}
    FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
