"""The families of settings that a search chooses from: what each fixes, and what varies in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvsim.advice.memory.engine_flags import padded
from kvsim.costs.profile import Profile
from kvsim.experiments.traffic import TrafficSummary
from kvsim.scenario.scenario import DRAFTING, Scenario
from kvsim.scenario.server_defaults import EARLY_SERVER
from kvsim.scenario.serving_sections import ServerSection
from kvsim.scenario.speculation_section import MOST_DRAFTS

TargetEngine = Literal["llamacpp", "vllm", "research"]
"""The engine that has a setting; ``research`` if no known engine does."""

_SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_OFTEN_SLOTS = range(7)
"""Positions in these from which the first sample is drawn."""
_THRESHOLDS = (0.1, 0.3)
"""llama.cpp's default since b4065, and a value that compacts less often."""
_SIMILARITIES = (0.5, 0.9)
"""``--slot-prompt-similarity``, besides that of the scenario: what keeps users who share a system prompt in slots of
their own."""
_LLAMA_BATCHES = ((64, 64), (256, 128), (512, 512), (2048, 512))
"""``--batch-size`` and ``--ubatch-size``; the last is llama.cpp's default."""
_VLLM_BATCHES = (64, 128, 256, 512, 2048)
_DEVICE_SLOTS = (8, 16, 32, 64, 128, 256, 512, 1024)
_DEVICE_BATCHES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""``--max-num-seqs`` and ``--max-num-batched-tokens`` on a device, as far as its profile was measured."""
_OFTEN_ON_DEVICES = {"slots": range(2, 8), "batch": range(2, 8)}
_BLOCKS = (16, 32)

_MOVING = ("contiguous", "fill-holes", "full-compaction", "adaptive", "idle-compaction", "prompt-decode-regions")
"""Layouts that no engine has, on which llama.cpp's scheduler can work."""


