"""Why a fit is poor: the likeliest cause, with its evidence."""

from __future__ import annotations

import pandas as pd

from kvsim.costs.profile import Profile

_SHARE = 0.97
"""Share of its core below which other work is blamed."""
_SPREAD = 1.25
"""Slow over fast pace beyond which an unsteady machine is blamed."""
_APART = 1.5
"""How many times as large the error of a class must be as that of all others to be blamed."""
_FEWEST = 20
"""Passes of a class before anything is said of it."""


def likely_cause(profile: Profile, held_out: pd.DataFrame, scatter: float | None) -> str:
    """One clause that names the likeliest cause of a large held-out error.

    ``held_out`` as in ``Calibration``; ``scatter``: relative standard deviation of one pass, measured again and again.
    """
    share, pace, error = profile.measured_on.cpu_share, profile.pace, profile.held_out_error_median
    where = _worst_class(held_out)
    if share < _SHARE:
        return f"likely cause: other work had {1 - share:.0%} of the core, so that single passes were interrupted"
    if scatter is not None and scatter > error / 2:
        said = f"likely cause: an unsteady machine, on which the same pass, repeated, strays by {scatter:.0%}"
        if pace is not None and pace.spread > _SPREAD:
            said += f", and the pace between {pace.p5:.2f} and {pace.p95:.2f} of its median"
        return f"{said}: stop other work, or try at another time"
    if where is not None:
        return f"likely cause: a cost that the model does not know, {where}"
    if pace is not None and pace.spread > _SPREAD:
        return (
            f"likely cause: the machine's pace changed between {pace.p5:.2f} and {pace.p95:.2f} of its median (a "
            "shared or throttled processor), and not alike for all passes"
        )
    return "no single cause stands out: the passes measured may be too few"


def _worst_class(held_out: pd.DataFrame) -> str | None:
    """The kernel and kind of pass whose error stands out from that of all others; None if there is none."""
    kind = pd.Series("prompts", index=held_out.index)
    kind[held_out["tokens"] == held_out["chunks"]] = "decodes"
    named = held_out.assign(
        error=(held_out["predicted_s"] / held_out["measured_s"] - 1).abs(),
        each=held_out["kernel"].astype(str) + " " + kind,
    )
    medians = named.groupby("each")["error"].median()[named["each"].value_counts() >= _FEWEST]
    if len(medians) < 2:
        return None
    worst = str(medians.idxmax())
    rest = float(named.loc[named["each"] != worst, "error"].median())
    error = float(medians.max())
    if error < _APART * rest:
        return None
    return f"since {worst} are off by {error:.0%} and the rest by {rest:.0%}"
