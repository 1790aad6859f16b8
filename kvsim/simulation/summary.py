"""The summary of a run: its figures, why requests failed, and what was priced without a measurement, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvsim.errors import counted
from kvsim.scenario.prefixes import hit_rate
from kvsim.simulation.job import FailureKind, Job

if TYPE_CHECKING:
    from kvsim.simulation.recorder import Recorder
    from workloads import Prefixes


@dataclass(slots=True)
class FailureGroup:
    """The requests of a run that failed in one way."""

    kind: FailureKind
    count: int
    shortest: int
    """Prompt tokens of the request with the shortest prompt."""
    longest: int
    """Prompt tokens of the request with the longest prompt."""
    limit: int
    """Largest limit that one of them exceeded, in tokens; 0 if the kind has none."""
    example: str
    """What the policy said of the one with the longest prompt, with its sizes; empty if the kind has a limit."""

    @property
    def reason(self) -> str:
        """The reason in words, with its numbers."""
        longest = f"longest {self.longest:,}" if self.count > 1 else f"{self.longest:,}"
        example = f": {self.example}" if self.example else ""
        match self.kind:
            case FailureKind.CONTEXT:
                return f"the prompt is too long for a slot ({longest} tokens; a slot has {self.limit:,})"
            case FailureKind.BATCH:
                sizes = f"{longest} tokens; n_batch is {self.limit:,}"
                return f"the prompt is longer than a step, and prefill is not chunked ({sizes})"
            case FailureKind.CACHE:
                return f"the whole cache is too small for the request{example}"
            case FailureKind.FULL:
                return (
                    f"the answer filled the slot, which is an error without context shift (a slot has {self.limit:,})"
                )
            case FailureKind.OUT_OF_CELLS:
                return f"a step found no room in the cache{example}"
        return "the client has gone"

    def include(self, other: FailureGroup) -> None:
        """Count the requests of another group of this kind."""
        if other.longest > self.longest:
            self.longest, self.example = other.longest, other.example
        self.count += other.count
        self.shortest = min(self.shortest, other.shortest)
        self.limit = max(self.limit, other.limit)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``failures`` in ``--json``."""
        return {
            "kind": self.kind.value,
            "count": self.count,
            "reason": self.reason,
            "shortest_prompt": self.shortest,
            "longest_prompt": self.longest,
            "limit": self.limit or None,
            "example": self.example or None,
        }


class FailureCounts:
    """Counts failed requests by kind, in bounded memory."""

    def __init__(self) -> None:
        self._groups: dict[FailureKind, FailureGroup] = {}

    def add(self, job: Job) -> None:
        """Count a request that has failed."""
        tokens = job.request.prompt_tokens
        self.include(FailureGroup(job.failure, 1, tokens, tokens, job.exceeded, job.refusal))

    def include(self, group: FailureGroup) -> None:
        """Count the requests of a group."""
        if group.kind in self._groups:
            self._groups[group.kind].include(group)
        else:
            self._groups[group.kind] = group

    def summary(self) -> list[dict[str, Any]]:
        """The groups, most frequent first, ready for JSON."""
        return [group.to_dict() for group in sorted(self._groups.values(), key=lambda group: -group.count)]


