"""The matrices that a GGUF file has of a model, as llama.cpp's ``convert_hf_to_gguf.py`` makes them of its config.json.

Whatever else a model has (norms, biases, sinks, routers, convolutions) is small and stays in f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A matrix, in each of some layers."""

    kind: str
    """What ``llama-quantize`` takes it for by its name: ``attn_v``, ``ffn_down``, ``output``, ``other``, ..."""
    row: int
    """Numbers in a row: the inputs of the matrix."""
    rows: int
    """Its rows; of experts, those of all of them."""
    layers: Sequence[int] = (0,)
    experts: bool = False
    stored: str | None = None
    """The type in which the model is published, if ``llama-quantize`` leaves it so."""

    @property
    def numbers(self) -> int:
        """Numbers in one layer."""
        return self.row * self.rows
