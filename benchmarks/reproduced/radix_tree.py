"""Radix tree and longest-prefix order: hit rates against the optimum, and against first come, first served."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.reproduced.finding import Finding, mean, measured, ratio
from kvsim.experiments.estimates import Interval
from kvsim.scenario.prefixes import InfiniteCache
from kvsim.scenario.scenario import Scenario, load_scenario, table_of
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy, cost_model, profile_of
from workloads import Prefixes, Request, Segment, Workload, named_rng

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "reproduced"
MODEL = "Llama 2 7B in 16,000 cells as there, times of an H100 instead of an A10G; vLLM's scheduler"
RATES = "hit rates of 50 to 99 %"
OPTIMUM = "96 % of the optimal hit rate on average"
IN_FLIGHT = 64
"""Requests that SGLang's benchmarks keep in flight (``--parallel``)."""
AT_ONCE = ("mmlu", "agents", "chat-short", "chat-long")
"""Workloads of the scenario files, all of whose sessions begin at once."""


@dataclass(frozen=True)
class Sent:
    """Given requests, in this order, a fixed number of them in flight."""

    requests: Sequence[Request]
    users: int = IN_FLIGHT
    notes: tuple[str, ...] = ()
    prefixes: Prefixes = "tokens"

    @property
    def n_requests(self) -> int:
        """The number of requests."""
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


def mmlu_by_subject(seed: int, subjects: int = 10, questions: int = 60) -> Sent:
    """MMLU as SGLang's benchmark sends it: subject after subject; lengths as in radix-mmlu.toml."""
    rng = named_rng(seed, "mmlu-lengths")
    requests = []
    for subject in range(subjects):
        examples = int(min(max(rng.lognormal(6.3, 0.5), 250), 1536))
        for _ in range(questions):
            number, own = len(requests), int(min(max(rng.lognormal(4.5, 0.6), 20), 800))
            content = (Segment(subject, 0, examples), Segment(subjects + number, 0, own))
            requests.append(Request(number, 0.0, examples + own, 1, content=content))
    return Sent(requests)


def hellaswag(seed: int, questions: int = 60, shots: int = 1500) -> Sent:
    """Questions behind the same twenty examples, each with four endings that are scored: sharing on two levels."""
    rng = named_rng(seed, "hellaswag-lengths")
    requests = []
    for question in range(questions):
        asked = int(rng.integers(25, 90))
        for ending in (int(n) for n in rng.integers(8, 40, 4)):
            number = len(requests)
            content = (Segment(0, 0, shots), Segment(1 + question, 0, asked), Segment(10_000 + number, 0, ending))
            requests.append(Request(number, 0.0, shots + asked + ending, 1, content=content))
    return Sent(requests)


SENT: Mapping[str, Callable[[int], Sent]] = {"mmlu by subject": mmlu_by_subject, "hellaswag": hellaswag}
"""Workloads that are sent in the order of SGLang's benchmarks."""
AS_SENT = ("mmlu by subject", "hellaswag", "agents", "chat-short", "chat-long")
"""The paper's workloads, as nearly in the order of its benchmarks as we can send them."""


class Served(NamedTuple):
    """What came of one run."""

    hit_rate: float
    optimum: float
    """Hit rate of a cache that never evicts: with the longest request in it, depth-first order reaches it."""
    per_s: float
    """Requests each second."""

    @property
    def part(self) -> float:
        """Share of the optimum."""
        return self.hit_rate / self.optimum


Runs = Mapping[tuple[str, str], Served]
"""Everything that is measured with a seed, by workload and order."""


def world(name: str, seed: int, order: str, limit: int = 0) -> Scenario:
    """A scenario file, or that of MMLU for workloads without one, under another order."""
    table, _, folder = table_of(EXAMPLES / f"radix-{name if name in AT_ONCE else 'mmlu'}.toml")
    server = {**table["server"], "order": order, "longest_prefix_limit": limit}
    return load_scenario({**table, "name": name, "seed": seed, "server": server, "folder": folder})


