"""Compare published points of real servers with what is predicted for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvsim.engines.published.points import Point, chosen_points, read_points
from kvsim.engines.published.replay import Outcome, Prediction, replay
from kvsim.engines.published.servers import REQUESTS, flags_of, version_of, why_not
from kvsim.errors import UserError
from kvsim.results import results_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = ("ttft", "tpot", "throughput")
GROUPS = ("model", "device", "tp", "concurrency", "isl", "memory", "third")
"""What the errors of points of one server are grouped by."""
APART = "prefill and decode apart"
"""The group of all others."""
_UP_TO = ("concurrency", "isl")
"""Keys whose groups go up to powers of two."""
WORST = 10
_AGAIN = "the same measurement stands in a line before"
_PRESSED = 0.5
"""Share of the blocks that the longest requests of all clients need, from which a point is shown with those of the same
server in which memory decides."""


@dataclass(frozen=True)
class PublishedValidation:
    """Measured points, and what was predicted for them."""

    outcomes: tuple[Outcome, ...]
    chosen: int
    """Points that could have been replayed: those that are not in ``outcomes`` were left out of a sample."""
    seed: int
    """Seed of the sample and of the lengths."""

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row for each point that was replayed: what it is, what its server is taken to be, blocks, and for each of
        ttft, tpot (seconds) and throughput (tokens/s) what was measured, predicted, and the error (predicted over
        measured, less 1)."""
        return pd.DataFrame(
            [_row(each.point, each.prediction) for each in self.outcomes if each.prediction is not None],
            columns=_COLUMNS,
        )

    @cached_property
    def reasons(self) -> dict[str, int]:
        """How many points were not replayed, by reason, most frequent first."""
        return dict(Counter(each.reason for each in self.outcomes if each.prediction is None).most_common())

    @cached_property
    def groups(self) -> pd.DataFrame:
        """Errors of all points of one server (where there are none, of all), by each of ``GROUPS`` (concurrency and
        isl: up to the value), and of those ``APART``: columns by, value, points, and of each measure ``_bias``, the
        median with its sign, ``_median`` and ``_p90`` without."""
        several = self.table["servers"].str.contains(" ").astype(bool)
        table, apart = self.table[~several], self.table[several]
        rows = [_errors_of(table if len(table) else apart, "all", "")]
        for by in GROUPS:
            values = table[by] if by not in _UP_TO else table[by].map(lambda n: 1 << (int(n) - 1).bit_length())
            rows += [_errors_of(part, by, value) for value, part in table.groupby(values)]
        return pd.DataFrame(rows + ([_errors_of(apart, APART, "")] if len(apart) else []))

    @property
    def worst(self) -> pd.DataFrame:
        """The rows of the table with the largest errors of TTFT or TPOT, by the factor that they are off."""
        off = self.table[[f"{side}_{measure}" for measure in ("ttft", "tpot") for side in ("predicted", "measured")]]
        factors = np.log(off.to_numpy()).reshape(-1, 2, 2)
        size = np.abs(factors[:, :, 0] - factors[:, :, 1]).max(axis=1) if len(off) else []
        return self.table.iloc[np.argsort(-np.asarray(size), kind="stable")[:WORST]]

    @property
    def pressed(self) -> pd.DataFrame:
        """The rows in which memory decides, and those before them of the same servers and lengths: the table's own."""
        server = ["model", "device", "tp", "precision", "version", "isl", "osl"]
        decided = self.table[self.table["memory"] == "decides"][server].drop_duplicates()
        near = self.table[self.table["needed_blocks"] >= _PRESSED * self.table["blocks"]]
        return near.merge(decided, on=server).sort_values([*server, "concurrency"], kind="stable")

    @property
    def assumed(self) -> list[str]:
        """What the points do not say of their servers, a line for each kind of server that was replayed."""
        replayed = [each.point for each in self.outcomes if each.prediction is not None]
        counts = Counter((flags_of(point).described(), flags_of(point).source) for point in replayed)
        return [f"{n:,} points: {said} ({source})" for (said, source), n in counts.most_common()]

    def error(self, measure: str, statistic: str, by: str = "all", value: Any = "") -> float:
        """An entry of ``groups``; NaN if there are no such points."""
        found = self.groups[(self.groups["by"] == by) & (self.groups["value"].astype(str) == str(value))]
        return float(found[f"{measure}_{statistic}"].iloc[0]) if len(found) else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "points": len(self.table),
            "chosen": self.chosen,
            "seed": self.seed,
            "requests_of_a_client": REQUESTS,
            "not_replayed": self.reasons,
            "assumed": self.assumed,
            "bases": self.bases,
            "errors": _records(self.groups),
            "worst": list(self.worst["id"]),
            "memory_decides": list(self.pressed["id"]),
            "replayed": _records(self.table),
        }

    @property
    def bases(self) -> list[str]:
        """What the profiles say of themselves."""
        return sorted({each.prediction.basis for each in self.outcomes if each.prediction is not None})

    def plot(self) -> Figure:
        """Draw predicted against measured TTFT, TPOT and throughput."""
        from kvsim.reports.recorded_plots import published_figure

        return published_figure(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the picture and the table into a folder; returns the files. Raises ``UserError``."""
        with results_folder(folder) as out:
            out.table("published.csv", self.table)
            out.picture("published.png", self.plot if len(self.table) else None)
        return out.written


_COLUMNS = (
    *("id", "model", "device", "tp", "servers", "precision", "version", "isl", "osl", "concurrency", "experts_apart"),
    *("profile", "blocks", "needed_blocks", "memory", "preemptions", "third"),
    *(f"{side}_{measure}" for measure in MEASURES for side in ("measured", "predicted", "error")),
    "front_end",
)


def _row(point: Point, predicted: Prediction) -> dict[str, Any]:
    """A row of the table. Throughput is that of a closed loop: clients over the time that each waits for an answer."""
    answer = point.osl * (1 + flags_of(point).lengths) / 2
    measured = {"ttft": point.ttft_s, "tpot": point.tpot_s}
    ours = {"ttft": predicted.ttft_s, "tpot": predicted.tpot_s}
    for side in (measured, ours):
        side["throughput"] = point.concurrency * answer / (side["ttft"] + (answer - 1) * side["tpot"])
    return {
        **{key: getattr(point, key) for key in ("id", "model", "device", "tp", "isl", "osl", "concurrency")},
        "servers": point.servers,
        "precision": point.precision or "own",
        "version": version_of(point),
        "experts_apart": point.ep > 1,
        "profile": predicted.profile,
        "blocks": predicted.blocks,
        "needed_blocks": predicted.needed_blocks,
        "memory": "decides" if predicted.needed_blocks > predicted.blocks else "suffices",
        "preemptions": predicted.preemptions,
        "third": "looked at" if point.looked_at else "kept aside",
        **{f"measured_{measure}": measured[measure] for measure in MEASURES},
        **{f"predicted_{measure}": ours[measure] for measure in MEASURES},
        **{f"error_{measure}": ours[measure] / measured[measure] - 1 for measure in MEASURES},
        "front_end": predicted.front_end_s,
    }


def _errors_of(part: pd.DataFrame, by: str, value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"by": by, "value": value, "points": len(part)}
    for measure in MEASURES:
        errors = part[f"error_{measure}"]
        found |= {
            f"{measure}_bias": errors.median(),
            f"{measure}_median": errors.abs().median(),
            f"{measure}_p90": errors.abs().quantile(0.9),
        }
    return found


def _records(table: pd.DataFrame) -> list[dict[Any, Any]]:
    return table.astype(object).where(table.notna(), None).to_dict("records")


def validate_published(
    file: str | Path | None = None,
    only: Sequence[str] = (),
    *,
    sample: int | None = None,
    seed: int = 1,
    workers: int | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> PublishedValidation:
    """Replay measured points of real servers as closed loops, and compare the times.

    ``file``: a table in the format of aiconfigurator-core's ``silicon_sample.csv``, by default that one. ``only``: what
    points must have, such as ``model=qwen3-32b,tp=2``. ``sample``: replay so many of those that can be, drawn with
    ``seed``; by default all. ``workers``: processes, by default one for each processor; the result is the same with
    any number. ``progress`` is called with the number of points that are done and that of all. Raises ``UserError``.
    """
    points = chosen_points(read_points(None if file is None else Path(file)), only)
    if not points:
        raise UserError(f"{file}: there are no points in it")
    reasons = _reasons(points)
    refused = [
        Outcome(point, None, reason, tried=False) for point, reason in zip(points, reasons, strict=True) if reason
    ]
    able = [point for point, reason in zip(points, reasons, strict=True) if not reason]
    drawn = np.random.default_rng(seed).permutation(len(able))[:sample]
    done = replay([able[i] for i in sorted(drawn)], workers, progress)
    return PublishedValidation((*done, *refused), len(able), seed)


def _reasons(points: Sequence[Point]) -> list[str | None]:
    """Why each point is not replayed; None for those that are. Of equal measurements only the first is."""
    seen: set[Point] = set()
    found = []
    for point in points:
        same = replace(point, id="", source="")
        found.append(why_not(point) or (_AGAIN if same in seen else None))
        seen.add(same)
    return found
