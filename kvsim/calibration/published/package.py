"""Passes priced by NVIDIA's ``aiconfigurator-core``, from the kernels of real engines that its makers measured.

The package adds up the kernels of one forward pass (matrix products and attention from its tables, normalisation,
rotation and activation by their bytes), so that its times have all layers, the language-model head and the exchange
between GPUs, but neither what the host adds nor the sampler. It gets the model as a folder with a config.json: given a
name that it does not know, it would ask the network.

How it puts a pass together (``rank_latency_ms`` and ``get_mix_step_ops`` in its Rust sources, aiconfigurator 0.12.0):
prompts count as if all were as long as their mean, decodes as if all contexts were; attention of a prompt is that of
the whole prompt, less the share of the cached part's square; the head works for one sequence where a prompt is in the
pass.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from kvsim.calibration.published.package_names import ENGINES, SYSTEMS, WEIGHTS
from kvsim.calibration.published.sampling import PASSES, PlannedPass, Reach, plan_passes
from kvsim.calibration.published.table_making import SEQUENCES, MeasuredParts
from kvsim.costs.devices import Device, device_named
from kvsim.costs.pass_layout import Sample
from kvsim.costs.profile import Source
from kvsim.errors import UserError, choices, no_such
from kvsim.installation import install_extra
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.memory_shapes import config_fields, memory_shape

NAME = "aiconfigurator-core"
LICENCE = "Apache-2.0"
HOME = "https://github.com/ai-dynamo/aiconfigurator"

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    # Without a window, their layers are those of a Llama of the same shape.
    "mistral": "LlamaForCausalLM",
    "phi3": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""The package's names of architectures, by ``model_type``."""

_LONGEST = 65_536
"""Tokens of the longest context in the package's tables of attention."""
_LEAST_CELLS = 65_536
"""Cells of all sequences up to which attention is asked for even if the device's memory holds fewer."""
_TOKENS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 65, 80, 96, 128, 129, 160, 192, 193, 256, 257, 320, 384, 385, 448, 512, 513),
    *(640, 768, 896, 1024, 1025, 1280, 1536, 1792, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 12288, 16384),
)
"""Tokens of the passes whose matrices are asked for; on devices, one token more than a kernel's tile costs as the next
tile."""
_SHORT = 128
"""Context of the passes whose matrices are asked for; these do not depend on it."""
_ATTENTION, _HEAD = "attention|mla_block", "logits"
"""Parts of the package's names of operations."""
_MODES = {"int8": "int8_wo", "int4": "int4_wo"}
"""The package's names of ways to compute with types of weights, where they are not those of the types."""
_ALIKE = 0.02
"""Difference between passes with and without prompts that is not worth a table of its own."""
_MOST_CELLS = 524_288
"""Tokens of all sequences of a pass together in these tables."""


@dataclass(frozen=True, slots=True)
class PackageModel:
    """A model on a device as the package is asked about it; every name has been checked."""

    device: Device
    shape: MemoryShape
    config: Mapping[str, Any]
    """The config.json that the package gets."""
    engine: str
    engine_version: str
    tp: int
    chosen_weights: str | None
    """The type of weights that was asked for."""
    weights: str
    """As in ``WEIGHTS``, or what the model's own config.json says."""
    weight_dtype: str | None
    """The package's name of it; None: it reads the config.json."""

    @property
    def what(self) -> str:
        """The model in words."""
        return f"{self.shape.name} in {self.weights} on {self.device.name} under {self.engine}"

    @property
    def source(self) -> Source:
        """What answers it. Raises ``UserError`` if it is missing."""
        return Source(
            title=f"NVIDIA's {NAME}",
            url=HOME,
            licence=LICENCE,
            version=package_version(),
            notes=(
                f"{NAME} adds up kernels of {self.engine} {self.engine_version} that NVIDIA measured "
                f"({self.device.title}), and computes from their bytes what was not measured: normalisation, rotation, "
                "activation.",
                f"{NAME} knows neither what the host adds to a step nor the sampler.",
                f"{NAME} prices decodes beside a prompt as decodes alone. Its passes for Llama 3.1 8B on an RTX PRO "
                "6000 take, in the median, this many times as long as those of LLMServingSim's tables of vLLM 0.19.0: "
                "decodes 0.98, prompts alone with at most 2,048 tokens cached 1.03, prompts beside decodes of 1,000 to "
                "100,000 cells 0.97, of 100,000 to 300,000 cells 0.80.",
            ),
        )

    @property
    def reach(self) -> Reach:
        """How far passes go: as the model, the device's memory and the package's tables do."""
        fits = self.tp * self.device.memory_bytes // self.shape.cell_bytes("f16", "f16")
        return Reach(min(self.shape.context or _LONGEST, _LONGEST), min(fits, _MOST_CELLS))


