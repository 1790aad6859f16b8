"""The sections of a scenario that say what is served, and on what: model, server, cache, machine."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat

from kvsim.costs.memory_settings import Engine
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.engine_shapes import ModelShape, Storage, is_engine_model, shape_of
from kvsim.model.engine_versions import LLAMACPP_B4666, PRESENT
from kvsim.model.memory_shapes import memory_shape
from kvsim.scenario.section import NonNegativeInt, PositiveInt, Section, Several, entries
from kvsim.scenario.server_defaults import SCHEDULERS, known_in
from policies import AdmissionRuleName, FreeOrder, Kernel, SearchName, current_name
from policies.paging.cache_groups import GroupKind
from policies.paging.eviction import EVICTION_ORDERS
from policies.paging.host_chunks import OffloadOrder


def _shape(name: str) -> ModelShape | MemoryShape:
    return shape_of(name) if is_engine_model(name) else memory_shape(name)


def _known_model(name: str) -> str:
    _shape(name)
    return name


class ModelSection(Section):
    """The model that is served."""

    name: Annotated[str, AfterValidator(_known_model)] = "tiny"
    """A model that an engine here can run (``shape_of``), or one of which only the memory is known
    (``memory_shape``)."""
    add_bos_token: bool = False
    """Whether it begins each text with a token of its own, which context shifts of llama-server keep as well."""
    state_mib: Annotated[float, Field(ge=0)] | None = None
    """MiB of the state of one sequence, in all layers that have one instead of K and V; by default as llama.cpp keeps
    that of the model, in 32 bits. For the policy ``hybrid``."""

    @property
    def shape(self) -> ModelShape | MemoryShape:
        """The shape of the model."""
        return _shape(self.name)

    @property
    def takes_back(self) -> bool:
        """Whether llama.cpp can take tokens back from the states of its layers, if it has some."""
        return not isinstance(self.shape, MemoryShape) or self.shape.takes_back

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence; 0 of a model without."""
        if self.state_mib is not None:
            return round(self.state_mib * 2**20)
        groups = self.shape.states if isinstance(self.shape, MemoryShape) else ()
        return sum(4 * group.layers * sum(group.state.numbers()) for group in groups if group.state is not None)


