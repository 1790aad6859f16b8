"""The section of a scenario that says what is drafted ahead, and how much of it is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from kvsim.costs.drafter import HEAD
from kvsim.scenario.accepted_drafts import measured_rates
from kvsim.scenario.section import Section, entries

Method = Literal["none", "ngram", "draft-model", "eagle", "mtp"]
MOST_DRAFTS = 64
Share = Annotated[float, Field(ge=0, le=1)]
Rates = Annotated[tuple[Share, ...], entries(1, MOST_DRAFTS)]


class SpeculationSection(Section):
    """Drafts: tokens that are guessed ahead, and checked by one pass of the model."""

    method: Method = "none"
    """Where drafts come from: n-grams of the text so far, a smaller model (``draft-model``), or heads that the model
    has for it (``eagle``, ``mtp``)."""
    tokens: Annotated[int, Field(ge=0, le=MOST_DRAFTS)] = 3
    """Tokens that are drafted for a sequence in each step (vLLM's ``num_speculative_tokens``, ``--spec-draft-n-max``);
    0: none."""
    acceptance: Share | Rates | None = None
    """Probability that a drafted token is accepted if those before it were: one for all, or one for each position, of
    which the last holds for those behind it."""
    accepted_by_position: Rates | None = None
    """Instead: shares of drafts that are accepted at least so far, as vLLM and llama-server report them
    (``--spec-synth-rates``)."""
    measured: str | None = None
    """Instead: a file with what a server counted: vLLM's ``/metrics``, or answers of llama-server with their
    ``timings``."""
    found: Share = 1.0
    """``ngram``: share of the steps in which a draft is found for a sequence."""
    model: str | None = None
    """``draft-model``: the model that drafts, whose times on ``machine.device`` are taken."""
    profile: str | None = None
    """``draft-model``: instead, a profile of it."""
    share: PositiveFloat | None = None
    """Instead: what a pass of the drafter takes, as a share of one of the model; for ``eagle`` and ``mtp`` by default
    what one layer and the head have of the weights."""

    @model_validator(mode="after")
    def _agrees(self) -> SpeculationSection:
        given = ("acceptance", "accepted_by_position", "measured")
        stated = [key for key in given if getattr(self, key) is not None]
        if self.on and len(stated) != 1:
            raise ValueError(
                f"how many drafts are accepted is said by {', '.join(stated) or 'nothing'}; one of these is expected: "
                f"{', '.join(given)}"
            )
        rates = self.accepted_by_position or ()
        if any(later > earlier for earlier, later in pairwise(rates)):
            raise ValueError("accepted_by_position: a draft that is accepted further is accepted so far, too")
        priced = [key for key in ("model", "profile", "share") if getattr(self, key) is not None]
        if self.on and self.method == "draft-model" and len(priced) != 1:
            raise ValueError(
                f"what drafting costs is said by {', '.join(priced) or 'nothing'}; one of these is expected: model, "
                "profile, share"
            )
        return self

    @property
    def on(self) -> bool:
        """Whether anything is drafted."""
        return self.method != "none" and self.tokens > 0

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the drafter reads what the model computes, and the token behind: vLLM's keys of blocks cover it."""
        return self.on and self.method in ("eagle", "mtp")

    @property
    def drafter(self) -> str:
        """What takes memory beside the model, as in ``PlanSettings``; where a profile or a share says what drafting
        costs, it is not known."""
        if not self.on or self.method == "ngram":
            return ""
        return HEAD if self.method != "draft-model" else self.model or ""

    @property
    def lookahead(self) -> int:
        """Tokens behind those of a step to which the drafter writes (vLLM's ``num_lookahead_tokens``)."""
        return self.tokens if self.on and self.method != "ngram" else 0

    def rates(self, folder: Path) -> tuple[float, ...]:
        """Probability that each drafted token is accepted if those before it were; ``tokens`` of them.

        ``folder``: at which the path of ``measured`` starts. Raises ``UserError`` if it cannot be read.
        """
        if self.measured is not None:
            found: Sequence[float] = measured_rates(folder / self.measured, self.tokens)
        elif self.accepted_by_position is not None:
            found = if_those_before_were(self.accepted_by_position)
        elif isinstance(self.acceptance, tuple):
            found = self.acceptance
        else:
            found = (self.acceptance or 0.0,)
        return tuple(found[: self.tokens]) + (found[-1],) * (self.tokens - len(found))


def if_those_before_were(accepted: Sequence[float]) -> tuple[float, ...]:
    """Shares of drafts that are accepted at least so far, as probabilities that each is if those before it were."""
    before = (1.0, *accepted[:-1])
    return tuple(share / earlier if earlier else 0.0 for share, earlier in zip(accepted, before, strict=True))
