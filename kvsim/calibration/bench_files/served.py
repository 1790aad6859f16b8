"""What load generators say of a server, whichever wrote it, as what was timed."""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.calibration.bench_files.points import MOST_SEQUENCES, MOST_TOKENS, BenchPoint, SetUp
from kvsim.errors import UserError

_ALONE = 1.05
"""Requests in flight on the mean up to which none waits for another, so that its first token tells of its prompt."""
CLIENT_SPREAD = 0.1
"""How far a client's mean strays from what steps take: it sees tokens in bursts, and loads that rise and end."""


@dataclass(frozen=True, slots=True)
class Served:
    """Means over the requests of one run, in seconds and tokens."""

    where: str
    set_up: SetUp
    prompt: float
    new: float
    requests_per_s: float
    ttft_s: float
    tpot_s: float

    def points(self) -> list[BenchPoint]:
        """The time of a token and, where requests were alone, that of a prompt. Raises ``UserError``."""
        if self.new < 2:
            raise UserError(f"{self.where}: requests generate {self.new:.3g} tokens; 2 or more are expected")
        decoding = self.requests_per_s * self.tpot_s * (self.new - 1)
        if max(self.prompt, self.new) > MOST_TOKENS or decoding > MOST_SEQUENCES:
            raise UserError(f"{self.where}: its requests are larger or more than any server has")
        in_flight = max(decoding + self.requests_per_s * self.ttft_s, 1.0)
        sizes = {"prompt": max(round(self.prompt), 1), "spread": CLIENT_SPREAD}
        found = [
            BenchPoint(
                self.where,
                self.set_up,
                "serve",
                self.tpot_s,
                sequences=max(decoding, 1.0),
                new=round(self.new),
                # Of the others: while its own prompt runs, a request does not decode.
                prompts_per_step=self.requests_per_s * self.tpot_s * (1 - 1 / in_flight),
                **sizes,  # type: ignore[arg-type]
            )
        ]
        if in_flight <= _ALONE:
            found.append(BenchPoint(self.where, self.set_up, "prompt", self.ttft_s, **sizes))  # type: ignore[arg-type]
        return found
