"""Times copies of cache blocks on this machine's GPU: to and from pinned host memory, and from block to block.

    python -m benchmarks.gpu.copies --out copies.jsonl

with the Python that has PyTorch. Each line is the median of several rounds over 256 MiB in scattered pieces of one
size: ``each`` starts a copy for each piece (``cudaMemcpyAsync``, as vLLM's ``swap_blocks`` did), ``batch`` hands the
driver all of them at once (``cudaMemcpyBatchAsync``, as it does since 0.19), and ``index`` is one kernel that copies
rows by their index. A piece is a block's K or V in one layer: 16 tokens of 8 KV heads of 128 numbers in 16 bits are
32 KiB.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

TOTAL = 256 << 20
MOST_PIECES = 16_384
"""Smaller pieces are fewer bytes in all, so that starting their copies does not take the whole time."""
ROUNDS = 7
PIECES = tuple(4096 << i for i in range(0, 13, 2))
"""Bytes: 4 KiB to 16 MiB."""


def timed(torch: Any, copy: Callable[[], None]) -> tuple[float, float]:
    """Median seconds until a copy is done, and until it is started."""
    ends, starts = [], []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        copy()
        starts.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        ends.append(time.perf_counter() - began)
    return statistics.median(ends[1:]), statistics.median(starts[1:])  # The first one warms up.


def batch(torch: Any, pairs: list[tuple[int, int]], size: int) -> Callable[[], None]:
    """All copies in one call of the driver; ``pairs``: addresses to copy to and from."""
    from cuda.bindings import runtime  # type: ignore[import-not-found,unused-ignore]

    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    to, source = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    stream = torch.cuda.Stream()

    def copy() -> None:
        said = runtime.cudaMemcpyBatchAsync(
            to, source, [size] * len(pairs), len(pairs), [attributes], [0], 1, stream.cuda_stream
        )
        if said[0] != runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"cudaMemcpyBatchAsync: {said[0].name}")

    return copy


def index(blocks: Any, into: Any, out_of: Any) -> None:
    """Copy rows of a table to others."""
    blocks.index_copy_(0, into, blocks[out_of])


def rows(torch: Any, size: int) -> list[dict[str, Any]]:
    """The copies of pieces of one size."""
    n = min(TOTAL // size, MOST_PIECES)
    device = torch.empty((2 * n, size), dtype=torch.uint8, device="cuda").random_(0, 255)
    host = torch.empty((2 * n, size), dtype=torch.uint8, pin_memory=True).random_(0, 255)
    order = torch.randperm(2 * n, generator=torch.Generator().manual_seed(0))
    taken, given = order[:n], order[n:]
    ways = {"to host": (host, device), "from host": (device, host), "moves": (device, device)}
    found = []
    for name, (to, source) in ways.items():
        pieces = list(zip(taken.tolist(), given.tolist(), strict=True))
        tensors = [(to[a], source[b]) for a, b in pieces]
        addresses = [(a.data_ptr(), b.data_ptr()) for a, b in tensors]

        def each(tensors: list[tuple[Any, Any]] = tensors) -> None:
            for a, b in tensors:
                a.copy_(b, non_blocking=True)

        kinds: dict[str, Callable[[], None]] = {"each": each}
        try:
            kinds["batch"] = batch(torch, addresses, size)
        except ImportError as e:
            print(f"batch: {e}")
        if name == "moves":
            into, out_of = taken.cuda(), given.cuda()
            kinds["index"] = partial(index, device, into, out_of)
        for kind, copy in kinds.items():
            try:
                whole_s, start_s = timed(torch, copy)
            except (RuntimeError, TypeError) as e:
                print(f"{name}, {kind}, {size} bytes: {e}")
                continue
            if name != "moves" or kind != "index":
                torch.cuda.synchronize()
                assert all(torch.equal(a.cpu(), b.cpu()) for a, b in tensors[:: max(n // 16, 1)]), (name, kind)
            found.append(
                {"copy": name, "by": kind, "piece_bytes": size, "pieces": n, "s": whole_s, "start_s": start_s}
                | {"gb_s": n * size / whole_s / 1e9}
            )
    return found


def main(out: Annotated[Path, typer.Option(help="A file of JSON lines.")]) -> None:
    """Time copies of cache blocks."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    lines = []
    for size in PIECES:
        for row in rows(torch, size):
            lines.append({"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, **row})
            speed = f"{row['gb_s']:8.2f} GB/s, {row['start_s']:.4f} s to start"
            print(f"{row['copy']:>9} {row['by']:>5} {size:>9} bytes: {speed}")
    out.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")


if __name__ == "__main__":
    typer.run(main)