def serve(scenario: Scenario, workload: Workload) -> Served:
    """Serve a workload, and look it up in a cache that never evicts."""
    costs = cost_model(scenario, profile_of(scenario))
    policy, recorder = build_policy(scenario, None, costs), Recorder(detail="requests")
    backend = SimulatedBackend(costs, policy.kernel, policy.groups)
    result, _ = drive(scenario, policy, backend, recorder, costs.profile, workload=workload)
    cache = InfiniteCache(policy.block_size, workload.prefixes)
    for request in workload:
        cache.serve(request)
    best, found = cache.reuse.hit_rate, result.summary["prefix"]["hit_rate"]
    assert best is not None
    return Served(found, best, workload.n_requests / result.summary["makespan_s"])


def served(seed: int) -> Runs:
    """Serve every workload in every order."""
    runs: dict[tuple[str, str], Served] = {}
    for name in (*AT_ONCE, *SENT):
        for order in ("fcfs", "longest-prefix", "depth-first"):
            scenario = world(name, seed, order)
            runs[name, order] = serve(scenario, SENT[name](seed) if name in SENT else scenario.build_workload())
    limited = world("mmlu", seed, "longest-prefix", limit=128)
    runs["mmlu", "limited"] = serve(limited, limited.build_workload())
    for order in ("fcfs", "longest-prefix", "depth-first"):
        scenario = coding_agents(seed, order)
        runs["coding agents", order] = serve(scenario, scenario.build_workload())
    return runs


def coding_agents(seed: int, order: str) -> Scenario:
    """The built-in scenario ``agents``, with twice the sessions at ten times their rate, so that requests wait."""
    table, _, _ = table_of("agents")
    table["workload"] |= {"rate": 2.0, "sessions": 80}
    table["server"] = {"scheduler": "vllm", "slots": 16, "slot_context": 2048, "order": order}
    table["cache"] |= {"policy": "radix-tree"}
    return load_scenario({**table, "name": "agents", "seed": seed})


def finding(claim: str, where: str, ours: Interval, unit: str, differs: str) -> Finding:
    """A finding of this section."""
    return Finding("Radix tree", claim, f"Zheng et al., arXiv 2312.07104, {where}", ours, unit, differs)


def of_workload(name: str, runs: Sequence[Runs]) -> list[Finding]:
    """What the order changes for one workload."""
    lpm, fcfs, depth = ([run[name, order] for run in runs] for order in ("longest-prefix", "fcfs", "depth-first"))
    tiny = "the built-in scenario agents: a tiny model on a CPU, 8,192 cells"
    world = tiny if name == "coding agents" else MODEL
    more = ratio([each.per_s for each in lpm], [each.per_s for each in fcfs])
    return [
        finding(RATES, "section 6.2", mean([run.hit_rate for run in lpm]), "share", f"{name}; {world}"),
        finding(OPTIMUM, "section 6.2", mean([run.part for run in lpm]), "share", f"{name} alone; {world}"),
        finding("depth-first order is optimal", "3.1", mean([run.part for run in depth]), "share", f"{name}; {world}"),
        finding("fcfs finds less", "figure 8c", mean([run.hit_rate for run in fcfs]), "share", f"{name}; {world}"),
        finding("fcfs serves fewer requests", "figure 8c", more, "times as many", f"{name}; {world}"),
    ]


def find() -> list[Finding]:
    """Every figure of the section "Radix tree"."""
    runs = measured(served)
    average = mean([sum(run[name, "longest-prefix"].part for name in AS_SENT) / len(AS_SENT) for run in runs])
    limited = mean([run["mmlu", "limited"].part for run in runs])
    return [
        *(each for name in (*AT_ONCE, *SENT, "coding agents") for each in of_workload(name, runs)),
        finding(OPTIMUM, "section 6.2", average, "share", f"mean over {', '.join(AS_SENT)}; {MODEL}"),
        finding(OPTIMUM, "section 6.2", limited, "share", f"mmlu, fcfs while more than 128 wait; {MODEL}"),
    ]
