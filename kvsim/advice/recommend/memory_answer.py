"""What memory alone says about serving some traffic, where no machine profile tells the times.

No latency, load or verdict: only how many requests of the traffic's lengths the cache holds at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvsim.advice.memory.engine_flags import Flags, command_line, flags_dict, largest_fit_flags
from kvsim.advice.memory.flag_effects import Effect, effects
from kvsim.advice.memory.ollama import OllamaSettings, ollama_settings
from kvsim.advice.recommend.advice import Advice
from kvsim.advice.recommend.candidates import PERPLEXITY
from kvsim.costs.memory_plan import Plan, default_batch, plan
from kvsim.costs.memory_settings import CONTEXT_UNIT, ENGINE_TITLES, PLAN_ENGINES, Engine
from kvsim.costs.vllm_profile import serve_defaults
from kvsim.errors import UserError
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.storage_types import format_size
from kvsim.scenario.server_defaults import AUTO_SLOTS

if TYPE_CHECKING:
    import pandas as pd

_TYPES: dict[Engine, tuple[tuple[str, str], ...]] = {
    "llamacpp": (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0")),
    "vllm": (("f16", "f16"), ("fp8", "fp8")),
}
"""Types of K and V that are tried, widest first."""

_CLOSE = 1.01
"""Perplexity relative to f32 up to which narrower K and V are typed unasked."""
_WITHOUT_BOUND = (1, 4, 16, 64)
"""Numbers of requests whose memory is shown if no memory was given."""


@dataclass(frozen=True)
class MemoryFit:
    """How much an engine holds at once with K and V of some types."""

    engine: Engine
    type_k: str
    type_v: str
    longest: int
    """Requests as long as the longest one that fit at once."""
    p95: int
    """Requests as long as 95 % are at most."""
    mean: int
    """Requests of mean length."""
    memory_bytes: int
    """Weights, cache and buffers with ``longest`` of the longest requests; partly estimated (``kvsim plan``)."""
    flags: Flags
    """Options of the engine that fit, with room for requests that were not seen: in llama.cpp slots of that length, in
    vLLM as many sequences as fit at mean length; no more than there are users or, where that is unknown, than it takes
    by itself."""
    made: Plan = field(repr=False)
    """The plan of these options."""

    def to_dict(self) -> dict[str, Any]:
        """All fields but the plan; sizes in bytes."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "made"}


