"""What a model says, recomputed in one pass without a cache; engines must say the same, wherever their cells are.

And engines and policies to compare with that.
"""

import numpy as np

from policies import Chunk, Group, View
from real_engine import Engine, kernels
from real_engine.engine import layer_groups

ONE_GROUP = (Group(0),)


def without_cache(model, text, groups=ONE_GROUP, first=0):
    """Logits after every token of the text from number ``first`` on. Only windows and shares of groups matter."""
    everything = np.arange(len(text))
    chunks, views = (Chunk(0, 0, len(text)),), (View(everything, everything),)
    selections = [kernels.select("sliced", chunks, views, 0, group) for group in groups]
    group_of = layer_groups(model.shape.n_layers, groups)

    def attend(layer, q, k, v):
        keys, values = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
        own = selections[group_of[layer]]
        return kernels.attend(q, lambda cells: keys[:, cells], lambda cells: values[:, cells], len(keys), own)

    return model.forward(np.array(text, dtype=np.int64), everything, everything[first:], attend)


def best_without_cache(model, text, prompt, groups=ONE_GROUP):
    """The most likely token after each of ``text[prompt - 1 : -1]``."""
    return without_cache(model, text[:-1], groups, prompt - 1).argmax(axis=1).tolist()


def generate_without_cache(model, prompt, n, groups=ONE_GROUP):
    """``n`` greedy tokens, each recomputed from scratch."""
    text = list(prompt)
    for _ in range(n):
        text += best_without_cache(model, [*text, 0], len(text), groups)
    return text[len(prompt) :]


class FixedTimeEngine(Engine):
    """An engine whose passes and copies report fixed seconds, so that every run makes the same decisions."""

    def forward(self, batch):
        super().forward(batch)
        return 0.002

    def transfer(self, transfers):
        super().transfer(transfers)
        return 0.001

    def copy(self, copies):
        super().copy(copies)
        return 0.001


def swap_two_cells(policy):
    """Have the policy name wrong cells: the first two of each view in each other's place. For controls."""
    place = policy.allocate

    def allocate(step, *, views=False):
        batches = place(step, views=views)
        for batch in batches:
            for view in batch.views:
                view.cells[:2] = view.cells[1::-1].copy() if len(view.cells) > 2 else view.cells[:2]
        return batches

    policy.allocate = allocate