class ServerSection(Section):
    """How requests are batched."""

    scheduler: Annotated[str, AfterValidator(partial(known_in, SCHEDULERS))] = "llama-server"
    """Whose decisions: today's llama-server, that with fairer rules, that of early 2025, vLLM's, batches that are
    filled once, or a scheduler of your own."""
    slots: Annotated[int, Field(ge=1, le=2**14)] = 8
    """Sequences served at the same time (llama-server's ``--parallel``, vLLM's ``--max-num-seqs``). "auto", the default
    under ``llama-server``: 4 that share one cache."""
    n_batch: PositiveInt | None = None
    """The most tokens in one step (``--batch-size``, ``--max-num-batched-tokens``); by default as in the engine
    whose scheduler it is."""
    n_ubatch: PositiveInt | None = None
    """The most tokens in one forward pass (``--ubatch-size``), by default as in that engine. Under ``vllm`` each step
    is one pass."""
    slot_context: Several | None = None
    """The most tokens in one slot; by default all cells of a unified cache, or an equal share of a divided one."""
    context_shift: bool = False
    """llama-server: a full slot discards tokens and goes on, instead of ending (``--context-shift``)."""
    n_keep: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    """llama-server: first tokens of a slot that context shifts keep (``--keep``); -1: the whole prompt. A request may
    have its own."""
    n_discard: NonNegativeInt = 0
    """llama-server: tokens that a context shift discards behind those; 0: half of the rest. A request may have its
    own."""
    cache_prompt: bool = True
    """llama-server: a prompt begins with what its slot already holds of it (``--cache-prompt``). A request may have its
    own."""
    cache_ram: Annotated[int, Field(ge=-1, lt=2**31)] = 8192
    """llama-server: MiB of host memory for what slots held (``--cache-ram``); 0: none, -1: as many tokens as the
    context has."""
    cache_idle_slots: bool = True
    """llama-server: whenever a request starts, what idle slots hold is saved to host memory, and with one cache for all
    they are emptied (``--cache-idle-slots``)."""
    ctx_checkpoints: NonNegativeInt = 32
    """llama-server, under policies with windows or states: checkpoints of each slot, from which a prompt can go on that
    is not the same to the end (``--ctx-checkpoints``); 0: none."""
    checkpoint_min_step: NonNegativeInt = 8192
    """llama-server: tokens between two checkpoints, but for those near a prompt's end and before its last user message
    (``--checkpoint-min-step``)."""
    cache_reuse: NonNegativeInt = 0
    """llama-server: the shortest run of tokens behind the common prefix that is moved and used again
    (``--cache-reuse``); 0: none is."""
    slot_prompt_similarity: Annotated[float, Field(ge=0, le=1)] = 0.1
    """llama-server: an idle slot is chosen for a prompt if more than this share of the prompt is the beginning of what
    it holds (``--slot-prompt-similarity``); 0: slots are chosen by age alone."""
    keep_idle_slots: bool = True
    """llama-server: a slot keeps what it holds when its request has ended. No flag: the server always does."""
    chunked_prefill: bool = True
    """vllm: chunked prefill, which computes a prompt in several steps."""
    long_prefill_threshold: NonNegativeInt = 0
    """vllm: the most tokens of one prompt in one step; 0: ``n_batch``."""
    reserve_full: bool = True
    """vllm: a request starts only when blocks for its whole prompt are free."""
    async_scheduling: bool = False
    """vllm: each step is composed when the one before it starts (``--async-scheduling``): new requests wait, and ended
    ones hold what they have, for a step longer. As in vLLM on by default on a device, off on CPUs."""
    order: Literal["fcfs", "priority", "longest-prefix", "depth-first"] = "fcfs"
    """vllm: the order of admission: as they came; by priority, where preemption goes in the reverse order; most cached
    tokens first (SGLang's ``--schedule-policy lpm``); or down one branch after the other of the tree of their
    prompts."""
    longest_prefix_limit: NonNegativeInt = 128
    """vllm, ``longest-prefix``: where more requests wait, they are served as they came, as in SGLang; 0: no limit."""
    preemption: Literal["recompute", "swap"] = "recompute"
    """vllm: a preempted request is recomputed, or is swapped to the host tier (``cache.host_cells``)."""
    victim: Literal["newest", "fewest-generated"] = "newest"
    """vllm: who is preempted: the request that was admitted last (vLLM), or the one with the fewest output tokens, and
    among equals the longest prompt (SGLang); with ``order = "priority"`` that of the least urgent ones."""
    requeue: Literal["front", "back"] = "front"
    """vllm: where a preempted request waits: before all others (vLLM), or behind them (SGLang); no effect with
    ``order = "priority"``."""
    prefetch: Literal["none", "on-resume", "predictive"] = "none"
    """What is copied back from the host tier ahead of its use: nothing; prefixes of waiting requests; or also those of
    the next turns of sessions, at the time when they are expected."""


PolicyName = Annotated[str, AfterValidator(current_name)]
"""The name of a policy; an alias becomes the current name."""


class GroupSection(Section):
    """A group of layers that share a block table; the keys are those of each table in ``[[cache.groups]]``."""

    kind: GroupKind
    """What is kept: every token ("full", or "latent" for MLA), those in a "window" or of the present chunk ("chunked"),
    or one "state" for the sequence (Mamba, linear attention)."""
    block_size: PositiveInt = PRESENT["vLLM"].block_size
    """Tokens in a block; of a state: after how many it may be kept to be found again (``mamba_block_size``)."""
    span: NonNegativeInt = 0
    """Tokens of the window, or of a chunk."""
    layers: PositiveInt = 1
    """Layers of the group; only their proportion among groups counts."""
    checkpoint_grid: NonNegativeInt = 0
    """Of a state: a pass may also keep the state that it had before its end, a multiple of so many tokens behind its
    start; 0: never (``prefill_checkpoint_alignment``: 1 for Mamba 2)."""


