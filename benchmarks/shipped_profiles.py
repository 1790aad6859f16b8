"""Makes the profiles of devices that ship, by NVIDIA's aiconfigurator-core, and puts them into one file a device.

    python -m benchmarks.shipped_profiles [DEVICE...]

Needs the extra gpu. What was made before and depends on nothing that has changed since is taken from the cache of
``make_profile``, so that it goes on where it was stopped. A model that does not fit a device, that the package does
not know there, or whose times are implausible, is left out and said.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from kvsim.calibration.published.make import make_profile
from kvsim.costs.memory_plan import default_cells
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.profile import Profile
from kvsim.errors import UserError
from kvsim.model.memory_shapes import memory_shape
from policies import Group
from policies.placement.rule import PassReads

FOLDER = Path(__file__).parents[1] / "kvsim" / "costs" / "profiles"
_SHARED = (1, 2, 4, 8)
MODELS: dict[str, tuple[int, ...]] = {
    "qwen3-32b": _SHARED,
    "llama-3.1-70b": _SHARED,
    "llama-3.3-70b": _SHARED,
    "qwen3-30b-a3b": _SHARED,
    "qwen3-8b": _SHARED,
    "llama-3.1-8b": _SHARED,
    "qwen3-14b": _SHARED,
    "deepseek-v3": (8,),
    "mistral-small-24b-2501": (1, 2, 4),
    "mistral-7b-v0.3": (1, 2),
}
"""Models, and how many devices share them."""
DEVICES: dict[str, dict[str, tuple[int, ...]]] = {
    "h100_sxm": {**MODELS, "llama-2-7b": (1,)},
    "h200_sxm": MODELS,
    "b200_sxm": MODELS,
    "a100_sxm": MODELS,
    "l40s": MODELS,
    "rtxpro6000": {"qwen3-8b": (1,), "qwen3-14b": (1,)},
}
_CONTEXT = 4096
"""Cells that a device must have room for beside the model."""


def profiles(device: str) -> Iterator[Profile]:
    """The profiles of a device, in the order of their names."""
    found = []
    for model, shared in DEVICES[device].items():
        own = memory_shape(model).default_type
        for tp in shared:
            for weights in (None,) if own == "fp8" else (None, "fp8"):
                try:
                    if default_cells(model, device, tp=tp, weights=weights) >= _CONTEXT:
                        made = make_profile(device, model, tp=tp, weights=weights).profile
                        fault = implausible(made)
                        print(f"left out: {made.name}: {fault}" if fault else made.name, flush=True)
                        found += [] if fault else [made]
                except UserError as e:
                    print(f"left out: {e}", flush=True)
    yield from sorted(found, key=lambda profile: profile.name)


def implausible(profile: Profile) -> str:
    """What speaks against a profile, in words, such as kernels that take longer for one token than for eight."""
    price = PassPrice(profile, profile.own_kernel, (Group(0),))

    def decode_s(n: int, cells: int = 512) -> float:
        return price.seconds(PassReads.counted(n, n, 0, [(1, cells)] * n))

    def prompt_s(n: int) -> float:
        return price.seconds(PassReads.counted(n, 1, 0, [(n, n)]))

    for what, took in (
        ("decodes", [decode_s(n) for n in (1, 8, 64, 512, 4096)]),
        ("cells", [decode_s(32, cells) for cells in (64, 512, 4096, 32768, 262144)]),
        ("prompts", [prompt_s(n) for n in (16, 64, 256, 1024, 4096, 16384, 65536)]),
    ):
        if any(after <= 0.97 * before for before, after in pairwise(took)):
            return f"more {what} take less long"
    experts = memory_shape(profile.model).n_experts > 0
    ratios = [prompt_s(n) / decode_s(1) for n in (2, 4, 8, 15)]
    fine = all(0.8 < ratio < (15 if experts else 2) for ratio in ratios)
    return "" if fine else "short prompts do not take about as long as one token"


def write(device: str) -> Path:
    """Make the file of a device."""
    lines = []
    for profile in profiles(device):
        told = profile.model_dump(mode="json", exclude_defaults=True)
        lines.append(json.dumps({"name": profile.name} | told, separators=(",", ":")))
    file, new = FOLDER / f"{device}.jsonl.gz", FOLDER / f"{device}.new"
    new.write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), mtime=0))
    return new.replace(file)


if __name__ == "__main__":
    for name in sys.argv[1:] or DEVICES:
        print(write(name))
