"""What servers under load add to kernels that were timed one by one: the host's share of a step, and a lower pace.

Fitted to servers that others recorded (docs/gpus.md says how):

- the 31 of the 90 points of Qwen3-32B in bf16 on H100 SXM, vLLM 0.12.0, TP 2, 4 and 8, in aiconfigurator-core 0.12.0's
  ``silicon_sample.csv`` (Apache-2.0) the SHA-256 of whose id is a multiple of 3, but for one that waits for blocks;
- times between the first tokens of 13,249 requests to Qwen3-14B on one H100 SXM, vLLM 0.23.0
  (inference-sim/residency-vllm; figures only), which show how long passes with 1 to 5 prompts take;
- for ``Longer``, TPOT of the same third of that file's points of vLLM whose times are estimated, but for those of Qwen3
  235B and those that are off by a factor of two or more: 241 of gpt-oss, Kimi K2.5, Llama 3.1 70B and MiniMax M2.5.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvsim.costs.records import Record, Seconds


class Host(Record):
    """What the host adds to each step beside the device's kernels."""

    seconds: Seconds
    sequence_s: Seconds = 0.0
    """What it adds for each sequence in the step."""
    least_s: Seconds = 0.0
    """What a step takes at least, since the host prepares one while the device computes the one before."""
    source: str
    """Whether it was fitted, and to what, or given, and by whom."""

    def __str__(self) -> str:
        more = f" and {self.sequence_s * 1e3:.3f} ms for each sequence" if self.sequence_s else ""
        least = f", which takes at least {self.least_s * 1e3:.2f} ms" if self.least_s else ""
        return f"The host adds {self.seconds * 1e3:.2f} ms{more} to a step{least}: {self.source}."


class Sustained(NamedTuple):
    """How many times as long as alone matrices take in passes with prompts, beyond the reading of the weights.

    Units that are kept busy draw more power than the device may, so that it lowers its clock; kernels that are timed
    one by one do not.
    """

    ratio: float
    low: float
    high: float
    source: str

    def __str__(self) -> str:
        return (
            f"Under load, matrices in passes with prompts take {self.ratio:.2f} times as long "
            f"({self.low:.2f} to {self.high:.2f}): {self.source}."
        )


class Longer(NamedTuple):
    """What something takes in servers beyond the estimate by kernels that were timed one by one; seconds, each time."""

    what: str
    seconds: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"In servers, {self.what} takes {self.seconds * 1e6:.1f} µs more ({self.low * 1e6:.1f} to "
            f"{self.high * 1e6:.1f}): fitted to 241 recorded loads of four models on H100, H200, B200 and B300."
        )


EXCHANGE = Longer(
    "an exchange, with each doubling of the devices, of which all wait for the slowest,", 2.1e-6, 1.8e-6, 2.5e-6
)
BLOCKS = Longer("a layer in blocks of fp8, for whose scales its activations are read again,", 17e-6, 14e-6, 21e-6)
ASYNCHRONOUS_SINCE = (0, 14)
"""The version from which on vLLM composes steps ahead by default (``SchedulerConfig.async_scheduling``)."""
ALONE = Host(seconds=0.0, source="given: the kernels alone")
_OF_VLLM = Host(
    seconds=0.00158,
    sequence_s=0.000036,
    source=(
        "fitted to 30 loads of 8 to 128 sequences of Qwen3 32B on H100, vLLM 0.12.0; 95 % within 1.3 to 1.8 ms and "
        "0.028 to 0.042 ms"
    ),
)
_HIDDEN = Host(
    seconds=0.0,
    least_s=_OF_VLLM.seconds,
    source=(
        "since 0.14 vLLM prepares a step while the device computes the one before, and five recorded servers of 0.19 "
        "and 0.23, with 3 to 101 sequences at a time, show no more"
    ),
)
_SUSTAINED = {
    device: Sustained(
        1.13,
        1.08,
        1.16,
        "fitted to recorded servers of Qwen3 14B and 32B on H100",
    )
    for device in ("h100_sxm", "h200_sxm")
}
"""By device; those of one chip and one power limit are taken to do as the one that was recorded."""


def host_share(engine: str, ahead: bool | None = None) -> Host | None:
    """What the host adds to a step of an engine with its version, such as "vllm 0.19.0", unless a user says it.

    ``ahead``: whether steps are composed while the one before runs; by default as the version does. None: the host's
    share is in the times of the device, as with llama.cpp, whose benchmarks have it.
    """
    name, _, version = engine.partition(" ")
    if name == "llama.cpp":
        return None
    if name != "vllm":
        return Host(seconds=0.0, source=f"what {name} adds was not measured")
    if ahead is None:
        found = re.match(r"v?(\d+)\.(\d+)", version)
        ahead = found is None or (int(found[1]), int(found[2])) >= ASYNCHRONOUS_SINCE
    return _HIDDEN if ahead else _OF_VLLM


def sustained(device: str | None, source: str) -> Sustained | None:
    """How much longer matrices take under load than by a source, the title of its tables; None: as long."""
    return _SUSTAINED.get(device or "") if "aiconfigurator-core" in source else None
