"""Films of the cells: who held which cell when, small enough for a page."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import UserError
from kvsim.simulation.recorder import Result

FILE = "films.npz"
"""What a comparison calls its films."""

_MOST_PICTURES = 80
_MOST_CELLS = 4096
_COLOURS = 250
"""Of sequences; 0 is a free cell. Sequences beyond take the colours of the first again."""


@dataclass(frozen=True)
class Film:
    """Pictures of one policy's cells."""

    policy: str
    times_s: NDArray[np.float64]
    """Of each picture, simulated seconds; shape (pictures,)."""
    cells: NDArray[np.uint8]
    """0 where a cell is free, else a colour for each sequence; shape (pictures, cells)."""
    every: int
    """Of so many cells one is shown."""

    @classmethod
    def of(cls, result: Result) -> Film:
        """A run's film, of 80 pictures and 4,096 cells at most, evenly chosen. The run must have kept pictures."""
        picked = np.unique(np.linspace(0, len(result.frames) - 1, min(_MOST_PICTURES, len(result.frames))).astype(int))
        every = -(-result.frames[0][1].size // _MOST_CELLS)
        owners = np.stack([result.frames[i][1][::every] for i in picked])
        coloured = np.where(owners < 0, 0, owners % _COLOURS + 1).astype(np.uint8)
        return cls(result.policy, np.array([result.frames[i][0] for i in picked]), coloured, every)


def save_films(path: Path, results: Sequence[Result]) -> None:
    """Write the films of all results that have pictures; compressed NumPy arrays. Raises ``OSError``."""
    arrays: dict[str, NDArray[np.generic]] = {}
    films = [Film.of(result) for result in results if result.frames]
    for i, film in enumerate(films):
        arrays |= {f"times_{i}": film.times_s, f"cells_{i}": film.cells}
    arrays["every"] = np.array([film.every for film in films], dtype=np.int64)
    arrays["policies"] = np.array([film.policy for film in films], dtype=np.str_)
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_films(path: Path) -> list[Film]:
    """The films in a file that ``save_films`` wrote. Raises ``UserError``."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            films = [
                Film(str(policy), arrays[f"times_{i}"], arrays[f"cells_{i}"], int(arrays["every"][i]))
                for i, policy in enumerate(arrays["policies"])
            ]
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as e:
        raise UserError(f"{path}: not the films that kvsim compare wrote ({e})") from None
    for film in films:
        if not _whole(film):
            raise UserError(f"{path}: the film of {film.policy!r} is damaged")
    return films


def _whole(film: Film) -> bool:
    shapes = film.times_s.ndim == 1 and film.cells.ndim == 2 and len(film.times_s) == len(film.cells) > 0
    kinds = film.times_s.dtype == np.float64 and film.cells.dtype == np.uint8
    return shapes and kinds and bool(np.isfinite(film.times_s).all()) and film.every >= 1
