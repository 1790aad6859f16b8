"""How long commands take, compared with another checkout: ``python -m benchmarks.commands --against PATH [--rounds N]
[--only why,compare] [--json]``.

Every round runs each command once from this checkout and once from the other, in turns and each in a new process and an
empty folder, so that a busy machine slows both alike. A ratio is the median over the rounds of the other's time over
this one's in the same round; its interval is that of the sign test (``benchmarks.startup``). Processor seconds include
those of workers; on a shared machine they say more than wall time. Two checkouts with different options are compared by
what each does as typed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.speed import ROOT
from benchmarks.startup import Started, sign_interval

COMMANDS: dict[str, tuple[str, ...]] = {
    "why": ("why", "chat"),
    "compare": ("compare", "chat"),
    "sweep": ("sweep", "context-and-policy"),
    "recommend": ("recommend", "--scenario", "chat", "--slo", "ttft_p95<1s,tpot_p95<80ms"),
}


def take(checkout: Path, arguments: tuple[str, ...]) -> Started:
    """Run a command of a checkout to its end, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "kvsim", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{checkout}: kvsim {' '.join(arguments)}: exit code {process.returncode}")
    return Started(seconds, used.ru_utime + used.ru_stime)


def ratios(pairs: list[tuple[Started, Started]], what: str) -> dict[str, Any]:
    """Medians of both checkouts, and of the ratio within each pair with its interval; seconds."""
    ours, theirs = ([getattr(each[side], what) for each in pairs] for side in (0, 1))
    each_ratio = [other / own for own, other in zip(ours, theirs, strict=True)]
    low, high = sign_interval(each_ratio)
    return {"this": median(ours), "other": median(theirs), "ratio": median(each_ratio), "low": low, "high": high}


def main(
    against: Annotated[Path, typer.Option(help="The other checkout, which is thought to be slower.")],
    rounds: Annotated[int, typer.Option(min=1)] = 6,
    only: Annotated[str, typer.Option(help=f"Of {', '.join(COMMANDS)}.")] = ",".join(COMMANDS),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time commands of two checkouts in turns."""
    checkouts = (ROOT, against.resolve())
    taken: dict[str, list[tuple[Started, Started]]] = {name: [] for name in only.split(",")}
    for i in range(rounds):
        for name, pairs in taken.items():
            # Whichever comes first may have the colder disk, so they change places.
            order = (0, 1) if i % 2 else (1, 0)
            times = {side: take(checkouts[side], COMMANDS[name]) for side in order}
            pairs.append((times[0], times[1]))
    report = {
        name: {what: ratios(pairs, f"{what}_s") for what in ("processor", "wall")} for name, pairs in taken.items()
    }
    if as_json:
        typer.echo(json.dumps({"rounds": rounds, "commands": report}, indent=1))
        return
    for name, each in report.items():
        for what, row in each.items():
            typer.echo(
                f"{name:<10} {what:<10} {row['other']:7.2f} s -> {row['this']:7.2f} s: {row['ratio']:.2f} x "
                f"({row['low']:.2f} to {row['high']:.2f}, {rounds} pairs)"
            )


if __name__ == "__main__":
    typer.run(main)