def sum_failures(runs: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Sum the ``failures`` of the summaries of several runs of one scenario."""
    counts = FailureCounts()
    for run in runs:
        for entry in run:
            numbers = (entry["count"], entry["shortest_prompt"], entry["longest_prompt"], entry["limit"] or 0)
            counts.include(FailureGroup(FailureKind(entry["kind"]), *numbers, entry["example"] or ""))
    return counts.summary()


def failure_lines(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say in a line for each kind how many requests failed and why; ``failures`` are those of a run's summary."""
    return [f"{entry['count']:,} failed: {entry['reason']}" for entry in failures]


_WORDS = {"host_copies": "copies to host memory", "disk": "files", "mapping": "mapping pages"}
"""What is printed for keys that are no words."""


def inferred_lines(summaries: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A line for each thing that was inferred, with the policies that it concerns; ``summaries`` of runs."""
    policies: dict[tuple[str, str], dict[str, None]] = {}
    for summary in summaries:
        for what, how in summary.get("inferred", {}).items():
            policies.setdefault((what, how), {})[summary["policy"]] = None
    return tuple(
        f"inferred, not measured: {_WORDS.get(what, what)} of {', '.join(concerned)}, {how}"
        for (what, how), concerned in policies.items()
    )


def servers_behind(count: int, router: str, *, least: int | None = None) -> str:
    """How many servers there are, or ``least`` to ``count`` in several runs, and what gives them their requests."""
    return f"{f'{least:,}–' if least not in (None, count) else ''}{count:,} servers behind {router}"


def what_serves(summary: Mapping[str, Any]) -> str:
    """The servers of a run with their cells and slots, in words; ``summary``: the run's."""
    sizes = f"{counted(summary['cells'], 'cell')}, {counted(summary['slots'], 'slot')}"
    cluster = summary.get("cluster")
    if not cluster:
        return sizes
    alike = len({(server["device"], server["cells"]) for server in cluster["servers"]}) == 1
    behind, apart = servers_behind(len(cluster["servers"]), cluster["router"]), cluster.get("apart")
    if apart:
        kinds = Counter(server["role"] for server in cluster["servers"])
        behind = " and ".join(
            f"{counted(kinds[role], 'server')} to {role} behind {router}"
            for role, router in (("prefill", cluster["router"]), ("decode", apart["decode_router"]))
        )
    return f"{behind}, {'each' if alike else 'the first'} with {sizes}"


def router_waits(cluster: Mapping[str, Any]) -> str:
    """How much of the waiting another router could have spared, in words; empty where none waited.

    ``cluster``: that of a run's summary.
    """
    if cluster["beside_free"] is None:
        return ""
    requests = sum(server["requests"] for server in cluster["servers"] if server.get("role") != "decode")
    mean_s = cluster["waited_s"] / requests
    return (
        f"a request waited {mean_s:.3g} s for its server on average; in {cluster['beside_free']:.1%} of that time "
        "another server had none waiting"
    )


def lost_to_checkpoints(summary: Mapping[str, Any], ctx_checkpoints: int) -> str:
    """What was computed again since no checkpoint was near enough, and which flag spares it; empty if nothing was."""
    found = summary["checkpoints"]
    lost, spared = found["lost_tokens"], found["spared_tokens"]
    if not lost:
        return ""
    said = (
        f"{counted(lost, 'prompt token')} that slots held had to be computed again, since no checkpoint was near enough"
    )
    if not ctx_checkpoints:
        return f"{said}: there were none (--ctx-checkpoints 32)"
    rest = (
        "no flag but a --ubatch-size longer than the end that differs: checkpoints are made at messages of a user and "
        "that many tokens before the end of a prompt"
    )
    if not spared:
        return f"{said}, which is mended by {rest}"
    each = "all of them" if spared == lost else f"{spared:,} of them"
    more = "" if spared == lost else f", the others by {rest}"
    return f"{said}; --checkpoint-min-step 0, with --ctx-checkpoints as many as there are messages, spares {each}{more}"


def link_waits(cluster: Mapping[str, Any]) -> str:
    """What was read from prefill servers and how requests waited for it, in words; empty where none is.

    ``cluster``: that of a run's summary.
    """
    apart = cluster.get("apart")
    if not apart or not apart["reads"]:
        return ""
    means_ms = [1e3 * apart[name] / apart["reads"] for name in ("block_wait_s", "link_wait_s", "link_s", "held_s")]
    blocks, link, reading, held = [f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms" for ms in means_ms]
    return (
        f"{apart['bytes'] / 1e9:,.3g} GB of prompts were read from prefill servers over {apart['link_gb_s']:g} GB/s a "
        f"device; a request waited {blocks} for blocks at its decode server, {link} for the link and {reading} while "
        f"it was read, on average; its blocks were held {held} where it was prefilled"
    )


def summarize(recorder: Recorder, cell_bytes: float, prefixes: Prefixes) -> dict[str, Any]:
    """The figures of a run, ready for JSON: times in seconds, None where there is no figure.

    ``cell_bytes``: bytes of K and V in one cell, all layers. ``prefixes``: what the workload says about prompts that
    begin alike; if nothing, there is no hit rate.
    """
    counts, held = recorder.counts, recorder.host_prompts
    told = counts.to_dict(cell_bytes)
    told["cache"] = {**recorder.cache_states.means(), **told["cache"]}
    told["prefix"]["hit_rate"] = hit_rate(counts.prefix.found, counts.prefix.tokens, prefixes)
    told["host"] |= {
        "most_bytes": None if held is None else held.most_bytes,
        "limit_bytes": None if held is None else held.limit_bytes or None,
    }
    return {**recorder.requests.latencies.summary(), "queue": recorder.queue.summary(), **told}
