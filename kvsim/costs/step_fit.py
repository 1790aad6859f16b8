"""Fits the costs of a server's passes to the steps that it was seen to take.

A step of a server may be several passes of both kinds: llama.cpp computes a prompt beside sequences that generate in
one pass of a token each and one of the rest of the prompt. All coefficients are therefore fitted together, those of
decode-only passes and those of all others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvsim.costs.fitting import FittedRegimes, held_out_error, held_out_table, ranges_of
from kvsim.costs.least_squares import predict_held_out, with_intervals
from kvsim.costs.pass_layout import LEAST_STEPS, REGIMES, PassLayout, Sample, kind_of, regime_of
from kvsim.costs.profile import NOTHING_S, Profile, Regime
from kvsim.costs.tables import KNOTS, FloatArray
from policies import Kernel

_MIXED_KNOTS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens in a pass with a prompt between which the cost of matrix work is linear: such passes are fewer."""
_TOGETHER_KNOTS = (1, 2)
"""A cell costs a chunk the same for each of its tokens after the first."""
_SAME = 1e-9
_FEWEST = 4
"""Passes that a segment between knots must have; one with fewer is joined to the next."""


def fit_steps(samples: Sequence[Sample], rng: np.random.Generator, skipping: Collection[Kernel] = ()) -> FittedRegimes:
    """Fit the costs of decode-only and of other passes to the seconds of steps, under one kernel.

    ``skipping``: as for ``fitting.fit``. A third of the origins is held out to report the errors; the coefficients
    then come from all steps, and their intervals from bootstrap resamples of the origins. A step counts as mixed if
    one of its passes is. Where no two sequences generated together, one more costs what a token more of a prompt does.
    Raises ``ValueError`` if there are fewer than ``LEAST_STEPS`` of either kind.
    """
    kinds = np.array([kind_of(sample) for sample in samples])
    for regime in REGIMES:
        if (seen := int((kinds == regime).sum())) < LEAST_STEPS:
            raise ValueError(f"{seen} {regime} steps; at least {LEAST_STEPS} are needed for a fit")
    layouts = {regime: _layout(regime, samples, frozenset(skipping)) for regime in REGIMES}
    design: FloatArray = np.hstack([layouts[regime].design(samples, regime) for regime in REGIMES])
    # What is always a multiple of something before it cannot be told apart: chunks, where all passes have as many.
    units = design / np.maximum(np.linalg.norm(design, axis=0), 1)
    design[:, np.triu(units.T @ units > 1 - _SAME, 1).any(axis=0)] = 0
    seconds = np.array([s.seconds for s in samples])
    origins, member = np.unique([s.origin for s in samples], return_inverse=True)
    held = np.isin(member, rng.permutation(len(origins))[: max(1, len(origins) // 3)])
    table = held_out_table(samples, seconds, predict_held_out(design, seconds, held), held)
    table.insert(0, "regime", kinds[held])
    coefficients = with_intervals(design, seconds, member, rng)
    split = layouts["decode"].width
    decode, mixed = layouts["decode"].costs(coefficients[:split]), layouts["mixed"].costs(coefficients[split:])
    if all(work.tokens == 1 for sample in samples for work in sample.works if regime_of(work) == "decode"):
        # Further tokens were only seen in prompts.
        further = {"matmul_knots": mixed.matmul_knots, "matmul_slopes_s": mixed.matmul_slopes_s}
        decode = decode.model_copy(update=further)
    return FittedRegimes(
        {"decode": decode, "mixed": mixed},
        {regime: held_out_error(own) for regime in REGIMES if len(own := table[table["regime"] == regime])},
        table,
    )


_TILES_FROM: dict[Kernel, int] = {"tiled": 64}
"""See ``Attention.tiles_from``."""


def _layout(regime: Regime, samples: Sequence[Sample], skipping: frozenset[Kernel]) -> PassLayout:
    kernels = tuple(sorted({sample.kernel for sample in samples}))
    tokens = [work.tokens for sample in samples for work in sample.works if regime_of(work) == regime]
    return PassLayout(
        kernels=kernels,
        matmul_knots=supported_knots(KNOTS if regime == "decode" else _MIXED_KNOTS, tokens),
        attention_knots=_TOGETHER_KNOTS,
        skipping=skipping,
        causal=True,
        reads_blocks=kernels == ("gather",),
        tiles_from=_TILES_FROM.get(kernels[0], 0) if regime == "mixed" else 0,
    )


def supported_knots(knots: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
    """The knots between which there are passes enough to tell a slope; ``tokens``: of each pass.

    Always two at least. Nothing is known of what lies behind the last one: its slope goes on.
    """
    kept, counts = [knots[0]], np.asarray(tokens)
    for knot in knots[1:]:
        inside = int(((counts > kept[-1]) & (counts <= knot)).sum())
        if inside >= _FEWEST:
            kept.append(knot)
    return tuple(kept) if len(kept) > 1 else (knots[0], knots[1])


class ServerFit(NamedTuple):
    """A fitted profile, and the steps that were held out of the fit."""

    profile: Profile
    held_out: pd.DataFrame
    """Columns regime, tokens, chunks, cells, measured_s, predicted_s, among others."""


def server_profile(
    samples: Sequence[Sample], rng: np.random.Generator, *, skipping: Collection[Kernel] = (), **about: Any
) -> ServerFit:
    """Fit a profile to steps, all under one kernel.

    ``skipping``: the kernel, if it skips masked cells; ``about``: the profile's other fields, such as ``name``.
    A server's steps do not show what moves and rotations of cells cost: the profile has none. Raises ``ValueError`` if
    there are too few steps.
    """
    fitted = fit_steps(samples, rng, skipping)
    about |= {"moves": None, "shift_per_cell_s": NOTHING_S}
    return ServerFit(fitted.profile(samples, **ranges_of(samples), **about), fitted.held_out)
