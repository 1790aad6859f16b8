"""Load models by name (random ones, SmolLM2, and GGUF files), and build policies by theirs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvsim.errors import UserError, no_such
from kvsim.model.engine_shapes import SHAPES, gguf_path
from policies import (
    CacheConfig,
    PluginError,
    Policy,
    PolicyFactory,
    available,
    current_name,
    why_left_out,
)
from real_engine.model import Transformer
from real_engine.weights import WEIGHT_FORMS

if TYPE_CHECKING:
    from real_engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A transformer with its tokenizer."""

    transformer: Transformer = field(repr=False)
    tokenizer: Tokenizer | None
    """None for random models, and for files whose kind of vocabulary is not supported."""
    name: str
    """Name or path under which the model was loaded."""
    context: int | None = None
    """Context length that the model was trained with, where the file states it."""


def load_model(name: str, seed: int = 0, weights: str = "f32") -> LoadedModel:
    """Load a built-in shape with random weights drawn from ``seed``, ``smollm2``, or a GGUF file by its path.

    ``weights``: a ``WeightForm``. Raises ``UserError``.
    """
    if weights not in WEIGHT_FORMS:
        raise UserError(no_such("type of weights", weights, WEIGHT_FORMS))
    path = gguf_path(name)
    if path is None:
        if weights == "mapped":
            raise UserError(f"{name}: its weights are random, not read from a file that could be mapped")
        return LoadedModel(Transformer.random(SHAPES[name], seed, weights), None, name)
    # Imported here: both packages are slow to import, and random models need neither.
    from kvsim.model.gguf_file import read_header
    from real_engine.gguf_model import load_transformer
    from real_engine.tokenizer import read_tokenizer

    header = read_header(path)
    transformer = load_transformer(header, weights)
    context = header.fields.get("llama.context_length")
    return LoadedModel(
        transformer,
        read_tokenizer(header, transformer.shape.vocabulary),
        name,
        context if isinstance(context, int) else None,
    )


def build_policy(policy: str | PolicyFactory, config: CacheConfig, what: str) -> Policy:
    """Build a policy, given by its name or as what makes it. Raises ``UserError``, which says ``what`` cannot be."""
    if isinstance(policy, str):
        name, known = current_name(policy), available()
        if name not in known:
            raise UserError(why_left_out(name) or no_such("policy", name, known))
        policy = known[name]
    try:
        return policy(config)
    except PluginError as e:
        raise UserError(str(e)) from e
    except ValueError as e:
        raise UserError(f"{what}: {e}") from None
