"""The classical searches for free memory, for regions of sequences whose lengths are known ahead."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from policies.policy import CacheConfig, Policy
from policies.presets.preset import Preset


def _oracle(name: str, config: CacheConfig, *, search: str) -> Policy:
    from policies.layouts.sequence_regions import OraclePolicy

    return OraclePolicy(name, config.with_options(search=search))


_REGION = "one region for each sequence, of its final length, "
_PROGRAMS = "heaps of eight C and C++ programs (ISMM 1998); ours: docs/reproduced.md#searches-for-regions"

_FIRST_FIT = Preset(
    "first-fit",
    "knows every length in advance, as `oracle`; takes the lowest free extent that is large enough",
    _REGION + "from the lowest free extent that is large enough",
    "sliced",
    (),
    "Knuth, The Art of Computer Programming, vol. 1, 2.5; Johnstone and Wilson (ISMM 1998)",
    partial(_oracle, search="first-fit"),
    group="papers",
    against="oracle",
    measured=_PROGRAMS,
)

PRESETS = (
    _FIRST_FIT,
    replace(
        _FIRST_FIT,
        name="next-fit",
        summary="knows every length in advance; searches on from where the last region ends",
        layout=_REGION + "from the first free extent that is large enough, once round from where the last region ends",
        source="Knuth, vol. 1, 2.5 (the roving pointer); Johnstone and Wilson (ISMM 1998)",
        build=partial(_oracle, search="next-fit"),
    ),
    replace(
        _FIRST_FIT,
        name="buddy",
        summary="knows every length in advance; regions are powers of two, split from and joined with their buddies "
        "only",
        layout=_REGION + "rounded up to a power of two, at a multiple of its size",
        source="Knowlton, A fast storage allocator (CACM 8(10), 1965); Johnstone and Wilson (ISMM 1998)",
        build=partial(_oracle, search="buddy"),
    ),
    replace(
        _FIRST_FIT,
        name="slab",
        summary="knows every length in advance; regions of one class of sizes side by side in slabs",
        layout=_REGION + "rounded up to one of eight classes between powers of two, eight (or one) in a slab",
        source="Bonwick, The slab allocator (USENIX Summer 1994); Linux's SLUB",
        build=partial(_oracle, search="slab"),
        measured="SunOS 5.4's kernel memory (USENIX 1994); ours: docs/reproduced.md#searches-for-regions",
    ),
)
"""Regions of just the final length, so that only the search differs."""