class CacheSection(Section):
    """The KV cache and its allocation policy."""

    policy: PolicyName = "contiguous"
    """A preset or a plug-in, by name; see ``kvsim policies``."""
    cells: Annotated[int, Field(ge=2, le=2**24)] = 16384
    """Cells of the cache, one for each token (``--ctx-size``)."""
    block_size: PositiveInt = PRESENT["vLLM"].block_size
    """Cells in a block, for paged layouts."""
    chunk_size: PositiveInt = 64
    """Cells in a chunk, for the chunked layout."""
    page_tokens: PositiveInt = 32
    """Virtually contiguous: tokens in a page, which are the bytes of a page over those of a token's K in one layer: 32
    of Llama 3.1 8B in 16 bits where pages have 64 KiB."""
    threshold: Annotated[float, Field(ge=0, le=1)] = LLAMACPP_B4666.threshold
    """Fragmentation ratio above which the threshold trigger starts compaction (``--defrag-thold``)."""
    window: Several = 256
    """Tokens that a ring or a sliding window keeps for each sequence."""
    full_layers: Annotated[int, Field(ge=1, le=1000)] = 1
    """Two-level pages: layers with full attention, for so many ``window_layers``; only the ratio matters."""
    window_layers: Annotated[int, Field(ge=1, le=1000)] = 5
    """Two-level pages: layers with a sliding window, for so many ``full_layers``."""
    sinks: NonNegativeInt = 4
    """First tokens of each sequence that a ring never overwrites, and StreamingLLM never evicts."""
    budget: Several = 256
    """Token eviction: tokens that each sequence keeps in each group of layers."""
    budget_groups: Annotated[int, Field(ge=1, le=128)] = 1
    """Token eviction: equal groups of layers, each of which evicts by itself and has blocks of its own."""
    unified: bool | None = None
    """One cache for all slots (``--kv-unified``), or an equal share for each, under policies that support both; by
    default as in the engine that the policy stands for, but one where ``server.slot_context`` is more than a share."""
    search: SearchName | None = None
    """How free cells for a sequence's region are searched for, under policies that have regions; by default the
    policy's own search."""
    sort_batch: bool = False
    """Prompt/decode regions: place the longest sequences of a batch first."""
    pad: PositiveInt = 32
    """The masked kernel reads a multiple of this many cells."""
    kernel: Kernel | None = None
    """How attention reads the cache; by default the kernel of the policy."""
    type_k: Storage = "f32"
    """Storage type of keys (``--cache-type-k``); f16 for models that the NumPy engine does not run, as in engines."""
    type_v: Storage = "f32"
    """Storage type of values (``--cache-type-v``); by default as for keys."""
    prefix_cache: bool = True
    """Paged: full blocks are reused by their content (``--enable-prefix-caching``)."""
    eviction: Annotated[str, AfterValidator(partial(known_in, EVICTION_ORDERS))] = "lru"
    """Paged: the order in which cached blocks are evicted; one of your own, too."""
    free_order: FreeOrder = "0.33.0"
    """Paged: the version of vLLM whose order of free blocks is followed."""
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Paged: share of the blocks that a waiting request must leave free while others run."""
    admission: AdmissionRuleName = "as-it-fits"
    """Paged: a request starts if there is room for what it has ("as-it-fits", vLLM), for all that it and those that run
    may ever hold ("no-evict", TensorRT-LLM's GUARANTEED_NO_EVICT), or for what they are expected to ("expected",
    SGLang). What they may hold follows from ``workload.max_output_tokens`` and ``server.slot_context``."""
    conservativeness: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Paged, ``admission = "expected"``: the larger, the more running requests are expected to generate
    (SGLang's ``--schedule-conservativeness``)."""
    groups: Annotated[tuple[GroupSection, ...], entries(0, 64)] = ()
    """vllm: groups of layers that keep different things, over one pool of blocks; without any, all layers keep every
    token."""
    retention: Annotated[int, Field(ge=-1)] = 0
    """vllm, with ``groups``: tokens between the states and windows that stay cached, besides those at the ends of
    prompts and where texts were seen to part; 0: only these, -1: all (``--prefix-cache-retention-interval``)."""
    host_cells: Annotated[int, Field(ge=0, le=2**26)] = 0
    """Paged: cells in host memory, for blocks that are evicted or swapped out; ``vllm``: for chunks of blocks, which
    are copied beside the steps, as by vLLM's OffloadingConnector (``--kv-offloading-size``)."""
    offload_order: OffloadOrder = "lru"
    """vllm: which chunk in host memory is evicted first (``eviction_policy``)."""
    offload_blocks: PositiveInt = 1
    """vllm: blocks in a chunk (``blocks_per_chunk``)."""
    offload_store_threshold: NonNegativeInt = 0
    """vllm: how often a chunk must have been computed before it is stored (``store_threshold``); below 2: at once."""
    offload_answers: bool = False
    """vllm: chunks of answers are stored, too, not only those of prompts (``offload_prompt_only``, the reverse)."""
    disk_cells: Annotated[int, Field(ge=0, le=2**40)] = 0
    """vllm: cells in files behind those in host memory, as by vLLM's TieringOffloadingSpec with a tier ``fs``."""


