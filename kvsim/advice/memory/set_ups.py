"""Where an engine's memory goes, and what reduces it: a naive set-up, then remedies applied cumulatively.

The naive set-up is a CPU server that holds its weights twice (as float32 and as converted), fills a cache for the
longest context of every slot with zeros, has separate work buffers for each layer, and uses NumPy's huge pages. Each
set-up is built in its own process, serves the same prompts with the real engine, and is measured
(``real_engine/footprint.py``); the result is compared with the memory that it should need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.errors import UserError, no_such
from kvsim.model.engine_shapes import STORAGES, Storage, gguf_path, shape_of
from kvsim.results import results_folder
from real_engine.footprint import Footprint, SetUp, available_bytes, estimate, measure

if TYPE_CHECKING:
    import pandas as pd
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
"""The fields of a ``SetUp`` that each remedy changes. ``growing-cache`` and ``paged-cache`` replace each other, and so
do ``f16``, ``int8`` and ``mapped``."""

_DEFAULT_REMEDIES = ("merged-buffers", "small-pages", "growing-cache", "once", "f16", "int8", "mapped")
"""``mapped`` only for a model from a file. Small pages come before the growing cache, because with huge pages it may
take more memory than a reserved one."""
_PARTS = ("weights", "cache", "work", "runtime")
_MOST = 1 << 20
"""Maximum number of slots, and of tokens in any argument."""


@dataclass(frozen=True)
class MemoryReport:
    """Memory of several set-ups, each with its remedy and all earlier ones applied."""

    model: str
    setups: dict[str, SetUp]
    """By name: ``naive`` first, then ``+ REMEDY``."""
    footprints: dict[str, Footprint]
    """The measured memory of each set-up, by name."""

    @property
    def table(self) -> pd.DataFrame:
        """One row per set-up, in bytes.

        ``weights``, ``cache``, ``work`` and ``runtime`` are measured and add up to ``resident``, at the peak of the
        run. ``peak`` is the largest resident size at any time, loading included. ``needed_...`` is the theoretical
        need of the set-up, without the runtime. ``ratio`` is the measured memory without the runtime divided by
        ``needed``; ``ratio_with_runtime`` is ``resident`` divided by ``needed``.
        """
        import pandas as pd

        rows = []
        for name, f in self.footprints.items():
            needed = {f"needed_{part}": size for part, size in asdict(f.needed).items()}
            measured = {**asdict(f.measured), "runtime": f.runtime, "resident": f.resident, "peak": f.peak}
            ratios = {"ratio": f.ratio, "ratio_with_runtime": f.ratio_with_runtime}
            rows.append({"setup": name, **measured, **needed, "needed": f.needed.total, **ratios})
        return pd.DataFrame(rows).set_index("setup")

    @property
    def stages(self) -> pd.DataFrame:
        """One row per set-up and stage: bytes at the end of the stage, and the ``peak`` within it."""
        import pandas as pd

        rows = [{"setup": name, **asdict(r)} for name, f in self.footprints.items() for r in f.readings]
        return pd.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints; sizes in bytes."""
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
        """Draw a bar per set-up, divided into parts, with a line at its theoretical need."""
        import matplotlib as mpl
        import numpy as np
        import seaborn as sns
        from matplotlib.figure import Figure

        table = self.table
        unit, scale = ("GB", 1e9) if table["resident"].max() >= 1e9 else ("MB", 1e6)
        colours = [*sns.color_palette("colorblind", len(_PARTS) - 1), (0.75, 0.75, 0.75)]
        with mpl.rc_context({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")}):
            figure = Figure(figsize=(max(7.0, 2.5 + 1.3 * len(table)), 6), layout="constrained")
            axis = figure.subplots()
            below = np.zeros(len(table))
            for part, colour in zip(_PARTS, colours, strict=True):
                size = table[part].to_numpy(dtype=float) / scale
                axis.bar(range(len(table)), size, bottom=below, color=colour, width=0.62, label=part)
                below = below + size
            for at, (need, top, ratio) in enumerate(zip(table["needed"], below, table["ratio"], strict=True)):
                label = "_" if at else "needed"  # The legend omits labels that begin with _; one entry is enough.
                axis.hlines(need / scale, at - 0.42, at + 0.42, color="black", linewidth=2.2, label=label)
                text = axis.annotate(f"{ratio:.2f}x", (at, top), (0, 6), textcoords="offset points", ha="center")
                text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
            axis.set_xticks(range(len(table)), [name.replace("-", "-\n") for name in table.index])
            axis.set(ylabel=f"resident {unit} at the peak of the run", ylim=(0, 1.1 * below.max()))
            axis.grid(visible=False, axis="x")
            axis.legend(loc="upper right", frameon=True)
            one = next(iter(self.setups.values()))
            served = f"{one.slots} slots of {one.context:,} tokens, {one.tokens:,} stored in each"
            axis.set_title(f"{self.model}: {served}\nabove each bar: measured / needed, both without the runtime")
        return figure

    def save(self, folder: str | Path) -> list[Path]:
        """Write the tables and the figure to a folder and return the files. Raises ``UserError``."""
        with results_folder(folder) as out:
            out.table("memory.csv", self.table, index=True)
            out.table("memory-stages.csv", self.stages)
            out.picture("memory.png", self.plot)
        return out.written


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
    """Measure the naive set-up of a model, then each remedy on top of the earlier ones.

    ``remedies``: names from ``REMEDIES`` in the order in which to apply them, each once; by default all that suit the
    model. Each of ``slots`` has room for ``context`` tokens and stores ``tokens`` of them; a pass takes at most
    ``n_ubatch`` tokens. K and V are stored as ``type_k`` and ``type_v``. ``ready`` is called after all checks and
    before the first measurement, ``progress`` with the share done. Raises ``UserError``.
    """
    _check_arguments(slots, context, tokens, n_ubatch, type_k, type_v)
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
    setups = dict(_cumulative_setups(naive, remedies))
    _check_available(setups)
    if ready is not None:
        ready()
    footprints = {}
    for name, setup in setups.items():
        footprints[name] = measure(setup)
        if progress is not None:
            progress(len(footprints) / len(setups))
    return MemoryReport(model, setups, footprints)


def _check_arguments(slots: int, context: int, tokens: int, n_ubatch: int, type_k: Storage, type_v: Storage) -> None:
    for name, kind in (("type_k", type_k), ("type_v", type_v)):
        if kind not in STORAGES:
            raise UserError(f"{name}: {no_such('type', kind, STORAGES)}")
    for name, value, least in (("slots", slots, 1), ("context", context, 2), ("n_ubatch", n_ubatch, 1)):
        if not least <= value <= _MOST:
            raise UserError(f"{name} is {value}; a whole number from {least} to {_MOST} is accepted")
    if not 2 <= tokens <= context:
        raise UserError(f"{tokens} tokens in each slot; from 2 to its context, {context}, are accepted")


def _cumulative_setups(naive: SetUp, remedies: Sequence[str] | None) -> Iterator[tuple[str, SetUp]]:
    """The naive set-up, then the set-ups with one more remedy each."""
    has_file = gguf_path(naive.model) is not None
    if remedies is None:
        remedies = [name for name in _DEFAULT_REMEDIES if has_file or name != "mapped"]
    yield "naive", naive
    setup = naive
    for name in dict.fromkeys(remedies):
        if name not in REMEDIES:
            raise UserError(no_such("remedy", name, REMEDIES))
        if name == "mapped" and not has_file:
            raise UserError(f"remedy mapped: the weights of {naive.model} are random, not read from a file")
        setup = replace(setup, **REMEDIES[name])
        yield f"+ {name}", setup


def _check_available(setups: dict[str, SetUp]) -> None:
    """Refuse set-ups that need more memory than this machine has available."""
    available = available_bytes()
    for name, setup in setups.items():
        needed = estimate(setup, shape_of(setup.model))
        if needed > available:
            raise UserError(
                f"{name}: the set-up needs {needed / 1e9:.1f} GB, this machine has {available / 1e9:.1f} GB available; "
                "try fewer slots, a smaller context or a smaller model"
            )
