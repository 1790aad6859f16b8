"""The engine's speed compared with the machine's: ``python -m benchmarks.engine [--model small] [--threads 1 2]``.

The machine's speed is measured in the same run, interleaved round by round, so that slow moments affect both:

- *gemv*: all weight matrices of the model applied to one row; bytes of weights per second.
- *gemm*: the same for the rows of one pass of the prompt, the head for one row; operations per second.
- *copy* and *read*: ``np.copyto``, and the BLAS's dot product of an array with itself; arrays larger than the last
  cache. Bytes copied (each read and written), bytes read.

A share is a ratio of seconds of the same round; reported are the median over the rounds and the range.

- *decode* of gemv: seconds of gemv over those of a token, including its placement by the policy.
- *attention* of read: seconds of a plain read, head by head after a read of the weights, of the K and V that the
  longest context has beyond the shortest; over the additional seconds of a token.
- *prompt* of gemm: seconds of the products alone over those of the prompt.
- *moves* of copy: seconds of ``np.copyto`` of as many bytes between the same arrays, in one piece for each array; over
  those of the moves. They are interleaved, and the fastest turn of each counts, since the first find cold caches.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from benchmarks.copies import COPY_KERNELS
from kvsim.machine import blas, processor, system_load
from kvsim.model.engine_shapes import STORAGES, Storage
from policies import CacheConfig, Chunk, Moves, Policy, SequencePlan, available
from real_engine import Engine, Transformer, load_model
from real_engine.storage import store
from real_engine.weights import Matrix

POLICIES = ("contiguous", "paged", "oracle")
CONTEXTS = (128, 1024, 4000)
NARROWED = 1024
"""Context at which every storage type is measured."""
STEPS = 3
"""Tokens decoded, and repetitions of products, in each round, after an untimed one."""
PROMPT, PASS = 512, 256
"""Tokens of the prompt, and of each of its forward passes."""
MOVED_CELLS = 4096
"""Cells of the cache in which runs are moved."""
TURNS = 5
ROUNDS = 7

MOST_STEPS = 1024
"""Tokens that an engine has room to decode in all."""

Case = Callable[[], float]
"""Does some work and returns its seconds."""


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def matrices(model: Transformer) -> list[Matrix]:
    """Weight matrices of the layers, without the head."""
    return [m for layer in model.layers for m in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)]


def products(model: Transformer, rows: int) -> Case:
    """All matrix products of a pass that wants one row's logits."""
    rng = np.random.default_rng(1)
    given = {m.inputs: rng.standard_normal((rows, m.inputs)).astype(np.float32) for m in matrices(model)}
    last = rng.standard_normal((1, model.head.inputs)).astype(np.float32)

    def work() -> None:
        for matrix in matrices(model):
            matrix.apply(given[matrix.inputs])
        model.head.apply(last)

    def case() -> float:
        work()
        return statistics.median(seconds(work) for _ in range(STEPS))

    return case


def beyond_the_caches() -> int:
    """Bytes that do not fit into the last level of the processor's cache."""
    level = "SC_LEVEL3_CACHE_SIZE"
    stated = os.sysconf(level) if level in getattr(os, "sysconf_names", {}) else 0
    return max(stated, 1 << 26) + (1 << 24)