def package_parts(question: PackageModel) -> MeasuredParts:
    """What the parts of passes take by the package. K and V are in 16 bits.

    Raises ``UserError`` for whatever the package does not know, and if it is missing.
    """
    reach, handle = question.reach, _Handle(question)
    work, head, prompt_work = {}, {}, {}
    for n in _TOKENS:
        prompt_work[n] = work[n] = _seconds(handle.prompt(n), but=(_ATTENTION, _HEAD))
        if n <= SEQUENCES:
            alone = handle.decode(n, _SHORT)
            work[n], head[n] = _seconds(alone, but=(_ATTENTION, _HEAD)), _seconds(alone, only=_HEAD)
    decode = {
        (b, c): _seconds(handle.decode(b, c), only=_ATTENTION)
        for b, c in product((1 << i for i in range(11)), (1 << i for i in range(4, 18)))
        if c <= reach.context and b * c <= max(reach.cells, _LEAST_CELLS)
    }
    prompt = {
        (n, cached): _seconds(handle.prompt(n, cached), only=_ATTENTION)
        for n, cached in product((1 << i for i in range(4, 15)), (0, *(1 << i for i in range(8, 17))))
        if n + cached <= reach.context
    }
    alike = all(abs(prompt_work[n] / work[n] - 1) < _ALIKE for n in prompt_work)
    return MeasuredParts(work, None if alike else prompt_work, head, decode, prompt)


def _seconds(ops: Iterable[Any], *, only: str = "", but: tuple[str, ...] = ()) -> float:
    """The seconds of operations by their names, together; each is a name, milliseconds, and more."""
    pattern, without = re.compile(only), [re.compile(each) for each in but]
    return (
        sum(float(ms) for name, ms, *_ in ops if pattern.search(name) and not any(p.search(name) for p in without))
        / 1e3
    )


def package_passes(question: PackageModel, rng: np.random.Generator, n: int = PASSES) -> list[Sample]:
    """Price ``n`` passes: decode-only ones, and ones with prompts (``mixed``). K and V are in 16 bits.

    Raises ``UserError`` for whatever the package does not know, and if it is missing.
    """
    price = pricer(question)
    planned = enumerate(plan_passes(question.reach, rng, n))
    return [each.sample(price(each), i, mixed=each.prompts > 0) for i, each in planned]


def ask(
    device: str,
    model: str,
    *,
    engine: str = "vllm",
    engine_version: str | None = None,
    tp: int = 1,
    weights: str | None = None,
) -> PackageModel:
    """Check what the package is to be asked. Raises ``UserError``.

    ``model`` is a name of the shipped table, a config.json (or its folder) or a GGUF file; ``engine_version`` is the
    newest that the package has in full for the device, unless given; ``weights`` are those of the model's config.json
    or, if it does not say, bf16.
    """
    found = device_named(device)
    if found.name not in SYSTEMS:
        raise UserError(f"{NAME} has no kernels of {found.name}; {choices(found.name, SYSTEMS)}")
    if engine not in ENGINES:
        raise UserError(no_such("engine", engine, ENGINES))
    if weights is not None and weights not in WEIGHTS:
        raise UserError(no_such("type of weights", weights, WEIGHTS))
    shape, fields = memory_shape(model), config_fields(model)
    config = _config(fields, shape, drop_quantization=weights is not None)
    heads = shape.n_heads
    if tp < 1 or heads % tp:
        fine = ", ".join(str(n) for n in range(1, min(heads, 64) + 1) if heads % n == 0)
        raise UserError(f"tp is {tp}; {shape.name} has {heads} attention heads, of which {fine} are divisors")
    stored = weights
    if stored is None and "quantization_config" not in config:
        stored = shape.default_type if shape.default_type in WEIGHTS else "bf16"
    if stored is None and shape.default_type not in WEIGHTS:
        raise UserError(f"{shape.name}: {shape.default_type}: {NAME} is not asked about it; {choices('', WEIGHTS)}")
    return PackageModel(
        device=found,
        shape=shape,
        config=config,
        engine=engine,
        engine_version=_engine_version(SYSTEMS[found.name], engine, engine_version),
        tp=tp,
        chosen_weights=weights,
        weights=stored or shape.default_type,
        weight_dtype=WEIGHTS[stored] if stored is not None else None,
    )


