"""Memory of a device that an engine cannot have: its driver's, the desktop's, and a margin.

Sources, in MiB:

- *Driver and libraries* of one process. llama.cpp, pull request 15860: 451 and 456 beside what it allocates on an
  RTX 4090 without a desktop. Ollama's ``cudaMinimumMemory`` and ``rocmMinimumMemory`` (``discover/gpu.go``): 457.
  llama.cpp, pull request 23604: 555 on an RTX PRO 6000, more with more multiprocessors.
- *Desktop*. In use before an engine starts: 250 and 506 under Linux (Ollama issue 10553), 1,523 under Windows
  (llama.cpp issue 27680). NVIDIA's driver for Windows withholds 768 (``VK_EXT_memory_budget``, driver 610.88).
- *Margin*. llama.cpp's own: ``--fit-target`` leaves 1,024 free (``common/arg.cpp``). vLLM's is what it does not take by
  ``--gpu-memory-utilization``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsim.costs.devices import Device
from kvsim.model.storage_types import format_size

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes that are not an engine's; ``margin`` counts for llama.cpp only."""

    driver: int
    desktop: int
    margin: int

    @property
    def taken(self) -> int:
        """What is gone before an engine allocates anything."""
        return self.driver + self.desktop

    def words(self, engine: Literal["llamacpp", "vllm"]) -> str:
        """What is left to what, in words; empty if nothing is."""
        shown = {"the driver": self.driver, "a desktop": self.desktop}
        if engine == "llamacpp":
            shown["a margin (--fit-target)"] = self.margin
        return ", ".join(f"{format_size(size)} for {what}" for what, size in shown.items() if size)


_BY_KIND = {
    "consumer": Reserve(457 * _MIB, 768 * _MIB, 1024 * _MIB),
    "datacentre": Reserve(555 * _MIB, 0, 1024 * _MIB),
    "amd": Reserve(457 * _MIB, 768 * _MIB, 1024 * _MIB),
    "instinct": Reserve(457 * _MIB, 0, 1024 * _MIB),
    # What macOS and a machine's other programs take is not in these devices' memory.
    "apple": Reserve(0, 0, 1024 * _MIB),
    "cpu": Reserve(0, 0, 1024 * _MIB),
}


def reserve_of(device: Device | None) -> Reserve:
    """What is left to others on a device; where only a size is known, as on a consumer's card with a desktop."""
    return _BY_KIND["consumer" if device is None else device.kind]