class MachineSection(Section):
    """The machine whose speed is predicted."""

    profile: str = "default"
    """The name of a shipped profile, or the path of one that ``kvsim calibrate`` or ``kvsim profile`` wrote."""
    device: str | None = None
    """A device by name or its file; it picks the times of ``model.name`` on it, and by default the cells that its
    memory leaves, and the scheduler, policy and settings of the engine."""
    engine: Engine | None = None
    """The engine on a device, "vllm" or "llamacpp"; by default that of the scheduler or the policy that is named, that
    which has the type of weights, and that which people run on such a device."""
    tensor_parallel: PositiveInt = 1
    """Devices that share the model (``--tensor-parallel-size``)."""
    expert_parallel: PositiveInt = 1
    """vLLM: servers that divide the experts of the model, and step together: all those of ``cluster``
    (``--data-parallel-size`` with ``--enable-expert-parallel``)."""
    weights: str | None = None
    """Storage type of the weights on a device, unless it is the model's own."""
    n_gpu_layers: NonNegativeInt | None = None
    """llama.cpp: layers on the device, of which the head is one; the CPU has the others (``-ngl``). By default all."""
    n_cpu_moe: NonNegativeInt = 0
    """llama.cpp: layers whose experts the CPU has (``--n-cpu-moe``)."""
    cpu_gb_s: PositiveFloat | None = None
    """llama.cpp: bandwidth of the computer's memory, from which layers on the CPU are read, 10**9 bytes/s by its data
    sheet; by default that of the device's file, or 89.6, of two channels of DDR5-5600."""
    host_gb_s: PositiveFloat | None = None
    """Bandwidth to the host tier, 10**9 bytes/s; by default that of the device's bus, without a device that of copies
    inside the cache, by the profile."""
    host_latency_s: NonNegativeFloat = 0.0
    """Seconds before each run of cells on the way to or from the host tier; only with ``host_gb_s``."""
    disk_gb_s: PositiveFloat = 5.0
    """Bandwidth of the disk in each direction, 10**9 bytes/s; by default what a datacenter's NVMe disk sustains
    (``vllm/v1/kv_offload/tiering/backpressure.py``)."""
    disk_latency_s: NonNegativeFloat = 1e-4
    """Seconds that each file takes beside its bytes, and an answer of the disk to what is looked up."""
    map_page_us: NonNegativeFloat = 0.0
    """Virtually contiguous: microseconds to map one page of K or V of one layer. CUDA takes 40 for a page of 2 MiB: 2
    of ``cuMemMap`` and 38 of ``cuMemSetAccess`` (vAttention, arXiv 2405.04437, Table 3). Smaller pages need a driver
    of their own."""
