"""Passes from published tables of the kernels of one layer.

The format is that of LLMServingSim's profiler (https://github.com/casys-kaist/LLMServingSim, ``profiler/``): CUDA
events around the kernels of one layer of vLLM, in microseconds. A pass is put together from them as vLLM runs it: once
the embedding, the last norm, the language-model head and the sampler, and in each layer the two norms, the
projections, attention, and the feed-forward network or the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.calibration.published.sampling import PlannedPass
from kvsim.calibration.published.table_making import MeasuredParts, TestedParts
from kvsim.costs.pass_layout import Sample
from kvsim.costs.pass_tables import Together
from kvsim.costs.tables import FloatArray
from kvsim.errors import UserError
from kvsim.model.cache_groups import MemoryShape

if TYPE_CHECKING:
    import pandas as pd

_ONCE = ("embedding", "final_layernorm")
_TWICE = ("layernorm",)
_PROJECTIONS = ("qkv_proj", "rotary_emb", "o_proj")
_FEED_FORWARD = ("gate_up_proj", "act_fn", "down_proj")
_OPTIONAL = ("qk_norm",)
_HEAD = ("lm_head", "sampler")
_COLUMNS = {
    "attention": ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"),
    "dense": ("layer", "tokens", "time_us"),
    "per_sequence": ("layer", "sequences", "time_us"),
    "moe": ("tokens", "activated_experts", "time_us"),
}
_LONGEST_US = 1e8
"""The longest time that a kernel of one layer can plausibly take."""
_GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Tokens of the passes for which vLLM captures CUDA graphs by default (``VllmConfig._set_cudagraph_sizes``): smaller
passes are padded to the next one."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link between devices that share a model by tensor parallelism, or its experts alone."""

    devices: int
    gb_s: float
    """Bandwidth in each direction, 10**9 bytes/s."""
    latency_us: float
    """Latency of each message, microseconds."""
    experts: bool = False
    """Whether they divide the experts and nothing else."""

    def all_reduce_s(self, size: FloatArray) -> FloatArray:
        """Seconds of an all-reduce of ``size`` bytes by a ring: each device sends 2 (n - 1) times an n-th of them."""
        messages = 2 * (self.devices - 1)
        return messages * (size / self.devices / (self.gb_s * 1e9) + self.latency_us * 1e-6)


