"""Named random generators: every draw in the project comes from one of these."""

from __future__ import annotations

import zlib

import numpy as np


def named_rng(seed: int, name: str) -> np.random.Generator:
    """The random generator called ``name`` for this seed: independent of all other names, the same in every process."""
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
