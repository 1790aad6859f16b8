"""Distributions of lengths in scenario files: one section for each kind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import log, sqrt
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Discriminator, FailFast, Field, field_validator, model_validator

import workloads
from kvsim.scenario.section import MAX_ENTRIES, Section, entries
from workloads.generators.lengths import MAX_SUPPORT, MAX_TOKENS

Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


def refuse_decreasing(quantiles: tuple[float, ...]) -> tuple[float, ...]:
    """Return the quantiles. Raises ``ValueError`` if one is below its predecessor."""
    for before, value in pairwise(quantiles):
        if value < before:
            raise ValueError(f"quantiles cannot decrease; {value} comes after {before}")
    return quantiles


def _refuse_inverted(low: int, high: int | None) -> None:
    if high is not None and high < low:
        raise ValueError(f"max ({high}) is below min ({low})")


class LengthsSection(Section):
    """A distribution of lengths."""

    if TYPE_CHECKING:  # A field of every subclass.
        kind: str

    def build(self) -> workloads.Lengths:
        """Build the distribution, which has the name of its kind, and the keys of the section."""
        law: Callable[..., workloads.Lengths] = getattr(workloads, self.kind.capitalize())
        return law(**{key: value for key, value in self if key != "kind"})


class FixedLengths(LengthsSection):
    """Always ``value`` tokens."""

    kind: Literal["fixed"]
    value: Tokens

    @property
    def longest(self) -> int:
        """The longest possible length; 1 if there is no limit."""
        return self.value


class _BoundedLengths(LengthsSection):
    """A distribution that is limited to [min, max]."""

    min: Tokens = 1
    max: Tokens | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _refuse_inverted(self.min, self.max)
        return self

    @property
    def longest(self) -> int:
        """The longest possible length; 1 if there is no limit."""
        return max(self.min, self.max or 1)


class LognormalLengths(_BoundedLengths):
    """exp(normal(mu, sigma)) tokens, limited to [min, max]."""

    kind: Literal["lognormal"]
    mu: Annotated[float, Field(ge=-20, le=20)]
    sigma: Annotated[float, Field(ge=0, le=10)]


class MeanLengths(LengthsSection):
    """Lognormal lengths around ``mean`` tokens, with the coefficient of variation ``cv``; none above 4 times the mean.

    The default ``cv`` lies between that of RAGPulse's prompts (0.35) and those of the outputs of RAGPulse, Mooncake's
    and Azure's conversations (0.71 to 0.77); 0 is a fixed length.
    """

    kind: Literal["mean"]
    mean: Annotated[float, Field(ge=1, le=MAX_TOKENS / 4)]
    cv: Annotated[float, Field(ge=0, le=3)] = 0.5

    @property
    def longest(self) -> int:
        """The longest possible length."""
        return round(self.mean * (4 if self.cv else 1))

    def build(self) -> workloads.Lengths:
        """Build the distribution."""
        variance = log(1 + self.cv**2)
        return workloads.Lognormal(log(self.mean) - variance / 2, sqrt(variance), 1, self.longest)


class GammaLengths(_BoundedLengths):
    """Gamma distribution with mean ``shape * scale`` tokens, limited to [min, max]."""

    kind: Literal["gamma"]
    shape: Annotated[float, Field(ge=1e-3, le=1e6)]
    scale: Annotated[float, Field(ge=1e-6, le=MAX_TOKENS)]


class ZipfLengths(LengthsSection):
    """k tokens with a probability proportional to ``k ** -exponent``, for k from min to max."""

    kind: Literal["zipf"]
    exponent: Annotated[float, Field(ge=0, le=20)]
    min: Tokens = 1
    max: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> ZipfLengths:
        _refuse_inverted(self.min, self.max)
        if self.max - self.min >= MAX_SUPPORT:
            raise ValueError(f"{self.max - self.min + 1} values from min to max; at most {MAX_SUPPORT} are accepted")
        return self

    @property
    def longest(self) -> int:
        """The longest possible length; 1 if there is no limit."""
        return self.max


class EmpiricalLengths(LengthsSection):
    """Quantiles in tokens, linear in between, rounded."""

    kind: Literal["empirical"]
    quantiles: Annotated[tuple[Annotated[float, Field(ge=1, le=MAX_TOKENS)], ...], FailFast(), entries(2, MAX_ENTRIES)]
    shares: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], FailFast(), entries(0, MAX_ENTRIES)] = ()
    """The share that each quantile belongs to, from 0 to 1; even steps by default."""

    _ordered = field_validator("quantiles", "shares")(refuse_decreasing)

    @model_validator(mode="after")
    def _paired(self) -> EmpiricalLengths:
        if self.shares:
            if len(self.shares) != len(self.quantiles):
                raise ValueError(
                    f"{len(self.shares)} shares for {len(self.quantiles)} quantiles; one for each is expected"
                )
            if (self.shares[0], self.shares[-1]) != (0, 1):
                raise ValueError(f"shares go from {self.shares[0]:g} to {self.shares[-1]:g}; from 0 to 1 is expected")
        return self

    @property
    def longest(self) -> int:
        """The longest possible length; 1 if there is no limit."""
        return round(self.quantiles[-1])


AnyLengths = Annotated[
    FixedLengths | LognormalLengths | MeanLengths | GammaLengths | ZipfLengths | EmpiricalLengths,
    Discriminator("kind"),
]


class GivenPromptLengths(Section):
    """Output lengths whose distribution depends on the length of the prompt; see ``workloads.GivenPrompt``."""

    kind: Literal["given-prompt"]
    edges: Annotated[tuple[Tokens, ...], FailFast(), entries(1, 99)]
    """Prompt lengths at which the next table begins."""
    tables: Annotated[tuple[AnyLengths, ...], entries(2, 100)]
    """Distributions of outputs, one more than edges."""

    @field_validator("edges")
    @classmethod
    def _increasing(cls, edges: tuple[int, ...]) -> tuple[int, ...]:
        for before, edge in pairwise(edges):
            if edge <= before:
                raise ValueError(f"edges must increase; {edge} comes after {before}")
        return edges

    @model_validator(mode="after")
    def _consistent(self) -> GivenPromptLengths:
        if len(self.tables) != len(self.edges) + 1:
            raise ValueError(
                f"tables: {len(self.tables)}, edges: {len(self.edges)}; one more table than edges is expected"
            )
        return self

    def build(self) -> workloads.GivenPrompt:
        """Build the distributions."""
        return workloads.GivenPrompt(self.edges, [table.build() for table in self.tables])


AnyOutputs = Annotated[
    FixedLengths | LognormalLengths | MeanLengths | GammaLengths | ZipfLengths | EmpiricalLengths | GivenPromptLengths,
    Discriminator("kind"),
]
"""Distributions of output lengths, which may depend on the prompt."""
