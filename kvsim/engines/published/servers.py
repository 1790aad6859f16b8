"""The server behind a published point, as a scenario: what the point says, what its makers' scripts say, and vLLM's
defaults for the rest."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvsim.costs.devices import device_named
from kvsim.costs.memory_plan import plan
from kvsim.costs.vllm_profile import serve_defaults
from kvsim.engines.published.points import Half, Point
from kvsim.engines.recordings.vllm_scenario import VllmLimits, vllm_behaviour, vllm_scenario
from kvsim.errors import UserError
from kvsim.model.engine_versions import PRESENT
from kvsim.model.memory_shapes import memory_shape
from kvsim.scenario.scenario import Scenario, load_scenario

FRONT_END = (0.015, 5.5e-6)
"""What the clients and the one process that takes their requests add: seconds around each, and per token of its prompt,
prompt after prompt. Fitted to TTFT in the third of InferenceMAX's points that may be looked at, over all models and
devices."""
REQUESTS = 10
"""Requests of each client, as in InferenceMAX and in aisimulate's replay of its points."""
_UNSAID_VERSION = {False: "0.11.0", True: "0.19.0"}
"""The version where a point names none: of 2025, and of a nightly build of April 2026."""
_WEIGHTS = {"nvfp4": "nvfp4", "fp8": "fp8", "int4_wo": "int4", "": None}
"""Our names of the types of weights."""
_MOST_CELLS = 2**24
"""Cells that a scenario can have."""
_OWN = {"gpt-oss-120b": "nvfp4", "kimi-k2.5": "int4_wo", "minimax-m2.5": "fp8"}
"""Models whose own type of weights is what the file calls so."""
_IN_BLOCKS = ("qwen3-235b-a22b",)
"""Models that are published in blocks of fp8 where the file says fp8 (``weight_block_size`` in their config.json)."""


class ServerFlags(BaseModel):
    """An entry of ``servers.toml``: which points it is of, and what their servers were started with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    points: str = ""
    """A pattern of ``Point.source``."""
    model: str | None = None
    device: str | None = None
    precision: str | None = None
    kv: Literal["f16", "fp8"] = "f16"
    sequences: int | Literal["concurrency"] | None = None
    tokens: int | Literal["1 x isl", "2 x isl"] | None = None
    context: int | None = None
    utilization: float | None = None
    block_size: int = PRESENT["vLLM"].block_size
    asynchronous: bool | None = None
    lengths: float = 1.0
    front_end: bool = False
    """Whether clients see ``FRONT_END`` beside the server's own time."""
    source: str

    def fits(self, point: Point) -> bool:
        """Whether it is of that point."""
        alike = all(
            wanted in (None, there)
            for wanted, there in (
                (self.model, point.model),
                (self.device, point.device),
                (self.precision, point.precision),
            )
        )
        return alike and re.search(self.points, point.source) is not None

    def described(self) -> str:
        """What is taken from it, in words."""
        lengths = f"lengths drawn from {self.lengths:.0%} to 100 %" if self.lengths < 1 else "fixed lengths"
        said = {
            "K and V in": self.kv,
            "--max-num-seqs": self.sequences,
            "--max-num-batched-tokens": self.tokens,
            "--max-model-len": self.context,
            "--gpu-memory-utilization": self.utilization,
            "--block-size": self.block_size if "block_size" in self.model_fields_set else None,
            "--async-scheduling": "on" if self.asynchronous else None,
        }
        words = [f"{name} {value}" for name, value in said.items() if value is not None]
        return ", ".join([*words, lengths, *(["front end"] if self.front_end else [])])


@cache
def _all_flags() -> tuple[ServerFlags, ...]:
    text = (resources.files("kvsim.engines.published") / "servers.toml").read_text(encoding="utf-8")
    return tuple(ServerFlags.model_validate(entry) for entry in tomllib.loads(text)["server"])


def flags_of(point: Point) -> ServerFlags:
    """What is known of a point's server beside the point; the last entry fits every point."""
    return next(flags for flags in _all_flags() if flags.fits(point))


