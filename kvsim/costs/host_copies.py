"""What it costs to copy the state of a sequence to host memory and back, and on what that rests."""

from __future__ import annotations

from kvsim.costs.profile import Profile
from policies import HostCopy

_CPU_BYTES_PER_S = {True: 1.5e9, False: 6e9}
"""To host memory that is newly allocated, and back: medians of llama.cpp's own functions (llama-cpp-python 0.3.36,
``llama_state_seq_get_data`` and ``..._set_data``) with SmolLM2 135M, 32 to 1,024 tokens, on two virtual cores of a
Xeon."""
_DEVICE_BYTES_PER_S = {True: 20e9, False: 20e9}
"""About what PCIe 4.0 x16 carries."""


def host_copies_s(profile: Profile, copy: HostCopy, cell_bytes: float) -> float:
    """Seconds of the copies of one sequence: as the profile measured them, else by a stated bandwidth.

    ``cell_bytes``: bytes of K and V of one token in all layers.
    """
    cells = copy.cells
    if not cells:
        return 0.0
    out, cost = copy.to_host, profile.host_copies
    if cost is not None:
        return cost.seconds(len(copy.transfers), cells, out=out)
    if _has_own_moves(profile):
        assert profile.moves is not None
        return profile.moves.per_run_s.value * len(copy.transfers) + profile.moves.per_cell_s.value * cells
    return cells * cell_bytes / _stated(profile)[out]


def host_copies_basis(profile: Profile) -> str | None:
    """On what the price of copies to and from host memory rests, in words; None where the profile measured them, or at
    least copies inside the cache on the same machine."""
    if profile.host_copies is not None or _has_own_moves(profile):
        return None
    rates = _stated(profile)
    if profile.device is not None:
        return f"at {rates[True] / 1e9:g} GB/s, about what PCIe 4.0 x16 carries"
    return f"at {rates[True] / 1e9:g} GB/s out and {rates[False] / 1e9:g} back, as llama.cpp did on another machine"


def _has_own_moves(profile: Profile) -> bool:
    """Whether its copies inside the cache are done as those to the host are: on the machine's own memory."""
    return profile.moves is not None and profile.device is None


def _stated(profile: Profile) -> dict[bool, float]:
    return _CPU_BYTES_PER_S if profile.device is None else _DEVICE_BYTES_PER_S
