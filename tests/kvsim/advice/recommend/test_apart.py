"""Whether servers are better apart or together, from what their runs measured, and which divisions are tried."""

from dataclasses import dataclass, field

import pytest

from kvsim.advice.recommend.apart import Apart, find_apart
from kvsim.advice.recommend.candidates import Candidate
from kvsim.advice.recommend.finalists import Finalist
from kvsim.advice.recommend.fleet import Fleet
from kvsim.advice.recommend.slo import read_slo
from kvsim.advice.recommend.spoken import fleet_in_words
from kvsim.advice.recommend.trials import TrialOutcome
from kvsim.scenario.scenario import load_scenario

SLO = read_slo("ttft_p95<1s,tpot_p95<50ms")
CLUSTER = {"servers": [{"role": "prefill"}, {"role": "decode"}], "router": "least-load"}
CANDIDATE = Candidate(0, "vllm", "vllm", (), load_scenario("chat", cluster=CLUSTER), 0, windows=False)


def fared(ttft, tpot, settled=True, error=""):
    """Three replications around these seconds; nearly all noise is shared by all, as that of one traffic is."""
    outcomes = []
    for noise in (0.9 + ttft / 100, 1.0, 1.12):
        measures = {"ttft_p95": ttft * noise, "tpot_p95": tpot * noise, "failed_share": 0.0, "truncated_share": 0.0}
        outcomes.append(TrialOutcome({} if error else measures, settled, error=error))
    return Finalist(CANDIDATE, SLO, tuple(outcomes), loads=())


def unsure(finalist, *factors):
    """With a noise of its own in the TTFT."""
    outcomes = [
        TrialOutcome({**o.measures, "ttft_p95": o.measures["ttft_p95"] * factor}, o.settled)
        for o, factor in zip(finalist.outcomes, factors, strict=True)
    ]
    return Finalist(CANDIDATE, SLO, tuple(outcomes), loads=())


@pytest.mark.parametrize(
    ("found", "together", "better", "said"),
    [
        (
            fared(0.5, 0.02),
            fared(0.8, 0.04),
            "apart",
            "Apart is better: 2 servers apart have 0.6243 × (0.6214 to 0.6273) the TTFT P95 and 0.4994",
        ),
        (fared(0.8, 0.04), fared(0.5, 0.02), "together", "Together is better: "),
        (fared(0.8, 0.02), fared(0.5, 0.04), None, "Neither is better in all: TPOT P95 is shorter apart, TTFT P95 tog"),
        # One alone meets the service level, though its TTFT is longer.
        (fared(0.8, 0.02), fared(0.5, 0.08), "apart", "Apart is better: "),
        (fared(1.3, 0.02), fared(0.5, 0.04), "together", "Together is better: "),
        (fared(0.5, 0.02), fared(0.5, 0.02, settled=False), "apart", "Apart is better: "),
        # What tells them apart may be chance.
        (
            unsure(fared(1.02, 0.02), 1, 0.8, 1.3),
            fared(0.95, 0.02),
            None,
            "3 replications cannot tell which is better: ",
        ),
    ],
)
def test_which_is_better_is_what_more_than_chance_says(found, together, better, said):
    apart = Apart(1, 1, found, together)
    assert apart.better == better
    words = fleet_in_words(Fleet(2, (("round-robin", together), ("llm-d", together)), 1, None, apart))
    assert f" {said}" in words


def test_fewer_servers_are_said():
    apart = Apart(1, 1, fared(0.5, 0.02), fared(3.0, 0.02))
    fleet = Fleet(3, (("llm-d", fared(0.9, 0.02)), ("round-robin", fared(0.9, 0.02))), 1, apart.together, apart)
    assert (
        "Apart is better, with 2 servers instead of 3: 2 servers apart have 0.1652 × (0.1588 to 0.1717)"
        in fleet_in_words(fleet)
    )
    assert fleet.needed == (2, ", 1 to prefill and 1 to decode")
    assert fleet.to_dict()["apart"]["better"] == "apart"


@dataclass
class Made:
    """Trials of which is known how each division fares."""

    fares: dict
    tried: list = field(default_factory=list)

    def divided(self, prefill, decode, router):
        return prefill, decode

    def run(self, several, replications):
        self.tried += [(division, len(replications)) for division in several]
        return [self.fares.get(division, fared(9.0, 0.02)) for division in several]

    def behind(self, replicas, routers, replications):
        return [(router, fared(5.0, 0.02)) for router in routers]


GOOD = fared(0.5, 0.02)


@pytest.mark.parametrize(
    ("most", "fares", "expected"),
    [
        (4, {(3, 1): GOOD, (2, 1): GOOD}, (2, 1)),
        (4, {(3, 1): GOOD}, (3, 1)),
        (8, {(1, 7): GOOD, (2, 6): fared(2.0, 0.02), (1, 6): GOOD}, (1, 6)),
        # Where none is enough, the best of the most.
        (4, {(1, 3): fared(1.5, 0.02)}, (1, 3)),
        # What cannot run is not chosen, however badly the others fare.
        (4, {(1, 3): fared(0, 0, error="no"), (2, 2): fared(0, 0, error="no")}, (3, 1)),
    ],
)
def test_the_fewest_servers_are_found(most, fares, expected):
    trials = Made(fares)
    found = find_apart(trials, "llm-d", {most: GOOD}, range(2), range(3))
    assert (found.prefill, found.decode) == expected
    assert [division for division, replications in trials.tried if replications == 3] == [expected]
    assert found.together.means["ttft_p95"] == pytest.approx(0.5 if sum(expected) == most else 5.0, rel=0.03)


def test_none_is_found_where_none_can_run():
    no = fared(0, 0, error="no")
    assert find_apart(Made({(1, 2): no, (2, 1): no}), "llm-d", {3: GOOD}, range(2), range(3)) is None