@dataclass(frozen=True)
class LayerTables:
    """The tables of one model on one device."""

    folder: Path
    meta: dict[str, Any]
    """What ``meta.yaml`` says; empty where there is none."""
    dense: pd.DataFrame
    """Seconds of each layer by tokens: index tokens, one column per layer."""
    head: pd.DataFrame
    """Seconds of ``lm_head`` and ``sampler`` by sequences."""
    attention: pd.DataFrame
    """Columns prefill_chunk, kv_prefill, n_decode, kv_decode (tokens), seconds."""
    moe: pd.DataFrame | None
    """Columns tokens, activated_experts, seconds."""

    def parts(
        self, shape: MemoryShape, *, most_cells: int, link: Link | None = None, graphs: bool = True
    ) -> tuple[MeasuredParts, TestedParts]:
        """What the parts of passes take in all layers of the model, and how it is tested.

        ``most_cells``: tokens that the device's cache holds: passes with more of them cannot happen, and are left out.
        ``link``: between the devices that share the model, of whose parts the tables are. ``graphs``: pad small passes
        as vLLM's CUDA graphs do. Raises ``UserError`` if the tables are not those of such a model.
        """
        if bool(shape.n_experts) != (self.moe is not None):
            what = (
                "has experts, but there is no moe.csv" if shape.n_experts else "has no experts, but there is a moe.csv"
            )
            raise UserError(f"{self.folder}: {shape.name} {what}")
        n_layers = shape.n_layers
        rows = self.attention.assign(seconds=n_layers * self.attention["seconds"])
        grid, others = _grid_of(rows)
        tokens = _steps(self.dense.index) if graphs else self.dense.index.to_numpy()
        work = dict(zip(tokens.tolist(), self._work(shape, tokens, link, graphs).tolist(), strict=True))
        parts = self._parts_of(grid, work)
        if not others.empty:
            return parts, TestedParts(parts, self._passes(shape, others, most_cells, link, graphs))
        fewer = _thinned(grid)
        passes = self._passes(shape, grid.drop(fewer.index), most_cells, link, graphs)
        return parts, TestedParts(self._parts_of(fewer, work), passes)

    def _parts_of(self, grid: pd.DataFrame, work: dict[int, float]) -> MeasuredParts:
        prompts, decodes = grid[grid["n_decode"] == 0], grid[grid["prefill_chunk"] == 0]
        if prompts.empty or decodes.empty:
            missing = "prefill_chunk" if prompts.empty else "n_decode"
            raise UserError(f"{self.folder}: attention.csv has no rows with {missing} alone")
        return MeasuredParts(
            work=work,
            prompt_work=None,
            head=dict(zip(self.head.index.tolist(), self.head.sum(axis=1).tolist(), strict=True)),
            decode=_by_two(decodes[decodes["kv_decode"] > 0], "n_decode", "kv_decode"),
            prompt=_by_two(prompts, "prefill_chunk", "kv_prefill"),
            together=_together(grid, prompts, decodes),
        )

    def _work(self, shape: MemoryShape, tokens: FloatArray, link: Link | None, graphs: bool) -> FloatArray:
        """All but attention and head, in seconds, by tokens."""
        run = _padded(tokens) if graphs else tokens.astype(float)
        layer = 2 * self._dense(_TWICE, run) + self._dense((*_PROJECTIONS, *_OPTIONAL), run)
        if self.moe is not None:
            layer += self._experts(shape, run, link.devices if link is not None and link.experts else 1)
        else:
            layer += self._dense(_FEED_FORWARD, run)
        seconds = self._dense(_ONCE, run) + shape.n_layers * layer
        if link is not None and link.experts:
            # Before the experts tokens are gathered, behind them reduced and scattered: an all-reduce of all tokens.
            seconds += shape.n_layers * link.all_reduce_s(2 * shape.d_model * link.devices * run)
        elif link is not None:
            # After attention and the feed-forward network of each layer, and after the embedding.
            seconds += (2 * shape.n_layers + 1) * link.all_reduce_s(2 * shape.d_model * run)
        return seconds

    def _passes(
        self, shape: MemoryShape, rows: pd.DataFrame, most_cells: int, link: Link | None, graphs: bool
    ) -> list[Sample]:
        """Whole passes, each with the attention of a row that is in seconds of all layers."""
        tokens = (rows["prefill_chunk"] + rows["n_decode"]).to_numpy()
        cells = rows["prefill_chunk"] + rows["kv_prefill"] + rows["n_decode"] * rows["kv_decode"]
        rows = rows[(tokens >= 1) & (tokens <= int(self.dense.index.max())) & (cells <= most_cells)]
        tokens = (rows["prefill_chunk"] + rows["n_decode"]).to_numpy()
        chunks = rows["n_decode"].to_numpy() + (rows["prefill_chunk"].to_numpy() > 0)
        seconds = self._work(shape, tokens, link, graphs) + rows["seconds"].to_numpy()
        seconds += _interpolated(self.head, chunks)
        columns = [rows[name].tolist() for name in _COLUMNS["attention"][:4]]
        return [
            PlannedPass(int(prompt > 0), prompt, cached, decodes, context).sample(float(took), i)
            for i, (prompt, cached, decodes, context, took) in enumerate(zip(*columns, seconds, strict=True))
        ]

    def adapted(self, measured: MemoryShape, shape: MemoryShape) -> tuple[LayerTables, tuple[str, ...]]:
        """The tables of a model whose attention has the same shape as the measured one's, and what was inferred.

        Attention and its projections are the same kernels then. The feed-forward network is scaled by its width, the
        head by the vocabulary; norms of queries and keys, if only the other model has them, take as long as their
        rotation. Raises ``UserError`` if attention differs, or either model has experts.
        """
        if _attention_of(shape) != _attention_of(measured) or shape.n_experts or measured.n_experts:
            raise UserError(
                f"{self.folder}: the tables are of {measured.name}; those of {shape.name} cannot be inferred from "
                "them, since heads or width differ or there are experts"
            )
        dense, head = self.dense.copy(), self.head.copy()
        wider, larger = shape.d_ff / measured.d_ff, shape.vocabulary / measured.vocabulary
        dense[list(_FEED_FORWARD)] *= wider
        head *= larger
        said = [
            f"The tables are of {measured.name}, whose attention has the same shape. The feed-forward network is "
            f"scaled by {wider:.3f}, the head and the sampler by {larger:.3f}."
        ]
        if shape.qk_norm and "qk_norm" not in dense.columns:
            dense["qk_norm"] = dense["rotary_emb"]
            said.append("Norms of queries and keys were not measured: they are taken to cost what their rotation does.")
        elif "qk_norm" in dense.columns and not shape.qk_norm:
            dense = dense.drop(columns="qk_norm")
        return replace(self, dense=dense, head=head), tuple(said)

    def _dense(self, layers: Sequence[str], tokens: FloatArray) -> FloatArray:
        """Seconds of some layers together, by tokens; shape (len(tokens),)."""
        return _interpolated(self.dense[[name for name in layers if name in self.dense.columns]], tokens)

    def _experts(self, shape: MemoryShape, tokens: FloatArray, ranks: int) -> FloatArray:
        """The block of experts, with as many of them activated as tokens that choose evenly activate on average.

        ``ranks``: devices that divide them, each with as many tokens. A device then has an n-th of the experts, and of
        all choices of n times as many tokens an n-th, as many as its own tokens make.
        """
        from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator

        assert self.moe is not None
        all_active = shape.n_experts * (1 - (1 - shape.experts_per_token / shape.n_experts) ** (ranks * tokens))
        active = all_active / ranks
        points = np.log(self.moe[["tokens", "activated_experts"]].to_numpy(dtype=float))
        asked = np.log(np.stack([tokens, active], axis=1))
        inside = LinearNDInterpolator(points, self.moe["seconds"].to_numpy())(asked)
        nearest = NearestNDInterpolator(points, self.moe["seconds"].to_numpy())(asked)
        return np.where(np.isnan(inside), nearest, inside)


