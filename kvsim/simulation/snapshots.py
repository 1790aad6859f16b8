"""Snapshots of the cells: which sequence held which cell when; taken during a run, and kept small enough for a page."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import UserError
from policies import Policy

FILE = "snapshots.npz"
"""The file of a saved comparison that holds its snapshots."""


class HostPrompts(Protocol):
    """What host memory holds of whole sequences."""

    bytes: int
    most_bytes: int
    """The most bytes that it has held."""
    limit_bytes: int
    """0: no limit."""

    @property
    def prompts(self) -> int:
        """Number of sequences."""
        ...


class Frame(NamedTuple):
    """One snapshot of a run."""

    time_s: float
    owners: NDArray[np.int16]
    """The sequence in each cell of the first cache group (-1: none)."""
    host: tuple[int, int] | None = None
    """How many prompts host memory holds, and their bytes; None where there is no place for them."""


_MOST_FRAMES = 400
"""A run keeps between half as many snapshots and as many."""

_MOST_PICTURES = 80
_MOST_CELLS = 4096
_COLOURS = 250
"""Number of colours for sequences, which repeat; 0 is a free cell."""


class SnapshotTaker:
    """Takes a snapshot every so many steps, more rarely the longer the run is."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._every = 1
        self._steps = 0

    def step(self, now: float, policy: Policy, held: HostPrompts | None = None) -> None:
        """A step has been placed: take a snapshot if one is due, and look at what is ``held`` in host memory."""
        if self._steps % self._every == 0:
            host = None if held is None else (held.prompts, held.bytes)
            self.frames.append(Frame(now, policy.first_owners().astype(np.int16), host))
            if len(self.frames) == _MOST_FRAMES:
                self.frames = self.frames[::2]
                self._every *= 2
        self._steps += 1


@dataclass(frozen=True)
class Snapshots:
    """Snapshots of one policy's cells, thinned for a page."""

    policy: str
    times_s: NDArray[np.float64]
    """Simulated seconds of each snapshot; shape (snapshots,)."""
    cells: NDArray[np.uint8]
    """0 where a cell is free, else the colour of its sequence; uint8 of shape (snapshots, cells)."""
    every: int
    """One in so many cells is shown."""
    host: NDArray[np.int64] | None = None
    """Prompts in host memory, and their bytes; shape (snapshots, 2). None where there is no place for them."""

    @classmethod
    def of(cls, policy: str, frames: Sequence[Frame]) -> Snapshots:
        """At most 80 snapshots of at most 4,096 cells of a run under a policy, evenly chosen from all ``frames``."""
        picked = np.unique(np.linspace(0, len(frames) - 1, min(_MOST_PICTURES, len(frames))).astype(int))
        every = -(-frames[0].owners.size // _MOST_CELLS)
        owners = np.stack([frames[i].owners[::every] for i in picked])
        coloured = np.where(owners < 0, 0, owners % _COLOURS + 1).astype(np.uint8)
        held = [host for i in picked if (host := frames[i].host) is not None]
        host = np.array(held, dtype=np.int64) if len(held) == len(picked) else None
        return cls(policy, np.array([frames[i].time_s for i in picked]), coloured, every, host)


def save_snapshots(path: Path, runs: Iterable[tuple[str, Sequence[Frame]]]) -> None:
    """Write the snapshots of some runs as compressed NumPy arrays; ``runs``: policy and frames. Raises ``OSError``."""
    arrays: dict[str, NDArray[np.generic]] = {}
    kept = [Snapshots.of(policy, taken) for policy, taken in runs if taken]
    for i, one in enumerate(kept):
        arrays |= {f"times_{i}": one.times_s, f"cells_{i}": one.cells}
        if one.host is not None:
            arrays[f"host_{i}"] = one.host
    arrays["every"] = np.array([one.every for one in kept], dtype=np.int64)
    arrays["policies"] = np.array([one.policy for one in kept], dtype=np.str_)
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_snapshots(path: Path) -> list[Snapshots]:
    """The snapshots in a file that ``save_snapshots`` wrote. Raises ``UserError``."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            kept = [
                Snapshots(
                    str(policy),
                    arrays[f"times_{i}"],
                    arrays[f"cells_{i}"],
                    int(arrays["every"][i]),
                    arrays.get(f"host_{i}"),
                )
                for i, policy in enumerate(arrays["policies"])
            ]
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as e:
        raise UserError(f"{path}: not the snapshots that kvsim compare wrote ({e})") from None
    for one in kept:
        if not _whole(one):
            raise UserError(f"{path}: the snapshots of {one.policy!r} are damaged")
    return kept


def _whole(snapshots: Snapshots) -> bool:
    shapes = (
        snapshots.times_s.ndim == 1 and snapshots.cells.ndim == 2 and len(snapshots.times_s) == len(snapshots.cells) > 0
    )
    kinds = snapshots.times_s.dtype == np.float64 and snapshots.cells.dtype == np.uint8
    held = snapshots.host
    if held is not None:
        shapes = shapes and held.shape == (len(snapshots.times_s), 2)
        kinds = kinds and held.dtype == np.int64
    return shapes and kinds and bool(np.isfinite(snapshots.times_s).all()) and snapshots.every >= 1
