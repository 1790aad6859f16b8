"""What vLLM sets aside besides weights and blocks: its own profile of memory, version by version.

At start vLLM runs one pass of ``--max-num-batched-tokens`` tokens and one sampling of ``--max-num-seqs`` rows, and
makes blocks of what is left of its share (``v1/worker/gpu_worker.py: determine_available_memory``,
``v1/worker/gpu_model_runner.py: profile_run``, ``_dummy_sampler_run``; since 0.23 ``v1/worker/gpu/model_runner.py``;
``utils/mem_utils.py: memory_profiling``; read in 0.14.1, 0.19.0, 0.23.0 and 0.33.0). Tensors are counted from the
source. What no source tells is a range of what servers logged, and its middle is taken:

- [1] github.com/llm-d-incubation/llm-d-planner, docs/empirical-vllm-memory-results.md (Apache-2.0): vLLM 0.11.0 on an
  H100: peaks of 4.76, 5.56 and 5.64 GiB with 1,024 rows, 0.13 GiB not torch's, 0.54 with two GPUs.
- [2] A log of vLLM 0.19.0 on an H100, Llama 3.1 8B, quoted in a public parser of such logs: peak 1.89 GiB, not torch's
  0.25, graphs estimated at 0.84.
- [3] Start-up logs in public repositories: RTX 4090, 0.11: 0.02 GiB not torch's; RTX PRO 6000: 0.26; 0.27 and 0.28:
  0.30 and 0.47 GiB consumed beyond the weights; graphs of dense models from 0 to 0.84.
- [4] vLLM issues 54122 and 54383, pull request 54479: cold and warm starts of one server, compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvsim.costs.memory_settings import Part, PlanSettings
from kvsim.errors import UserError
from kvsim.model.cache_groups import MemoryShape

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class LoggedRange:
    """What servers logged, in bytes."""

    low: int
    high: int
    source: str

    @property
    def middle(self) -> int:
        """The estimate where nothing more is known."""
        return (self.low + self.high) // 2


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """How a version of vLLM finds out what it can make blocks of."""

    version: str
    utilization: float
    """Default of ``--gpu-memory-utilization``."""
    logit_bytes: int
    """Bytes held for each logit at the peak of the sampler."""
    buffered_rows: int
    """Rows of 4-byte logits that its kernel keeps besides."""
    sampler: str
    graphs: LoggedRange
    """CUDA graphs, as far as they are subtracted before blocks are made."""
    beside: LoggedRange
    """What is not torch's."""
    beside_name: str = "not torch's"