class SingleSequence:
    """An engine and a policy with one sequence."""

    def __init__(self, model: Transformer, policy: str, storage: Storage, tokens: int):
        self.model, self.tokens = model, tokens
        config = CacheConfig(
            cells=-(-tokens // 64) * 64 + 64,
            n_ubatch=PASS,
            sequences=1,
            max_tokens=tokens,
            n_layers=model.shape.n_layers,
            for_any_layout=True,
        )
        self.policy: Policy = available()[policy](config)
        self.engine = Engine(model, self.policy.groups, self.policy.kernel, 1, type_k=storage, type_v=storage)
        self.at = 0
        self.open()

    def open(self) -> None:
        self.policy.open(0, SequencePlan(PASS, self.tokens, self.tokens))
        self.at = 0

    def fill(self, context: int) -> None:
        """Place that many tokens and fill their K and V with random numbers, which cost the same as real ones."""
        while self.at < context:
            chunk = Chunk(0, self.at, min(PASS, context - self.at))
            self.policy.allocate([chunk])
            self.at += chunk.n
        shape = self.model.shape
        numbers = np.random.default_rng(2).standard_normal((shape.n_kv_heads, context, shape.d_head))
        for kept in (*self.engine.keys, *self.engine.values):
            kept.write(slice(0, context), numbers.astype(np.float32))

    def run(self, n: int) -> None:
        """Place and run the next tokens."""
        for batch in self.policy.allocate([Chunk(0, self.at, n)], views=True):
            self.engine.run(np.arange(n) % self.model.shape.vocabulary, batch).argmax(axis=1)
        self.at += n

    def decode(self) -> float:
        self.run(1)
        return statistics.median(seconds(lambda: self.run(1)) for _ in range(STEPS))

    def prompt(self) -> float:
        self.policy.free(0)
        self.open()
        return seconds(lambda: [self.run(PASS) for _ in range(PROMPT // PASS)])


def read_kept(running: SingleSequence, gemv: Case) -> Case:
    """A plain read of the K and V between the shortest context and the longest."""
    arrays = [a for kept in (*running.engine.keys, *running.engine.values) for a in kept.arrays]
    extents = [head[CONTEXTS[0] : CONTEXTS[-1]].reshape(-1) for array in arrays for head in array]

    def work() -> None:
        for extent in extents:
            np.dot(extent, extent)

    def case() -> float:
        gemv()  # Reads the weights, as between two tokens.
        return seconds(work)

    return case


def runs() -> dict[str, Moves]:
    n = MOVED_CELLS
    return {
        "long runs": Moves.from_runs((n // 2 + start, start, n // 8) for start in range(0, n // 2, n // 8)),
        "a long run onto itself": Moves.from_runs([(n // 8, 0, 3 * n // 4)]),
        "runs of 4 cells": Moves.from_runs((2 * start, start, 4) for start in range(4, n // 2, 4)),
    }


def moving(model: Transformer) -> Callable[[Moves], dict[str, float]]:
    """A function that times moves by each copy kernel and by a plain copy."""
    shape = model.shape
    arrays = [a for _ in range(2 * shape.n_layers) for a in store("f32", shape, MOVED_CELLS).arrays]
    flat = [array.reshape(-1) for array in arrays]
    # Not the neighbouring array, which would still be in the second-level cache; and from end to beginning, so that as
    # much memory is touched as by the moves.
    others = flat[shape.n_layers :] + flat[: shape.n_layers]
    for array in arrays:
        array.fill(1)

    def plain(n: int) -> None:
        for source, target in zip(others, flat, strict=True):
            np.copyto(target[:n], source[-n:])

    def measured(moves: Moves) -> dict[str, float]:
        n = moves.n_cells * shape.n_kv_heads * shape.d_head
        ways: dict[str, Callable[[], None]] = {"copyto": partial(plain, n)}
        ways |= {kernel: partial(copy, arrays, moves) for kernel, copy in COPY_KERNELS.items()}
        turns = [{way: seconds(work) for way, work in ways.items()} for _ in range(TURNS)]
        return {way: min(turn[way] for turn in turns) for way in ways}

    return measured


def cases(model: Transformer) -> dict[str, Case]:
    size = beyond_the_caches()
    source, target = (np.full(size // 4, 1, dtype=np.float32) for _ in range(2))
    gemv = products(model, 1)
    found: dict[str, Case] = {
        "gemv": gemv,
        "gemm": products(model, PASS),
        "copy": lambda: seconds(lambda: np.copyto(target, source)),
        "read": lambda: seconds(lambda: np.dot(source, source)),
    }
    for policy in POLICIES:
        tried = [("f32", context) for context in CONTEXTS] + [(s, NARROWED) for s in STORAGES if s != "f32"]
        for storage, context in tried:
            running = SingleSequence(model, policy, storage, context + MOST_STEPS)
            running.fill(context)
            found[f"decode {policy} {storage} {context}"] = running.decode
            if context == CONTEXTS[-1]:
                found["read kept"] = read_kept(running, gemv)
        found[f"prompt {policy}"] = SingleSequence(model, policy, "f32", PROMPT).prompt
    return found


def measure(model: Transformer, threads: list[int], rounds: int) -> dict[str, list[float]]:
    """Seconds of each case in each round; names begin with the number of BLAS threads."""
    own, moved = cases(model), moving(model)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for n in threads:
            with threadpool_limits(n):
                for name, case in own.items():
                    found.setdefault(f"{n} {name}", []).append(case())
        for kind, moves in runs().items():
            for way, took in moved(moves).items():
                found.setdefault(f"{way}, {kind}", []).append(took)
    return found


Figure = dict[str, object]


def figures(model: Transformer, threads: list[int], found: dict[str, list[float]]) -> list[Figure]:
    """The reported figures: median and range over the rounds, and the share of the machine's speed."""
    shape = model.shape
    weights = sum(matrix.nbytes for matrix in matrices(model)) + model.head.nbytes
    operations = 2 * (
        PASS * sum(m.inputs * m.outputs for m in matrices(model)) + model.head.inputs * model.head.outputs
    )
    kept = (CONTEXTS[-1] - CONTEXTS[0]) * shape.cell_bytes()
    large, rows = beyond_the_caches(), []

    def add(
        name: str, own: list[float], unit: str, figure: Callable[[float], float], of: str = "", bound: object = None
    ) -> None:
        row: Figure = {"name": name, "unit": unit, **spread(list(map(figure, own)))}
        if isinstance(bound, list):
            row |= {"of": of, "share": spread([b / s for b, s in zip(bound, own, strict=True)])}
        rows.append(row)

    for n in threads:
        by = {name.split(" ", 1)[1]: values for name, values in found.items() if name.startswith(f"{n} ")}
        on = f"{n} thread" if n == 1 else f"{n} threads"
        add(f"gemv, {on}", by["gemv"], "GB/s", lambda s: weights / s / 1e9)
        add(f"gemm of {PASS} rows, {on}", by["gemm"], "GFLOP/s", lambda s: operations / s / 1e9)
        add(f"copy, {on}", by["copy"], "GB/s", lambda s: large / s / 1e9)
        add(f"read, {on}", by["read"], "GB/s", lambda s: large / s / 1e9)
        for name, own in by.items():
            if name.startswith("decode"):
                _, policy, storage, context = name.split(" ")
                described = f"decode at {int(context):,}, {policy}, {storage}, {on}"
                add(described, own, "ms", lambda s: 1e3 * s, "gemv", by["gemv"])
        add(f"read of K and V, {on}", by["read kept"], "GB/s", lambda s: kept / s / 1e9)
        for policy in POLICIES:
            short, long = (by[f"decode {policy} f32 {context}"] for context in (CONTEXTS[0], CONTEXTS[-1]))
            longer = [a - b for a, b in zip(long, short, strict=True)]
            described = f"attention, {CONTEXTS[0]:,} to {CONTEXTS[-1]:,}, {policy}, {on}"
            add(described, longer, "GB/s", lambda s: kept / s / 1e9, "read of K and V", by["read kept"])
        for policy in POLICIES:
            alone = [PROMPT // PASS * s for s in by["gemm"]]
            own = by[f"prompt {policy}"]
            add(f"prompt of {PROMPT}, {policy}, {on}", own, "tokens/s", lambda s: PROMPT / s, "gemm", alone)
    for kind, moves in runs().items():
        size = moves.n_cells * shape.cell_bytes()
        plain = found[f"copyto, {kind}"]
        add(f"copyto beside {kind}", plain, "GB/s", lambda s, size=size: size / s / 1e9)
        for kernel in COPY_KERNELS:
            own = found[f"{kernel}, {kind}"]
            add(f"{kind}, {kernel}", own, "GB/s", lambda s, size=size: size / s / 1e9, "copyto", plain)
    return rows


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def main() -> None:
    """Measure, print a table, and write a JSON file where options."""
    parser = argparse.ArgumentParser(description="The engine's speed beside what the machine gives.")
    parser.add_argument("--model", default="small", help="tiny, small, smollm2, or a GGUF file")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="threads of the matrix products, in turn")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    if options.rounds * len(options.threads) * (STEPS + 1) > MOST_STEPS:
        parser.error(f"{options.rounds} rounds with {len(options.threads)} numbers of threads are too many")
    model = load_model(options.model).transformer
    before = system_load()
    rows = figures(model, options.threads, measure(model, options.threads, options.rounds))
    machine = {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "blas": blas(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load_before": before,
    }
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in (f"{options.model}, {options.rounds} rounds", "median", "", "range", "share", "range", "of"):
        table.add_column(head, justify="left" if head in ("", "of") or "rounds" in head else "right")
    for row in rows:
        digits = ".3g" if row["unit"] != "tokens/s" else ",.0f"
        cells = [str(row["name"]), f"{row['median']:{digits}}", str(row["unit"])]
        cells.append(f"{row['low']:{digits}} to {row['high']:{digits}}")
        share = row.get("share")
        if isinstance(share, dict):
            cells += [f"{share['median']:.2f}", f"{share['low']:.2f} to {share['high']:.2f}", str(row["of"])]
        table.add_row(*cells)
    console = Console(width=140)
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()), style="dim", highlight=False)
    if options.out is not None:
        report = {"model": options.model, "rounds": options.rounds, "machine": machine, "figures": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
