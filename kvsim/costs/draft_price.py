"""What drafting costs: passes of a smaller model, or of heads that are a share of the model itself."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.costs.pass_price import PassPrice
from kvsim.model.memory_shapes import memory_shape
from policies.placement.rule import PassReads


class DraftPrice:
    """The seconds of a drafter's passes: ``share`` of what the same passes cost by ``price``."""

    def __init__(self, price: PassPrice, share: float = 1.0):
        self._price = price
        self._share = share

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        """One pass of some chunks: the tokens of each, and the cells that they read; nothing without chunks."""
        if not chunks:
            return 0.0
        tokens = sum([n for n, _ in chunks])
        return self._share * self._price.seconds(PassReads.counted(tokens, len(chunks), len(chunks), chunks))


def head_share(model: str, weights: str | None) -> float:
    """What one layer and the head have of a model's weights: what EAGLE's and MTP's heads read in a pass."""
    shape = memory_shape(model)
    kind = weights or shape.default_type
    layers, head = shape.matrices.bytes(kind) + shape.experts.bytes(kind), shape.head.bytes(kind)
    return (layers / shape.n_layers + head) / (layers + head)
