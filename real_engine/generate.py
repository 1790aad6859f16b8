"""Generate text from a prompt, token by token, with the real engine over any policy's cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from kvsim.errors import UserError
from kvsim.model.engine_shapes import Storage
from policies import CacheConfig, Chunk, MicroBatch, OutOfCells, Policy, PolicyFactory, SequencePlan, fault_in_plugin
from real_engine.arrays import FloatArray, IntArray
from real_engine.engine import Engine
from real_engine.loading import LoadedModel, build_policy, load_model
from real_engine.measured_attention import measured_for
from real_engine.model import Transformer
from real_engine.tokenizer import PRE_TOKENIZERS, Message, Tokenizer
from workloads import Request, named_rng

_SEQ = 0
"""Number of the only sequence."""
_STEP = 256
"""Prompt tokens in one forward pass."""
_ROOM = 4
"""Default cells for each token: layouts that copy growing sequences, or pad, need more than one."""
_TEMPERATURES = (0.01, 100.0)
_CELLS = (2, 1 << 24)


class PromptedEngine(Engine):
    """An engine with a given prompt, which takes the most likely tokens or draws them at a temperature."""

    def __init__(
        self,
        model: Transformer,
        policy: Policy,
        prompt: list[int],
        temperature: float = 0.0,
        seed: int = 0,
        *,
        type_k: Storage = "f32",
        type_v: Storage = "f32",
    ):
        attention = measured_for(policy)
        super().__init__(model, policy.groups, policy.kernel, seed, type_k=type_k, type_v=type_v, attention=attention)
        self.given = tuple(prompt)
        """The prompt."""
        self._temperature = temperature
        self._noise = named_rng(seed, "sampling")

    def prompt(self, request: Request) -> list[int]:
        """The given prompt, for every request."""
        return list(self.given)

    def run(self, tokens: IntArray, batch: MicroBatch) -> FloatArray:
        """Logits as in ``Engine``; where a token is drawn, with noise that makes the largest logit that draw."""
        logits = super().run(tokens, batch)
        if self._temperature > 0:
            for row, chunk in enumerate(batch.chunks):
                if chunk.start + chunk.n == len(self.tokens[chunk.seq]):
                    # With Gumbel noise added, the largest is a draw from the softmax (Maddison et al., 2014).
                    logits[row] = logits[row] / self._temperature + self._noise.gumbel(size=logits.shape[1])
        return logits


class Generation:
    """An answer being generated: iterate over it once for its text, piece by piece."""

    def __init__(self, model: str, tokenizer: Tokenizer, policy: Policy, engine: PromptedEngine, n: int):
        self.prompt_tokens = len(engine.given)
        """Tokens of the prompt."""
        self.tokens: list[int] = []
        """Tokens generated so far, including the one that ends the answer."""
        self.text = ""
        """Text of the tokens so far."""
        self.ended = False
        """Whether the model ended its answer, rather than being cut off after ``n`` tokens."""
        self.prefill_s = 0.0
        """Seconds from the prompt to the first token."""
        self.decode_s: list[float] = []
        """Seconds of each further token: its placement and the forward pass."""
        self._model, self._tokenizer, self._policy, self._engine, self._n = model, tokenizer, policy, engine, n

    def __iter__(self) -> Iterator[str]:
        decoder = self._tokenizer.streaming_decoder()
        for token in self._steps():
            self.tokens.append(token)
            self.ended = token in self._tokenizer.ends
            if self.ended:
                break
            piece = decoder.decode(token)
            if piece:
                self.text += piece
                yield piece
        piece = decoder.flush()
        if piece:
            self.text += piece
            yield piece

    def summary(self) -> dict[str, Any]:
        """Flat figures for a table or ``--json``; None where there are too few tokens for a figure."""
        each = float(np.mean(self.decode_s)) if self.decode_s else None
        return {
            "model": self._model,
            "policy": self._policy.name,
            "prompt_tokens": self.prompt_tokens,
            "tokens": len(self.tokens),
            "ended": self.ended,
            "text": self.text,
            "prefill_s": self.prefill_s,
            "prefill_tokens_per_s": self.prompt_tokens / self.prefill_s if self.prefill_s else None,
            "ms_per_token": None if each is None else 1e3 * each,
            "tokens_per_s": None if each is None else 1 / each,
        }

    def describe(self) -> str:
        """The figures in one line."""
        figures = self.summary()
        line = f"{figures['tokens']} tokens under {figures['policy']}"
        if figures["ms_per_token"] is not None:
            line += f", {figures['ms_per_token']:.1f} ms each ({figures['tokens_per_s']:.1f} tokens/s)"
        return (
            f"{line}; prompt of {figures['prompt_tokens']} tokens in {figures['prefill_s']:.2f} s "
            f"({figures['prefill_tokens_per_s'] or 0:.0f} tokens/s)"
        )

    def _steps(self) -> Iterator[int]:
        """Generate the tokens one by one."""
        total = self.prompt_tokens + self._n - 1
        self._policy.open(_SEQ, SequencePlan(self.prompt_tokens, total, total))
        self._engine.begin(_SEQ, Request(0, 0.0, self.prompt_tokens, self._n))
        # The engine appends each generated token to this list.
        text = self._engine.tokens[_SEQ]
        done = 0
        try:
            for index in range(self._n):
                began = time.perf_counter()
                stop = len(text)
                while done < stop:
                    chunk = Chunk(_SEQ, done, min(stop - done, _STEP))
                    for batch in self._policy.allocate([chunk], views=True):
                        self._engine.forward(batch)
                    done += chunk.n
                if index:
                    self.decode_s.append(time.perf_counter() - began)
                else:
                    self.prefill_s = time.perf_counter() - began
                yield text[-1]
        except OutOfCells as e:
            cells = f"{self._policy.capacity} cells"
            raise UserError(f"{self._policy.name}: no room after {done} tokens in {cells}: {e}") from None
        except Exception as e:
            line = fault_in_plugin(e, self._policy)
            if line is None:
                raise
            raise UserError(line) from e
        finally:
            self._policy.free(_SEQ)


def generate(
    prompt: str,
    model: LoadedModel,
    policy: str | PolicyFactory = "paged",
    n: int = 64,
    *,
    chat: bool = False,
    temperature: float = 0.0,
    seed: int = 0,
    cells: int | None = None,
    type_k: Storage = "f32",
    type_v: Storage = "f32",
) -> Generation:
    """Generate an answer of at most ``n`` tokens, with K and V in the cells that the policy chooses.

    ``chat`` wraps the prompt as a user's message. ``temperature`` 0 takes the most likely token each time; above 0,
    tokens are drawn with ``seed``. ``cells``: capacity of the cache, by default more than enough. Raises ``UserError``.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        accepted = " or ".join(PRE_TOKENIZERS)
        raise UserError(
            f"model {model.name}: no supported vocabulary; a GGUF file with tokenizer.ggml.model gpt2 and "
            f"tokenizer.ggml.pre {accepted} is needed, such as smollm2"
        )
    if n < 1:
        raise UserError(f"{n} tokens; at least 1 is expected")
    low, high = _TEMPERATURES
    if temperature != 0 and not low <= temperature <= high:
        raise UserError(f"temperature {temperature:g}; 0, or from {low:g} to {high:g} is accepted")
    tokens = tokenizer.encode_chat([Message("user", prompt)]) if chat else tokenizer.encode(prompt)
    if not tokens:
        raise UserError("the prompt is empty; text is expected")
    total = len(tokens) + n - 1
    if cells is None:
        cells = -(-_ROOM * total // 256) * 256
    if not _CELLS[0] <= cells <= _CELLS[1]:
        raise UserError(f"{cells} cells; from {_CELLS[0]} to {_CELLS[1]} are accepted")
    layers = model.transformer.shape.n_layers
    config = CacheConfig(
        cells=cells, n_ubatch=_STEP, sequences=1, max_tokens=max(total, 2), n_layers=layers, for_any_layout=True
    )
    built = build_policy(policy, config, f"a cache of {cells} cells")
    if model.context is not None and total > model.context and not built.unbounded:
        asked = f"a prompt of {len(tokens)} and {n} more exceed that"
        raise UserError(f"model {model.name} was trained on {model.context} tokens; {asked}")
    plan = SequencePlan(len(tokens), total, total)
    refusal = built.refusal(plan)
    if refusal is None and not built.admits(plan):
        refusal = f"{total} tokens do not fit into {built.capacity} cells"
    if refusal is not None:
        raise UserError(f"{built.name}: {refusal}")
    try:
        engine = PromptedEngine(model.transformer, built, tokens, temperature, seed, type_k=type_k, type_v=type_v)
    except MemoryError:
        size = cells * model.transformer.shape.cell_bytes(type_k, type_v)
        raise UserError(f"a cache of {cells} cells takes {size / 1e9:.1f} GB, more than there is") from None
    return Generation(model.name, tokenizer, built, engine, n)


def answer(
    prompt: str,
    model: str = "smollm2",
    *,
    weights: str = "f32",
    threads: int | None = None,
    write: Callable[[str], object],
    **options: Any,
) -> Generation:
    """Load a model, ``write`` its answer as it comes, and return it.

    ``threads``: those of the BLAS, by default its own choice, which on a busy machine is slower than one. ``options``
    are those of ``generate``. Raises ``UserError``.
    """
    with threadpool_limits(threads):
        answered = generate(prompt, load_model(model, options.get("seed", 0), weights), **options)
        for piece in answered:
            write(piece)
    return answered
