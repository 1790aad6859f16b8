"""The versions of engines that presets stand for, and what each does where no option says otherwise.

Sources. llama.cpp: ``common/common.h`` and ``common/arg.cpp`` of each version. Flash attention is ``auto`` since pull
request 15434 and then on wherever the device supports it, CPUs included; slots have caches of their own since pull
request 14363, unless their number is left to the server (pull request 16736), which a scenario never does. vLLM:
``EngineArgs.get_batch_defaults``: ``vllm serve`` takes 2,048 tokens in a step on CPUs and on GPUs below 70 GiB, and
8,192 on larger ones other than the A100; ``CpuPlatform`` turns asynchronous scheduling off, elsewhere it is on since
0.14.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["llama.cpp", "vLLM"]


@dataclass(frozen=True, slots=True)
class EngineVersion:
    """A version of an engine, with its defaults."""

    engine: EngineName
    version: str
    build: int
    """llama.cpp's build number, by which options come and go; 0 for vLLM."""
    n_batch: int
    """The most tokens in a step (``--batch-size``, ``--max-num-batched-tokens``)."""
    n_ubatch: int
    """The most tokens in a forward pass (``--ubatch-size``); in vLLM each step is one pass."""
    flash_attention: bool
    """Whether attention skips the cells of other sequences."""
    scheduler: str
    """The scheduler of its server, which runs under its presets where a scenario names none."""
    unified: bool
    """Whether all slots share one cache when their number is given."""
    equal_shares: bool
    """Whether a slot may hold an equal share of the context only, even in a shared cache."""
    block_size: int = 1
    """Tokens in a block (``--block-size``)."""
    threshold: float = 0.0
    """Fragmentation ratio above which the cache is defragmented (``--defrag-thold``); 0 where it never is."""

    def __str__(self) -> str:
        return f"{self.engine} {self.version}"

    @property
    def defaults(self) -> dict[str, str]:
        """What it does by default, in words, by the setting."""
        if self.engine == "vLLM":
            return {
                "n_batch": f"{self.n_batch:,} tokens in a step (--max-num-batched-tokens)",
                "async_scheduling": "each step composed when the one before it has ended, as on CPUs",
                "block_size": f"blocks of {self.block_size} (--block-size)",
            }
        own = "a cache for each slot" + (" (no --kv-unified)" if self.build >= KV_UNIFIED_SINCE else "")
        words = {
            "batch": f"batch {self.n_batch:,}/{self.n_ubatch:,} (--batch-size/--ubatch-size)",
            "n_batch": f"batch {self.n_batch:,} (--batch-size)",
            "n_ubatch": f"micro-batch {self.n_ubatch:,} (--ubatch-size)",
            "flash_attention": "flash attention auto (on)" if self.flash_attention else "flash attention off",
            "unified": "one cache for all slots" if self.unified else own,
        }
        if self.equal_shares:
            words["slot_context"] = "an equal share of the context for each slot"
        if self.threshold:
            words["threshold"] = f"defragmentation above {self.threshold:g} (--defrag-thold)"
        return words


KV_UNIFIED_SINCE = 5913
"""The build of llama.cpp that brought ``--kv-unified`` (pull request 14363)."""


LLAMACPP_B4666 = EngineVersion(
    *("llama.cpp", "b4666", 4666, 2048, 512),
    scheduler="llama-server-b4875",
    flash_attention=False,
    unified=True,
    equal_shares=True,
    threshold=0.1,
)
LLAMACPP_B6975 = EngineVersion(
    *("llama.cpp", "b6975", 6975, 2048, 512),
    scheduler="llama-server",
    flash_attention=True,
    unified=False,
    equal_shares=False,
)
VLLM_0_33_0 = EngineVersion(
    *("vLLM", "0.33.0", 0, 2048, 2048),
    scheduler="vllm",
    flash_attention=True,
    unified=True,
    equal_shares=False,
    block_size=16,
)

PRESENT: dict[EngineName, EngineVersion] = {"llama.cpp": LLAMACPP_B6975, "vLLM": VLLM_0_33_0}
"""The version of each engine that people have today."""

ENGINE_VERSIONS = {str(version): version for version in (LLAMACPP_B4666, LLAMACPP_B6975, VLLM_0_33_0)}
"""By engine and version, as presets name them."""

LLAMA_SERVER = "llama-server 0.6.0-dev (llama.cpp, November 2026)"
"""The server whose recorded runs today's scheduler repeats decision for decision."""

SCHEDULERS = {
    "llama-server": f"{LLAMA_SERVER}: slots that keep what they held, a host cache, batches in order of slots",
    "llama-server-fair": "llama-server with four rules of our own: slots by gain, prompts in order of arrival",
    "llama-server-b4875": "llama-server b4875 (llama.cpp, March 2025): no host cache, contexts shift by default",
    "vllm": f"vLLM {VLLM_0_33_0.version}: running requests first, preemption when the cache is full",
    "static": "batches that are filled once and run to their end, as before continuous batching (Orca, OSDI 2022)",
}
"""What each scheduler stands for, by the name that the scenario key ``server.scheduler`` gives."""
