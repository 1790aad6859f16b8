"""Where an engine's memory goes, and what brings it down: a naive set-up, then one remedy after another.

Naive is a CPU server that holds its weights twice, as float32 numbers from which they were made and as made, fills a
cache for the longest context of every slot with zeros, has work buffers for each layer, and leaves pages to NumPy. Each
set-up is built in a process of its own, serves the same prompts with the real engine, and is measured
(``real_engine/footprint.py``); what it takes stands beside what it should take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvsim.errors import UserError
from kvsim.model.engine_shapes import STORAGES, Storage, gguf_path, shape_of
from kvsim.results import writable
from real_engine.footprint import Footprint, SetUp, available_bytes, estimate, measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REMEDIES: dict[str, dict[str, Any]] = {
    "merged-buffers": {"buffers": "merged"},
    "growing-cache": {"cache": "growing"},
    "paged-cache": {"cache": "paged"},
    "small-pages": {"huge_pages": False},
    "once": {"twice": False},
    "f16": {"weights": "f16"},
    "int8": {"weights": "int8"},
    "mapped": {"weights": "mapped"},
}
"""What each remedy changes in a ``SetUp``. ``growing-cache`` and ``paged-cache`` replace one another, and so do
``f16``, ``int8`` and ``mapped``."""

_BY_DEFAULT = ("merged-buffers", "small-pages", "growing-cache", "once", "f16", "int8", "mapped")
"""``mapped`` where there is a file. Small pages come before what grows: in huge ones a growing cache may take more than
a reserved one."""
_PARTS = ("weights", "cache", "work", "runtime")
_MOST = 1 << 20
"""Of slots, and of tokens of any kind."""


@dataclass(frozen=True)
class MemoryReport:
    """Set-ups by name, each with its remedy and all those before it, and what they took."""

    model: str
    setups: dict[str, SetUp]
    """``naive`` first, then ``+ REMEDY``."""
    footprints: dict[str, Footprint]
    """Of each set-up."""

    @property
    def table(self) -> pd.DataFrame:
        """A row for each set-up; bytes, and ratios.

        ``weights``, ``cache``, ``work``, ``runtime``: measured; together ``resident``, at the peak of the run.
        ``peak``: the most that was ever resident, while loading too. ``needed_...``: the theoretical need of that
        set-up, which counts no runtime. ``ratio``: measured without the runtime over needed; ``ratio_with_runtime``:
        all that is resident over needed.
        """
        rows = []
        for name, f in self.footprints.items():
            needed = {f"needed_{part}": size for part, size in asdict(f.needed).items()}
            measured = {**asdict(f.measured), "runtime": f.runtime, "resident": f.resident, "peak": f.peak}
            ratios = {"ratio": f.ratio, "ratio_with_runtime": f.ratio_with_runtime}
            rows.append({"setup": name, **measured, **needed, "needed": f.needed.total, **ratios})
        return pd.DataFrame(rows).set_index("setup")

    @property
    def stages(self) -> pd.DataFrame:
        """A row for each set-up and stage; bytes at its end, but for ``peak``, the most since the stage before."""
        rows = [{"setup": name, **asdict(r)} for name, f in self.footprints.items() for r in f.readings]
        return pd.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints; sizes in bytes."""
        return {
            "model": self.model,
            "setups": [
                {
                    "name": name,
                    "setup": asdict(self.setups[name]),
                    "measured": {**asdict(f.measured), "runtime": f.runtime},
                    "needed": asdict(f.needed),
                    "arrays": asdict(f.arrays),
                    "resident": f.resident,
                    "peak": f.peak,
                    "ratio": f.ratio,
                    "ratio_with_runtime": f.ratio_with_runtime,
                    "stages": [asdict(reading) for reading in f.readings],
                }
                for name, f in self.footprints.items()
            ],
        }

    def plot(self) -> Figure:
        """A bar for each set-up, by part, and a line across it at its theoretical need."""
        import matplotlib as mpl
        import seaborn as sns
        from matplotlib.figure import Figure

        table = self.table
        unit, scale = ("GB", 1e9) if table["resident"].max() >= 1e9 else ("MB", 1e6)
        colours = [*sns.color_palette("colorblind", len(_PARTS) - 1), (0.75, 0.75, 0.75)]
        with mpl.rc_context({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")}):
            figure = Figure(figsize=(max(7.0, 2.5 + 1.3 * len(table)), 6), layout="constrained")
            axis = figure.subplots()
            below = pd.Series(0.0, index=table.index)
            for part, colour in zip(_PARTS, colours, strict=True):
                size = table[part] / scale
                axis.bar(range(len(table)), size, bottom=below, color=colour, width=0.62, label=part)
                below += size
            for at, (need, top, ratio) in enumerate(zip(table["needed"], below, table["ratio"], strict=True)):
                label = "_" if at else "needed"  # One entry in the legend; it leaves out what begins with _.
                axis.hlines(need / scale, at - 0.42, at + 0.42, color="black", linewidth=2.2, label=label)
                text = axis.annotate(f"{ratio:.2f}x", (at, top), (0, 6), textcoords="offset points", ha="center")
                text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
            axis.set_xticks(range(len(table)), [name.replace("-", "-\n") for name in table.index])
            axis.set(ylabel=f"resident {unit} at the peak of the run", ylim=(0, 1.1 * below.max()))
            axis.grid(visible=False, axis="x")
            axis.legend(loc="upper right", frameon=True)
            one = next(iter(self.setups.values()))
            served = f"{one.slots} slots of {one.context:,} tokens, {one.tokens:,} held in each"
            axis.set_title(f"{self.model}: {served}\nabove each bar: measured over needed, both without the runtime")
        return figure

    def save(self, folder: str | Path) -> list[Path]:
        """Write the tables and the picture; the files written. Raises ``UserError``."""
        target = writable(folder)
        written = [target / "memory.csv", target / "memory-stages.csv", target / "memory.png"]
        try:
            self.table.to_csv(written[0])
            self.stages.to_csv(written[1], index=False)
            self.plot().savefig(written[2], dpi=130)
        except OSError as e:
            raise UserError(f"{target}: cannot write results: {e.strerror}") from None
        return written


def memory(
    model: str = "small",
    remedies: Sequence[str] | None = None,
    *,
    slots: int = 4,
    context: int = 2048,
    tokens: int = 256,
    n_ubatch: int = 128,
    type_k: Storage = "f32",
    type_v: Storage = "f32",
    seed: int = 0,
    ready: Callable[[], object] | None = None,
    progress: Callable[[float], None] | None = None,
) -> MemoryReport:
    """Measure the naive set-up of a model, then each remedy on top of those before it.

    ``remedies``: names from ``REMEDIES`` in the order to apply them, each once; by default all that suit the model.
    ``slots`` of ``context`` tokens at most hold ``tokens`` each; passes take ``n_ubatch`` tokens at most. K and V are
    kept as ``type_k`` and ``type_v``. ``ready`` is called when all is checked and before anything is measured,
    ``progress`` is told the share done. Raises ``UserError``.
    """
    for name, kind in (("type_k", type_k), ("type_v", type_v)):
        if kind not in STORAGES:
            raise UserError(f"{name}: there is no {kind!r}; there are {', '.join(STORAGES)}")
    for name, value, least in (("slots", slots, 1), ("context", context, 2), ("n_ubatch", n_ubatch, 1)):
        if not least <= value <= _MOST:
            raise UserError(f"{name} is {value}; a whole number from {least} to {_MOST} is accepted")
    if not 2 <= tokens <= context:
        raise UserError(f"{tokens} tokens in each slot; from 2 to its context, {context}, are accepted")
    naive = SetUp(
        model,
        twice=True,
        cache="reserved",
        buffers="repeated",
        huge_pages=True,
        type_k=type_k,
        type_v=type_v,
        slots=slots,
        context=context,
        tokens=tokens,
        n_ubatch=n_ubatch,
        seed=seed,
    )
    setups = dict(_waterfall(naive, remedies))
    _check_room(setups)
    if ready is not None:
        ready()
    footprints = {}
    for name, setup in setups.items():
        footprints[name] = measure(setup)
        if progress is not None:
            progress(len(footprints) / len(setups))
    return MemoryReport(model, setups, footprints)


def _waterfall(naive: SetUp, remedies: Sequence[str] | None) -> Iterator[tuple[str, SetUp]]:
    """The naive set-up, and what remedies make of it, one after another."""
    has_file = gguf_path(naive.model) is not None
    if remedies is None:
        remedies = [name for name in _BY_DEFAULT if has_file or name != "mapped"]
    yield "naive", naive
    setup = naive
    for name in dict.fromkeys(remedies):
        if name not in REMEDIES:
            raise UserError(f"no remedy called {name!r}; there are {', '.join(REMEDIES)}")
        if name == "mapped" and not has_file:
            raise UserError(f"remedy mapped: the weights of {naive.model} are drawn, not read from a file")
        setup = replace(setup, **REMEDIES[name])
        yield f"+ {name}", setup


def _check_room(setups: dict[str, SetUp]) -> None:
    """Refuse what this machine cannot hold now."""
    there = available_bytes()
    for name, setup in setups.items():
        needed = estimate(setup, shape_of(setup.model))
        if needed > there:
            raise UserError(
                f"{name}: the set-up would take {needed / 1e9:.1f} GB, this machine has {there / 1e9:.1f} GB left; "
                "try fewer slots, a smaller context or a smaller model"
            )
