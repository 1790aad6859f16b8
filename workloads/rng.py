"""Named random streams: every draw in the project comes from one of these."""

from __future__ import annotations

import zlib

import numpy as np


def named_rng(seed: int, name: str) -> np.random.Generator:
    """The generator called ``name`` for ``seed``: independent of every other name, the same in any process."""
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