def _grid_of(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows that lie on one grid, and those that do not.

    Profilers measure several grids, or one with points added. That of powers of two is taken if it is whole, else all.
    """
    import pandas as pd

    axes = _COLUMNS["attention"][:4]
    on = pd.Series(True, index=rows.index)
    for axis in ("prefill_chunk", "kv_prefill", "kv_decode"):
        on &= (rows[axis] & (rows[axis] - 1)) == 0
    if not on.any() or not _is_whole(rows[on]):
        on = pd.Series(True, index=rows.index)
    grid = rows[on].drop_duplicates(list(axes)).sort_values(list(axes), ignore_index=True)
    return grid, rows[~on]


def _thinned(grid: pd.DataFrame) -> pd.DataFrame:
    """The grid without every second number of cells but the largest, so that those left out lie between others."""
    kept = grid
    for axis in ("kv_prefill", "kv_decode"):
        numbers = sorted(set(grid[axis]) - {0})
        kept = kept[~kept[axis].isin(numbers[1:-1:2])]
    return kept


def _is_whole(rows: pd.DataFrame) -> bool:
    """Whether prompts beside decodes were measured in all combinations."""
    mixed = rows[(rows["prefill_chunk"] > 0) & (rows["n_decode"] > 0)]
    sizes = [mixed[axis].nunique() for axis in _COLUMNS["attention"][:4]]
    return len(mixed.drop_duplicates(list(_COLUMNS["attention"][:4]))) == int(np.prod(sizes)) > 0


def _by_two(rows: pd.DataFrame, one: str, other: str) -> dict[tuple[int, int], float]:
    return {(int(a), int(b)): float(s) for a, b, s in zip(rows[one], rows[other], rows["seconds"], strict=True)}


def _together(grid: pd.DataFrame, prompts: pd.DataFrame, decodes: pd.DataFrame) -> Together | None:
    """How much longer attention takes where prompts and decodes are in one pass; None unless that was measured."""
    mixed = grid[(grid["prefill_chunk"] > 0) & (grid["n_decode"] > 0)]
    if not _is_whole(grid):
        return None
    alone = prompts.set_index(["prefill_chunk", "kv_prefill"])["seconds"]
    beside = decodes.set_index(["n_decode", "kv_decode"])["seconds"]
    both = mixed.join(alone.rename("prompt_s"), on=["prefill_chunk", "kv_prefill"])
    both = both.join(beside.rename("decode_s"), on=["n_decode", "kv_decode"]).dropna()
    axes = [tuple(sorted({int(n) for n in mixed[axis]})) for axis in _COLUMNS["attention"][:4]]
    if len(both) < len(mixed) or min(map(len, axes)) < 2:
        return None
    ratios = (both["seconds"] / (both["prompt_s"] + both["decode_s"])).tolist()
    tokens, cached, sequences, cells = axes
    return Together(
        tokens=tokens, cached=cached, sequences=sequences, cells=cells, ratios=tuple(round(r, 3) for r in ratios)
    )


def _steps(measured: pd.Index) -> FloatArray:
    """Tokens at which work changes: each size of CUDA graphs, one more, and what was measured beyond."""
    sizes = np.array(_GRAPH_SIZES)
    most = int(measured.max())
    both = np.unique(np.concatenate([sizes, sizes[:-1] + 1, measured[measured > sizes[-1]].to_numpy(), [1]]))
    return both[both <= most]


def _interpolated(table: pd.DataFrame, at: FloatArray) -> FloatArray:
    """The sum of a table's columns between its rows; shape (len(at),)."""
    found: FloatArray = np.interp(at, table.index.to_numpy(dtype=float), table.sum(axis=1).to_numpy())
    return found


def _attention_of(shape: MemoryShape) -> tuple[object, ...]:
    """What the kernels of attention and of its projections depend on; the number of layers is none of it."""
    rows = {(group.kind, group.k_row, group.v_row, group.k_head, group.v_head, group.window) for group in shape.groups}
    return shape.d_model, shape.n_heads, rows


def read_layer_tables(folder: str | Path) -> LayerTables:
    """Read the tables of a folder, as CSV or gzipped CSV.

    Raises ``UserError`` that names the file, the column or the row, what was wrong and what is accepted.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; one with attention.csv, dense.csv and per_sequence.csv is expected")
    attention = _table(folder, "attention").rename(columns={"time_us": "seconds"})
    dense, head = _by_layer(folder, "dense", "tokens"), _by_layer(folder, "per_sequence", "sequences")
    moe = None
    if _file(folder, "moe") is not None:
        moe = _table(folder, "moe").rename(columns={"time_us": "seconds"})
    needed = [*_ONCE, *_TWICE, *_PROJECTIONS, *(() if moe is not None else _FEED_FORWARD)]
    for file, table, layers in (("dense", dense, needed), ("per_sequence", head, _HEAD)):
        if missing := [layer for layer in layers if layer not in table.columns]:
            raise UserError(f"{_file(folder, file)}: no rows of the layer {missing[0]}; needed are {', '.join(layers)}")
    return LayerTables(folder, _meta(folder), dense, head, attention, moe)


def _file(folder: Path, name: str) -> Path | None:
    return next((path for end in ("csv", "csv.gz") if (path := folder / f"{name}.{end}").is_file()), None)


def _table(folder: Path, name: str) -> pd.DataFrame:
    """One table, checked: all columns there, all counts whole numbers from 0, all times above 0, in seconds."""
    import pandas as pd

    path = _file(folder, name)
    if path is None:
        raise UserError(f"{folder}: no {name}.csv or {name}.csv.gz in it")
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError, EOFError) as e:
        raise UserError(f"{path}: cannot be read as CSV: {str(e).splitlines()[0]}") from None
    columns = _COLUMNS[name]
    for column in columns:
        if column not in table.columns:
            raise UserError(f"{path}: no column {column!r}; needed are {', '.join(columns)}")
    table = table[list(columns)].copy()
    if table.empty:
        raise UserError(f"{path}: no rows")
    for column in columns:
        if column == "layer":
            continue
        numbers = pd.to_numeric(table[column], errors="coerce")
        time = column == "time_us"
        least = (numbers > 0) & (numbers <= _LONGEST_US) if time else (numbers >= 0) & (numbers % 1 == 0)
        bad = ~(np.isfinite(numbers) & least)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            kind = f"a time above 0 and up to {_LONGEST_US:g}, in microseconds," if time else "a whole number from 0"
            raise UserError(f"{path}: row {row + 2}: {column} is {table[column].iloc[row]!s:.40}; {kind} is expected")
        table[column] = numbers * 1e-6 if time else numbers.astype(int)
    return table


def _by_layer(folder: Path, name: str, index: str) -> pd.DataFrame:
    """Seconds by ``index``, one column per layer; values in between rows of other layers are interpolated."""
    table = _table(folder, name)
    wide = table.pivot_table(index=index, columns="layer", values="time_us", aggfunc="mean")
    return wide.interpolate(method="index", limit_direction="both")


def _meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.yaml"
    if not path.is_file():
        return {}
    import yaml

    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise UserError(f"{path}: not YAML: {str(e).splitlines()[0]}") from None
    if not isinstance(meta, dict):
        raise UserError(f"{path}: not a table of keys and values")
    return meta


def _padded(tokens: FloatArray) -> FloatArray:
    """Tokens of the passes that are run: those of the next CUDA graph, if there is one as large."""
    sizes = np.array(_GRAPH_SIZES)
    next_size = sizes[np.minimum(np.searchsorted(sizes, tokens), len(sizes) - 1)]
    return np.where(tokens <= sizes[-1], next_size, tokens).astype(float)
