"""Pictures of a comparison that was saved without any: its runs are repeated to look at their caches."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsim.errors import UserError
from kvsim.results import results_folder
from kvsim.simulation.result import Result

ShareDone = Callable[[float], None]
"""Called with the share of the work, between 0 and 1, that is done."""


def draw_again(folder: Path, saved: dict[str, Any], target: Path, progress: ShareDone | None = None) -> None:
    """Repeat the comparison in a folder, and write its pictures and snapshots to ``target``.

    ``saved``: the content of its ``comparison.json``. Raises ``UserError`` and ``WorkloadError`` if it cannot be
    repeated, or has other results than those saved.
    """
    from kvsim.experiments.comparison import compare

    runs = saved["policies"]
    replications = saved.get("replications", 1)
    total = replications * sum(run["requests"] for run in runs)
    found = compare(
        folder / "scenario.toml",
        [run["policy"] for run in runs],
        progress=None if progress is None else lambda ended, _: progress(ended / total),
        detail="states",
        replications=replications,
        max_failed=saved.get("max_failed", 0.0),
    )
    if len(found.results) != len(runs) or not all(map(_alike, runs, found.results)):
        raise UserError("repeated with this version, the runs have other results")
    with results_folder(target) as out:
        found.plot_to(out)


def _alike(run: dict[str, Any], result: Result) -> bool:
    """Whether a run ended as another did, up to rounding."""
    now = result.summary
    pairs = [(run[key]["mean"], now[key]["mean"]) for key in ("ttft_s", "e2e_s")]
    pairs.append((run["completed"], now["completed"]))
    return all(a == b or (None not in (a, b) and math.isclose(a, b, rel_tol=1e-9)) for a, b in pairs)