class _Handle:
    """The model as the package has compiled it, asked for the operations of a pass: names, milliseconds, and more.

    Raises ``UserError`` where the package cannot price it.
    """

    def __init__(self, question: PackageModel, name: str | None = None, **modes: str):
        """``name``: ask for the model that the package knows by this name instead of handing it over; ``modes``: how
        it multiplies, in the package's words."""
        self._what = question.what
        engine = _package("aiconfigurator_core.sdk.engine")
        if question.weight_dtype is not None:
            modes["gemm_quant_mode"] = _MODES.get(question.weight_dtype, question.weight_dtype)
            if question.shape.n_experts:
                modes["moe_quant_mode"] = modes["gemm_quant_mode"]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(dict(question.config)), encoding="utf-8")
            self._engine = self._asked(
                engine.EngineHandle.compile,
                name or folder,
                SYSTEMS[question.device.name],
                question.engine,
                backend_version=question.engine_version,
                tp_size=question.tp,
                moe_tp_size=question.tp,
                kv_block_size=16,
                kvcache_quant_mode="bfloat16",
                **modes,
            )

    def decode(self, sequences: int, context: int) -> list[Any]:
        """Counts for sequences that decode."""
        found: list[Any] = self._asked(self._engine.decode_step_per_op, sequences, context, 2)
        return found

    def prompt(self, tokens: int, cached: int = 0) -> list[Any]:
        """Counts for ``tokens`` tokens of one prompt, behind ``cached`` that were computed before."""
        whole = {"batch_size": 1, "isl": tokens + cached, "osl": 1, "prefix": cached, "mode": "static_ctx"}
        found: tuple[list[Any], list[Any]] = self._asked(self._engine.run_static_per_op, **whole)
        return found[0]

    def _asked(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            with _offline_and_quiet():
                return call(*given, **named)
        except Exception as e:
            raise _unknown(self._what, e) from None


def pricer(question: PackageModel, name: str | None = None) -> Callable[[PlannedPass], float]:
    """A function that returns a pass's seconds. Raises ``UserError`` if the package cannot price the model.

    ``name``: ask for the model that the package knows by this name instead of handing it over.
    """
    what = question.what
    settings = {
        "schema_version": 1,
        "system_name": SYSTEMS[question.device.name],
        "backend": question.engine,
        "backend_version": question.engine_version,
        "tp_size": question.tp,
        "moe_tp_size": question.tp,
        "pp_size": 1,
        "kv_block_size": 16,
        "kv_cache_dtype": "bfloat16",
    }
    if question.weight_dtype is not None:
        settings |= {"weight_dtype": question.weight_dtype, "moe_dtype": question.weight_dtype}
    package = _package()
    with tempfile.TemporaryDirectory() as folder, _offline_and_quiet():
        (Path(folder) / "config.json").write_text(json.dumps(dict(question.config)), encoding="utf-8")
        try:
            model = package.RustForwardPassPerfModel.from_native(json.dumps(settings | {"model_name": name or folder}))
        except Exception as e:
            raise _unknown(what, e) from None

    def seconds(planned: PlannedPass) -> float:
        try:
            with _offline_and_quiet():
                found = model.estimate_forward_pass_time_ms(json.dumps({"scheduled_requests": _scheduled(planned)}))
        except Exception as e:
            raise _unknown(what, e) from None
        if found is None or not math.isfinite(found) or found <= 0:
            raise UserError(f"{NAME} has no times for {what}: {found} ms for {planned}")
        return float(found) / 1e3

    return seconds


def package_version() -> str:
    """The installed version of the package. Raises ``UserError`` if it is missing."""
    try:
        return version(NAME)
    except PackageNotFoundError as e:
        raise _missing(e) from None


def _missing(error: Exception) -> UserError:
    return UserError(f"{NAME} cannot be imported ({error}); install it with: {install_extra('gpu')}")


def _package(module: str = "aiconfigurator_core") -> Any:
    try:
        with _offline_and_quiet():
            return import_module(module)
    except ImportError as e:
        raise _missing(e) from None


def _engine_version(system: str, engine: str, wanted: str | None) -> str:
    """The version of the engine whose kernels are asked for. Raises ``UserError``."""
    database = _package("aiconfigurator_core.sdk.perf_database")
    with _offline_and_quiet():
        slots: dict[str, str] = database.get_version_slots(system, engine) or {}
    if not slots:
        raise UserError(f"{NAME} has no kernels of {engine} on {system}")
    if wanted is None:
        # The next version holds only what was measured anew, and falls back on the current one for the rest.
        return slots["current"]
    if wanted not in slots.values():
        raise UserError(no_such(f"version of {engine} on {system}", wanted, slots.values()))
    return wanted


def _config(fields: Mapping[str, Any], shape: MemoryShape, *, drop_quantization: bool) -> dict[str, Any]:
    """The config.json for the package. Raises ``UserError`` for a model that it cannot price."""
    kind = fields["model_type"]
    if kind not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UserError(f"{shape.name}: {NAME} is not asked about model_type {kind!r:.40}; accepted: {known}")
    if any(group.kind == "window" for group in shape.groups):
        raise UserError(f"{shape.name}: a profile does not know layers with a sliding window apart from others")
    config = {"max_position_embeddings": _LONGEST, **fields, "architectures": [_ARCHITECTURES[kind]]}
    if drop_quantization:
        config.pop("quantization_config", None)
    return config


def _scheduled(planned: PlannedPass) -> dict[str, int]:
    """The pass in the package's words, which are those of Dynamo's metrics of a forward pass."""
    return {
        "num_prefill_requests": planned.prompts,
        "sum_prefill_tokens": planned.prompts * planned.tokens,
        "sum_prefill_kv_tokens": planned.prompts * planned.cached,
        "num_decode_requests": planned.decodes,
        "sum_decode_kv_tokens": planned.decodes * planned.context,
    }


_PLAINLY = {
    "missing system flops": "the device does not compute with such weights",
    r"\bmoe\b.*data missing": "it has no kernels of experts in such weights there",
    r"\bgemm\b.*data missing": "it has no kernels of matrices in such weights there",
    "attention.*data missing": "it has no kernels of such attention there",
    "perf data directory not found": "it has no kernels of that engine there",
}
"""What messages of the package mean, by patterns of them."""


def _unknown(what: str, error: Exception) -> UserError:
    """What the package does not know, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = lines[0].rsplit("compile_engine: ", 1)[-1].split(" at /", 1)[0].split(": tried ", 1)[0]
    if isinstance(error, KeyError):  # Of a mode that it has no entry for.
        said = "it knows no such weights for this model"
    for pattern, plain in _PLAINLY.items():
        if re.search(pattern, said, re.IGNORECASE):
            said = plain
            break
    return UserError(f"{NAME} has no times for {what}: {shorten(said, 240, placeholder=' ...')}")


@contextmanager
def _offline_and_quiet() -> Iterator[None]:
    """Let no library that the package may call ask the network, nor it tell on stderr which tables it reads."""
    logger, before = logging.getLogger("aiconfigurator_core"), os.environ.get("HF_HUB_OFFLINE")
    level = logger.level
    os.environ["HF_HUB_OFFLINE"] = "1"
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