@dataclass(frozen=True, kw_only=True)
class MemoryAnswer(Advice):
    """What memory says where the machine profile does not speak for the model that is served."""

    shape: MemoryShape
    weights: str | None
    no_times: str
    """Why there are no times, and how to get them."""
    least: int = 0
    """The context that is not gone below: that of the server that runs now."""

    @cached_property
    def fits(self) -> tuple[MemoryFit, ...]:
        """What fits, engine by engine, widest types first; without a memory, what some numbers of requests need."""
        engines = [e for e in PLAN_ENGINES if self.engine in (e, "both", "any")]
        return tuple(fit for engine in engines for types in _TYPES[engine] for fit in self._fits(engine, *types))

    @cached_property
    def typed(self) -> tuple[MemoryFit, ...]:
        """What to type of each engine: the widest types that hold as many requests as are asked for, or else the most.

        Of types that hardly cost accuracy, where one of them fits; K and V alike, as CUDA has them in llama.cpp.
        """
        chosen = []
        for engine in dict.fromkeys(fit.engine for fit in self.fits):
            able = [fit for fit in self.fits if fit.engine == engine and fit.flags]
            alike = [fit for fit in able if fit.type_k == fit.type_v]
            close = [fit for fit in alike if PERPLEXITY.get((fit.type_k, fit.type_v), 1.0) <= _CLOSE]
            if of := close or alike or able:
                chosen.append(max(of, key=lambda fit: fit.made.settings.parallel))
        return tuple(chosen)

    def _fits(self, engine: Engine, type_k: str, type_v: str) -> list[MemoryFit]:
        summary = self.traffic.summary
        plans = {}
        typed = min(max(summary.needed, self.least), self.shape.context or math.inf)
        lengths = {"longest": summary.longest, "p95": summary.p95, "mean": summary.mean, "typed": typed}
        for name, length in lengths.items():
            ctx = -(-math.ceil(length) // CONTEXT_UNIT[engine]) * CONTEXT_UNIT[engine]
            try:
                plans[name] = plan(
                    self.shape,
                    ctx=ctx,
                    type_k=type_k,
                    type_v=type_v,
                    engine=engine,
                    batch=default_batch(engine, self.memory, self.device),
                    weights=self.weights,
                    tensor_parallel=self.tensor_parallel,
                    memory=None if self.device else self.memory,
                    device=self.device,
                )
            except UserError:
                return []  # The engine has no such cache for this model.
        if self.memory is None:
            if (type_k, type_v) != _TYPES[engine][0]:
                return []
            return [self._fit(engine, plans, dict.fromkeys(plans, n)) for n in _WITHOUT_BOUND]
        return [self._fit(engine, plans, {name: p.largest_parallel(self.memory, engine) for name, p in plans.items()})]

    def _fit(self, engine: Engine, plans: dict[str, Plan], counts: dict[str, int]) -> MemoryFit:
        longest, held = plans["longest"], counts.pop("typed")
        filled = replace(longest, settings=replace(longest.settings, parallel=max(counts["longest"], 1)))
        # llama.cpp gives each slot its share; vLLM's sequences share blocks, so that as many run as hold their own.
        slots = held if engine == "llamacpp" else counts["mean"]
        s = plans["typed"].settings
        typed = replace(s, parallel=min(slots, self.traffic.users or self._usual(engine)))
        flags = largest_fit_flags(engine, typed) if held else ()
        made = replace(longest, settings=typed)
        return MemoryFit(
            engine, s.type_k, s.type_v, **counts, memory_bytes=filled.total(engine), flags=flags, made=made
        )

    def _usual(self, engine: Engine) -> int:
        """Requests at once that an engine takes by itself."""
        return AUTO_SLOTS if engine == "llamacpp" else serve_defaults(self.memory, self.device)[1]

    def effects(self, fit: MemoryFit) -> tuple[Effect, ...]:
        """What each option of a fit does to memory."""
        return effects(fit.engine, fit.flags, fit.made)

    def ollama(self, fit: MemoryFit) -> OllamaSettings | None:
        """What to set for Ollama instead of the options of ``llama-server``; None for those of vLLM."""
        if fit.engine != "llamacpp" or not fit.flags:
            return None
        return ollama_settings(fit.flags, fit.made, self.traffic.summary.longest)

    @property
    def met(self) -> None:
        """None: whether the service level is met is unknown."""

    @property
    def conclusion(self) -> str:
        """What memory says of the model and the traffic, in a sentence or two."""
        return f"Whether {self.slo.text} can be met is unknown. {self.held}"

    @property
    def held(self) -> str:
        """How many requests the memory holds at once or, without a memory, what some of them need, in a sentence."""
        longest = f"the longest requests ({self.traffic.summary.longest:,} tokens)"
        widest: dict[Engine, MemoryFit] = {}
        for fit in self.fits:
            widest.setdefault(fit.engine, fit)
        if not widest:
            return f"No engine asked about can hold {self.model}."
        if self.memory is None:
            of = self.fits[0].engine
            needs = ", ".join(
                f"{format_size(fit.memory_bytes)} for {fit.longest}" for fit in self.fits if fit.engine == of
            )
            return f"{ENGINE_TITLES[of]} needs {needs} of {longest} at once."
        kind = next(iter(widest.values())).type_k
        kept = format_size(self.memory) if self.device is None else f"{self.device} ({format_size(self.memory)})"
        if self.tensor_parallel > 1:
            kept = f"{self.tensor_parallel} x {kept}"
        (engine, first), *others = widest.items()
        more = "".join(f", and {fit.longest:,} under {ENGINE_TITLES[engine]}" for engine, fit in others)
        held = f"{kept} holds {first.longest:,} of {longest} at once under {ENGINE_TITLES[engine]}{more}"
        return f"{held}, with K and V in {kind}."

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per engine and types of K and V, with the fields of ``MemoryFit``; sizes in bytes."""
        import pandas as pd

        return pd.DataFrame([{**fit.to_dict(), "flags": command_line(fit.flags)} for fit in self.fits])

    @property
    def limits(self) -> list[str]:
        """Limits of this answer, one line each."""
        lines = ["memory is that of kvsim plan; buffers are estimates"]
        if self.fits and self.memory is not None:
            lines[0] += f"; left to others: {self.fits[0].made.reserve.words(self.fits[0].engine) or 'nothing'}"
        if self.traffic.summary.room is not None:
            lines.append(f"context: {self.traffic.summary.room.said}")
        if self.least > self.traffic.summary.needed:
            lines.append(f"context: no shorter than that of the server that runs now, {self.least:,} tokens")
        if not self.traffic.users:
            own = ", ".join(
                f"{ENGINE_TITLES[e]} {self._usual(e):,}" for e in dict.fromkeys(f.engine for f in self.fits)
            )
            lines.append(f"how many users there are is not said: options are for as many at once as is usual ({own})")
        if self.weights is None and not self.shape.stored:
            lines.append(f"weights are counted in {self.shape.default_type}; --weights q4_K_M counts a quantised file")
        shown = [fit for fit in self.fits if (fit.type_k, fit.type_v) in PERPLEXITY]
        if shown:
            known = {f"{fit.type_k}/{fit.type_v}": PERPLEXITY[fit.type_k, fit.type_v] for fit in shown}
            figures = ", ".join(f"{types} {value:.4f}" for types, value in known.items())
            lines.append(f"narrower K and V cost accuracy; perplexity relative to f32, on smollm2: {figures}")
        if self.memory is None:
            lines.append("no memory was given; with --memory 16GB, this also says how many requests fit")
        return [*lines, *self.traffic.remarks]

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints; sizes in bytes."""
        return {
            **super().to_dict(),
            "met": None,
            "no_times": self.no_times,
            "conclusion": self.conclusion,
            "fits": [
                {
                    **fit.to_dict(),
                    "flags": flags_dict(fit.flags),
                    "typed": command_line(fit.flags),
                    "recommended": fit in self.typed,
                    "effects": [effect.to_dict() for effect in self.effects(fit)],
                    "ollama": None if (ollama := self.ollama(fit)) is None else ollama.to_dict(),
                }
                for fit in self.fits
            ],
            "limits": self.limits,
        }