@dataclass(frozen=True)
class SettingsFamily:
    """A grid of settings with the same policy, scheduler and engine."""

    name: str
    engine: TargetEngine
    keys: dict[str, Any]
    """Fixed scenario keys, as for ``load_scenario``."""
    axes: dict[str, tuple[Any, ...]]
    """Values that vary, by the name of the axis."""
    inner: dict[str, range] = field(default_factory=dict)
    """Positions that the first sample is drawn from, by axis; all where none are named. The others are tried where
    those beside them are among the best."""

    def narrowed(self, kv: tuple[str, ...]) -> SettingsFamily:
        """This family with K and V in these types too; the first is tried first."""
        return replace(self, axes={**self.axes, "kv": kv}, inner={**self.inner, "kv": range(1)})

    def drafting(self, tokens: int) -> SettingsFamily:
        """This family with drafts of about so many tokens, and with none; with none alone where the scheduler checks
        none."""
        if self.keys["server__scheduler"] not in DRAFTING:
            return replace(self, keys={**self.keys, "speculation__method": "none"})
        counts = tuple(dict.fromkeys((tokens, 0, -(-tokens // 2), min(2 * tokens, MOST_DRAFTS))))
        return replace(self, axes={**self.axes, "drafts": counts})

    def narrowed_at(self, index: Sequence[int]) -> int:
        """How many steps narrower K and V are at a position than the widest types."""
        return dict(zip(self.axes, index, strict=True)).get("kv", 0)


def host_caches(base: Scenario, summary: TrafficSummary) -> tuple[int, ...]:
    """Values of ``--cache-ram`` to try, in MiB: none and the server's own, which matters only where prompts share text.

    Where they share none, a host cache costs copies and is never of use. Where that is not known, the server's own
    stays: the traffic that is served may share some.
    """
    usual, stated = ServerSection().cache_ram, base.server.cache_ram
    if summary.reuse is None:
        return (stated,)
    return tuple(dict.fromkeys((0, stated, usual))) if summary.reuse else (0,)


def machine_families(
    base: Scenario,
    summary: TrafficSummary,
    window: int | None,
    tolerant: bool,
    now: Scenario | None = None,
    *,
    states: bool = False,
) -> Iterator[SettingsFamily]:
    """Families of all engines; of a model whose layers keep ``states`` those of llama.cpp alone.

    ``window``: tokens of the model's sliding windows, if llama.cpp has a cache for them. ``tolerant``: contexts that
    hold only 99 % of the requests are tried too. ``now``: the server that runs; a vLLM keeps its size of blocks, since
    not every kernel takes every size.
    """
    blocks = (now.cache.block_size,) if now is not None and now.server.scheduler == "vllm" else _BLOCKS
    contexts = ("longest", "p99") if tolerant and padded(summary.p99) < padded(summary.longest) else ("longest",)
    rooms = ("shared", "full", "reuse") if summary.reuse else ("shared", "full")
    # A checkpoint of a state lies a micro-batch before the end of a prompt.
    batches = (*_LLAMA_BATCHES, (2048, 2048)) if states and summary.reuse else _LLAMA_BATCHES
    llama: dict[str, tuple[Any, ...]] = {"context": contexts, "slots": _SLOTS, "batch": batches}
    vllm: dict[str, tuple[Any, ...]] = {"context": contexts, "slots": _SLOTS, "batch": _VLLM_BATCHES, "room": rooms}
    inner = {"slots": _OFTEN_SLOTS}
    server = {"server__scheduler": "llama-server"}
    policy = "hybrid" if states else "llama.cpp-b6975"
    today, todays = {**server, "cache__policy": policy}, {**llama, "host": host_caches(base, summary)}
    if summary.reuse:  # Otherwise no prompt is like what a slot holds.
        todays["similarity"] = tuple(dict.fromkeys((base.server.slot_prompt_similarity, *_SIMILARITIES)))
    yield SettingsFamily(policy, "llamacpp", {**today, "cache__unified": True}, {**todays, "room": rooms}, inner)
    own = {**today, "cache__unified": False}
    yield SettingsFamily(f"{policy}, per slot", "llamacpp", own, {**todays, "room": ("full",)}, inner)
    if states:
        return
    if window is not None:
        keys = {**server, "cache__policy": "sliding-window", "cache__window": window}
        yield SettingsFamily(
            "sliding-window", "llamacpp", {**keys, "cache__unified": True}, {**todays, "room": rooms}, inner
        )
    old = {"server__scheduler": EARLY_SERVER, "cache__policy": "llama.cpp-b4666", "cache__unified": True}
    yield SettingsFamily(
        "llama.cpp-b4666", "llamacpp", old, {**llama, "room": ("full",), "threshold": _THRESHOLDS}, inner
    )
    server = {"server__scheduler": "vllm"}
    paged = {**vllm, "block": blocks, "chunked": (True, False)}
    yield SettingsFamily("vllm", "vllm", {**server, "cache__policy": "vllm", "cache__unified": True}, paged, inner)
    if summary.reuse:  # Otherwise a prefix cache makes no difference.
        plain = {**server, "cache__policy": "paged", "cache__prefix_cache": False, "cache__unified": True}
        # Without a prefix cache a larger cache has nothing more to keep.
        yield SettingsFamily("vllm, no prefix cache", "vllm", plain, {**paged, "room": ("shared", "full")}, inner)
    for name in _MOVING:
        keys = {"server__scheduler": "llama-server", "cache__policy": name, "cache__unified": True}
        yield SettingsFamily(name, "research", keys, {**llama, "room": rooms}, inner)
    keys = {"server__scheduler": "llama-server", "cache__policy": "threshold-compaction", "cache__unified": True}
    yield SettingsFamily(
        "threshold-compaction", "research", keys, {**llama, "room": rooms, "threshold": _THRESHOLDS}, inner
    )
    for name in ("hf-reserved", "growing", "chunked"):
        keys = {**server, "cache__policy": name, "cache__unified": True}
        yield SettingsFamily(name, "research", keys, {**vllm, "room": ("shared", "full")}, inner)


def device_families(
    summary: TrafficSummary, tolerant: bool, profile: Profile, *, states: bool = False
) -> Iterator[SettingsFamily]:
    """Families on a device with vLLM's times: larger batches and more sequences, as far as both were measured.

    ``states``: the model's layers keep some, for which vLLM needs chunked prefill.
    """
    contexts = ("longest", "p99") if tolerant and padded(summary.p99) < padded(summary.longest) else ("longest",)
    most_slots, most_tokens = measured_range(profile)
    axes: dict[str, tuple[Any, ...]] = {
        "context": contexts,
        "slots": tuple(n for n in _DEVICE_SLOTS if n <= most_slots) or (most_slots,),
        "batch": tuple(n for n in _DEVICE_BATCHES if n <= most_tokens) or (most_tokens,),
        "chunked": (True,) if states else (True, False),
    }
    server = {"server__scheduler": "vllm", "cache__unified": True}
    yield SettingsFamily("vllm", "vllm", {**server, "cache__policy": "vllm"}, axes, _OFTEN_ON_DEVICES)
    if summary.reuse:  # Otherwise a prefix cache makes no difference.
        plain = {**server, "cache__policy": "vllm" if states else "paged", "cache__prefix_cache": False}
        yield SettingsFamily("vllm, no prefix cache", "vllm", plain, axes, _OFTEN_ON_DEVICES)
    if states:
        return
    for name in ("hf-reserved", "growing", "chunked", *_MOVING, "threshold-compaction"):
        yield SettingsFamily(name, "research", {**server, "cache__policy": name}, axes, _OFTEN_ON_DEVICES)


def measured_range(profile: Profile) -> tuple[int, int]:
    """The most sequences and the most tokens in a pass for which a device's profile has times."""
    return profile.sequences or profile.tokens.high, profile.tokens.high