_NOT_TORCH = LoggedRange(
    _GIB * 2 // 100, _GIB * 26 // 100, "logs of 0.11 to 0.19: RTX 4090 0.02, H100 0.13 and 0.25 GiB"
)
_CONSUMED = LoggedRange(_GIB * 30 // 100, _GIB * 47 // 100, "logs of 0.27 and 0.28")
_NO_GRAPHS = LoggedRange(0, 0, "not subtracted: this version makes its blocks as if there were none")
_GRAPHS = LoggedRange(0, _GIB * 84 // 100, "logs of dense models with the default sizes of graphs")
_SECOND_GPU = _GIB * 41 // 100
"""What two GPUs took beyond one ([1]: 0.54 against 0.13 GiB); later versions set up NCCL before they measure."""

_RUNS = (
    # Logits in 2 and 4 bytes, sorted values (4) and indices (8), and 20 in torch's segmented sort: [1] has 38.0.
    ProfileRun("0.11.0", 0.9, 38, 0, "the sampler sorts all logits", _NO_GRAPHS, _NOT_TORCH),
    # Logits in 2 and 4 bytes, probabilities and noise in 4; topk_topp_triton.py buffers a row per multiprocessor.
    ProfileRun("0.19.0", 0.9, 14, 128, "logits, probabilities and noise", _NO_GRAPHS, _NOT_TORCH),
    # Model Runner V2, the default for dense Llama, Mistral and Qwen3, samples from one copy and estimates no graphs.
    ProfileRun("0.23.0", 0.92, 6, 0, "logits and a copy in 4 bytes", _NO_GRAPHS, _NOT_TORCH),
    # It also samples with top-k and top-p (FlashInfer: masked logits and probabilities in 4 bytes) and tries graphs.
    ProfileRun(
        "0.33.0",
        0.92,
        14,
        0,
        "logits, a copy, masked logits and probabilities",
        _GRAPHS,
        _CONSUMED,
        "not torch's, and buffers that stay",
    ),
)


def version_numbers(version: str) -> tuple[int, ...]:
    """A version such as 0.19.0 as numbers, which compare as versions do."""
    return tuple(int(part) for part in version.split("."))


def profile_run(version: str) -> ProfileRun:
    """The profile run of a version such as 0.19.0: that of the last version known here which is not later.

    Raises ``UserError`` for what is no version and for versions before 0.11.0.
    """
    if not re.fullmatch(r"\d{1,4}(\.\d{1,4}){1,2}", version):
        raise UserError(f"--vllm-version is {version!r:.40}; a version such as {_RUNS[-1].version} is accepted")
    found = [run for run in _RUNS if version_numbers(run.version) <= version_numbers(version)]
    if not found:
        raise UserError(f"--vllm-version is {version}; {_RUNS[0].version} and later are known here")
    return found[-1]


def serve_defaults(memory: int | None, device: str | None = None) -> tuple[int, int]:
    """Tokens in a step and sequences at once that ``vllm serve`` takes by default on a device of that memory.

    Source: ``EngineArgs.get_batch_defaults`` of 0.33, in which an A100 counts as a small device. ``device``: a name of
    ``devices.toml``; None: any other than an A100.
    """
    if memory is None or memory < 70 * _GIB or (device is not None and device.startswith("a100")):
        return 2048, 256
    return (16384 if memory >= 160 * _GIB else 8192), 1024


def profile_parts(shape: MemoryShape, s: PlanSettings) -> list[Part]:
    """The parts that vLLM finds by its profile run, on one GPU; sizes in bytes."""
    run = profile_run(s.vllm_version)
    found = [_rotary(shape, s), _activations(shape, s, run)]
    found.append(_logged("CUDA graphs", run.graphs, 0))
    found.append(_logged(run.beside_name, run.beside, _SECOND_GPU if s.tensor_parallel > 1 else 0))
    return found


def _logged(name: str, known: LoggedRange, more: int) -> Part:
    """A part of which only a range is known; ``more``: bytes by which its upper end may be exceeded."""
    wider = LoggedRange(known.low, known.high + more, known.source)
    return Part("vllm", "buffers", name, wider.middle, wider.low < wider.high, "", wider.low, wider.high, wider.source)


def _rotary(shape: MemoryShape, s: PlanSettings) -> Part:
    """Sines and cosines for every position of the model's context, one table for each kind of layer.

    ``rotary_embedding/base.py: _compute_cos_sin_cache``, in 2 bytes. With it, Llama 3.1 8B is the 14.99 GiB that vLLM
    logs. Heads are taken to be rotated whole; of a latent only a small part is, which is left out.
    """
    heads = {group.kind: group.k_head for group in shape.cells if group.kind != "latent"}
    if "chunked" in heads:
        heads.pop("full", None)  # Llama 4 rotates within chunks only.
    size = 2 * (shape.context or s.ctx) * sum(heads.values())
    return Part("vllm", "buffers", "rotary table", size, True, "", size, size, "rotary_embedding/base.py")


def _activations(shape: MemoryShape, s: PlanSettings, run: ProfileRun) -> Part:
    """The peak of the profile run, and that of a first start, which compiles within it."""
    warm = max(_feed_forward_peak(shape, s), _sampler_peak(shape, s, run), _index_peak(shape, s))
    table, batch = _embedding_table(shape, s), 2 * s.batch * shape.d_model
    # Inductor times kernels on random inputs as large as the real ones (torch/_inductor/scheduler.py:
    # benchmark_combo_kernel), the table of embeddings among them. Published pairs of a cold and a warm start ([4])
    # come to 1.1 and to more than 2 tables.
    cold = max(warm, table + batch)
    size, at_most = (cold, max(warm, 3 * table + batch)) if s.first_start else (warm, cold)
    detail = f"{s.batch:,} tokens in a pass, {min(s.parallel, s.batch):,} rows of logits"
    source = (
        f"vLLM {run.version}: the feed-forward layer, or {run.sampler}; most on a first start, which compiles (vLLM "
        "issue 54122)"
    )
    return Part("vllm", "buffers", "activation peak", size, True, detail, warm, at_most, source)


def _feed_forward_peak(shape: MemoryShape, s: PlanSettings) -> int:
    """Bytes in a feed-forward layer, at 2 per number.

    For each token: both inputs of the gate and its output, the residual before and after, and the output of attention,
    which the caller of the compiled piece still holds. Llama 3.1 8B with batches of 20,000 and 29,000 tokens took 2.07
    and 2.99 GiB (vLLM issue 10517); this is 2.06 and 2.99.
    """
    group = next(iter(shape.cells), None)
    plain = group is not None and group.kind != "latent"
    attention = shape.n_heads * group.v_head if group and plain else shape.d_model
    divided = 3 * shape.d_ff + attention
    return 2 * s.batch * (divided // s.tensor_parallel + 2 * shape.d_model)


def _index_peak(shape: MemoryShape, s: PlanSettings) -> int:
    """Bytes that an indexer reserves: latents of several contexts in 16 bits, and scores in 512 MiB.

    ``sparse_mla_prefill_workspace_factor`` in ``config/vllm.py``, ``VLLM_SPARSE_INDEXER_MAX_LOGITS_MB``.
    """
    if not shape.indices:
        return 0
    contexts = 5 if s.ctx <= 1 << 18 else 2
    return contexts * s.ctx * 2 * shape.cells[0].k_row + (512 << 20)


def _sampler_peak(shape: MemoryShape, s: PlanSettings, run: ProfileRun) -> int:
    """Bytes while a token is drawn for each sequence, with the hidden states of the pass still held.

    Logits are gathered: every GPU has those of the whole vocabulary. Llama 3.1 8B on an H100, 8,192 tokens, 1,024 rows:
    4.76 GiB logged with 0.11.0 ([1]; this is 4.73) and 1.89 with 0.19.0 ([2]; this is 1.85); the rest is cuBLAS's
    workspace.
    """
    rows = min(s.parallel, s.batch)
    hidden = 2 * s.batch * shape.d_model + 4 * rows * shape.d_model
    return hidden + shape.vocabulary * (rows * run.logit_bytes + 4 * min(rows, run.buffered_rows))


def _embedding_table(shape: MemoryShape, s: PlanSettings) -> int:
    """Bytes of one GPU's share of the embeddings."""
    return 2 * shape.vocabulary * shape.d_model // s.tensor_parallel