def why_not(point: Point) -> str | None:
    """Why a point cannot be replayed by what it is; None if it can."""
    if point.engine != "vllm":
        return f"{point.engine}: only servers of vLLM are replayed"
    halves = point.halves or ()
    if point.apart and not (halves and point.concurrency):
        return "the point does not say how many servers prefill and decode, or how many clients there were"
    if point.pp > 1 or any(half.pp > 1 for half in halves):
        return "pipeline parallelism is not simulated"
    if "dynamo_version" in point.source and "silicon_concurrency" not in point.source:
        return "the point does not say how many clients each server had: Dynamo shares them out over several"
    if point.dp > 1 or any(half.dp > 1 for half in halves):
        return "attention data parallelism: several schedulers behind one address are not simulated"
    return None


def version_of(point: Point) -> str:
    """The version of vLLM: the point's, or that of its time where it names none."""
    if re.match(r"v?\d+\.\d+", point.version):
        return point.version.removeprefix("v")
    return _UNSAID_VERSION[bool(point.version)]


def scenario_of(point: Point, flags: ServerFlags) -> tuple[Scenario, int]:
    """The scenario of a point under vLLM, and the blocks that its server has, or all its servers that decode.

    The scenario has fewer where they are more than cells can be, and than any request needs. Raises ``UserError`` for
    models, devices, types and times not known here.
    """
    if point.halves is not None:
        return _apart(point, point.halves, flags)
    device, shape = device_named(point.device), memory_shape(point.model)
    if point.weights not in _WEIGHTS:
        raise UserError(f"weights in {point.weights!r:.40} are not known here")
    weights = None if _OWN.get(point.model) == point.weights else _WEIGHTS[point.weights]
    weights = "fp8_block" if weights == "fp8" and point.model in _IN_BLOCKS else weights
    usual_tokens, usual_sequences = serve_defaults(device.memory_bytes, device.name)
    sequences = point.concurrency if flags.sequences == "concurrency" else flags.sequences or usual_sequences
    said = flags.tokens or usual_tokens
    tokens = int(said.removesuffix(" x isl")) * point.isl if isinstance(said, str) else said
    context = flags.context or shape.context or point.isl + point.osl
    version = version_of(point)
    behaviour = vllm_behaviour(version)
    if flags.asynchronous is not None:
        behaviour = behaviour._replace(async_scheduling=flags.asynchronous)
    memory = plan(
        point.model,
        ctx=point.isl + point.osl,
        parallel=sequences,
        engine="vllm",
        type_k=flags.kv,
        type_v=flags.kv,
        batch=tokens,
        block_size=flags.block_size,
        weights=weights,
        tensor_parallel=point.tp,
        vllm_version=version,
        gpu_memory_utilization=flags.utilization,
        device=point.device,
    )
    blocks = memory.vllm_blocks(device.memory_bytes)
    if blocks < 2:
        raise UserError(f"{point.model} does not fit on {point.tp} x {point.device} by the memory plan")
    limits = VllmLimits(sequences, tokens, context, flags.block_size, min(blocks, _MOST_CELLS // flags.block_size))
    machine = {"device": point.device, "tensor_parallel": point.tp} | ({"weights": weights} if weights else {})
    scenario = vllm_scenario(
        behaviour,
        limits,
        prefix_cache=False,
        cache={"type_k": flags.kv, "type_v": flags.kv},
        name="published",
        workload={
            "kind": "closed-loop",
            "users": point.concurrency,
            "requests": REQUESTS * point.concurrency,
            "prompt_tokens": _lengths(point.isl, flags.lengths),
            "output_tokens": _lengths(point.osl, flags.lengths),
        },
        model={"name": point.model},
        machine=machine,
    )
    return scenario, blocks


def _apart(point: Point, halves: tuple[Half, Half], flags: ServerFlags) -> tuple[Scenario, int]:
    """The scenario of servers that prefill and servers that decode, each with the same flags."""
    each = [replace(point, apart=False, halves=None, tp=half.tp, ep=half.ep) for half in halves]
    (first, _), (second, blocks) = [scenario_of(half, flags) for half in each]
    other = {name: getattr(second, name).model_dump(exclude_unset=True) for name in ("machine", "server", "cache")}
    groups = [{"role": "prefill", "count": halves[0].servers}, {"role": "decode", "count": halves[1].servers, **other}]
    table = first.model_dump(exclude_unset=True, exclude={"folder"})
    return load_scenario({**table, "cluster": {"servers": groups}}), blocks * halves[1].servers


def _lengths(most: int, least: float) -> dict[str, Any]:
    """Lengths drawn uniformly between a share of the longest and the longest."""
    if least == 1:
        return {"kind": "fixed", "value": most}
    return {"kind": "empirical", "quantiles": [int(least * most), most]}
