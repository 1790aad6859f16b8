"""The classical searches for free memory, for regions of sequences whose lengths are known ahead."""

from __future__ import annotations

from policies.policy import CacheConfig, Policy
from policies.presets.preset import Preset


def _first_fit(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.sequence_regions import OraclePolicy

    return OraclePolicy(name, config.with_options(search="first-fit"))


def _next_fit(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.sequence_regions import OraclePolicy

    return OraclePolicy(name, config.with_options(search="next-fit"))


def _buddy(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.sequence_regions import OraclePolicy

    return OraclePolicy(name, config.with_options(search="buddy"))


def _slab(name: str, config: CacheConfig) -> Policy:
    from policies.layouts.sequence_regions import OraclePolicy

    return OraclePolicy(name, config.with_options(search="slab"))


_REGION = "one region for each sequence, of its final length, "
_PROGRAMS = "heaps of eight C and C++ programs (ISMM 1998); ours: docs/reproduced.md#searches-for-regions"
_KERNEL = "sliced"

PRESETS = (
    Preset(
        "first-fit",
        "knows every length in advance, as `oracle`; takes the lowest free extent that is large enough",
        _REGION + "from the lowest free extent that is large enough",
        _KERNEL,
        (),
        "Knuth, The Art of Computer Programming, vol. 1, 2.5; Johnstone and Wilson (ISMM 1998)",
        _first_fit,
        group="papers",
        against="oracle",
        measured=_PROGRAMS,
    ),
    Preset(
        "next-fit",
        "knows every length in advance; searches on from where the last region ends",
        _REGION + "from the first free extent that is large enough, once round from where the last region ends",
        _KERNEL,
        (),
        "Knuth, vol. 1, 2.5 (the roving pointer); Johnstone and Wilson (ISMM 1998)",
        _next_fit,
        group="papers",
        against="oracle",
        measured=_PROGRAMS,
    ),
    Preset(
        "buddy",
        "knows every length in advance; regions are powers of two, split from and joined with their buddies only",
        _REGION + "rounded up to a power of two, at a multiple of its size",
        _KERNEL,
        (),
        "Knowlton, A fast storage allocator (CACM 8(10), 1965); Johnstone and Wilson (ISMM 1998)",
        _buddy,
        group="papers",
        against="oracle",
        measured=_PROGRAMS,
    ),
    Preset(
        "slab",
        "knows every length in advance; regions of one class of sizes side by side in slabs",
        _REGION + "rounded up to one of eight classes between powers of two, eight (or one) in a slab",
        _KERNEL,
        (),
        "Bonwick, The slab allocator (USENIX Summer 1994); Linux's SLUB",
        _slab,
        group="papers",
        against="oracle",
        measured="SunOS 5.4's kernel memory (USENIX 1994); ours: docs/reproduced.md#searches-for-regions",
    ),
)
"""Regions of just the final length, so that only the search differs."""
