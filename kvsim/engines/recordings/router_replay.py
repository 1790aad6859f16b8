"""Replaying what a real router decided through ours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kvsim.engines.recordings.recording_files import Record, whole_number
from kvsim.engines.recordings.replay import Replay, State
from kvsim.errors import UserError, no_such
from kvsim.simulation.cluster.routers import Prompt, ServerLoad, make_router
from kvsim.simulation.cluster.routers.cache_aware import TreeRouter
from kvsim.simulation.cluster.routers.plain import PowerOfTwo
from kvsim.simulation.cluster.routers.prefix_hash import PrefixHash
from policies.content import TextSegment

PACKAGES = {"vllm-router": "vllm_router", "smg": "smg", "sglang-router": "sglang_router"}
"""The module of each package of a router."""
_EVERYWHERE = {"round_robin": "round-robin", "random": "random"}
OURS = {
    "vllm-router": {
        **_EVERYWHERE,
        "cache_aware": "vllm-router/cache_aware",
        "power_of_two": "power-of-two",
        "consistent_hash": "consistent-hash",
        "sticky_least_loaded": "sticky-least-loaded",
    },
    "smg": {
        **_EVERYWHERE,
        "cache_aware": "smg/cache_aware",
        "least_load": "smg/least_load",
        "power_of_two": "power-of-two",
        "prefix_hash": "prefix-hash",
    },
    # Without reported loads, its power_of_two compares nothing.
    "sglang-router": {**_EVERYWHERE, "cache_aware": "sglang-router/cache_aware", "power_of_two": "random"},
}
"""Our router for each policy of a package."""
_LEAST_LIKELY = 1e-5
"""Choices that are less likely than this are not taken for drawn as ours are."""


def our_router(package: str, policy: str) -> str:
    """The name of our router for a policy of a package. Raises ``UserError`` if there is none."""
    if package not in OURS:
        raise UserError(no_such("router package", package, OURS))
    if policy not in OURS[package]:
        raise UserError(no_such(f"policy of {package}", policy, OURS[package]))
    return OURS[package][policy]


class RouterReplay(Replay):
    """Sends the recorded requests through our router.

    Where ours draws, the recorded choice is taken if it is one of those that could be drawn, and at the end all of them
    are held against their chances: each gives a number that is evenly distributed between 0 and 1 if they are right
    (the randomized probability integral transform), by the test of Kolmogorov and Smirnov; those between servers with
    equal loads and those between others apart, at a level of 0.001 %.
    """

    def __init__(self, header: Record):
        """Raises ``ValueError`` if it is not the header of such a recording."""
        if header.get("kind") != "router":
            raise ValueError("not the recording of a router; a header of the kind 'router' is expected")
        package, policy = str(header.get("package")), str(header.get("policy"))
        name = our_router(package, policy)
        self.era = f"{package} {header['version']}, {policy}"
        servers = whole_number(header, "workers")
        settings = {"names": header["names"]} if name == "consistent-hash" else {}
        self._router = make_router(name, servers, np.random.default_rng(0), **settings)
        for flag, value in pairwise(header.get("flags", [])):
            setting = flag.removeprefix("--").replace("-", "_")
            if flag.startswith("--") and hasattr(self._router, setting):
                setattr(self._router, setting, float(value))
        self._router.draw = self._draw  # type: ignore[method-assign]
        if isinstance(self._router, PrefixHash):
            self._router.home = self._home  # type: ignore[method-assign]
        self._homes: dict[tuple[TextSegment, ...], int] = {}
        self._learned = False
        self._recorded = 0
        self._loads = [0] * servers
        """Requests in flight."""
        self._drawn: dict[bool, list[float]] = {False: [], True: []}
        """What each drawn choice gives; evenly distributed if the chances are right. By whether loads differed."""
        self._decided = 0
        self._spread = np.random.default_rng(1)
        self._sent: dict[int, tuple[int, Prompt]] = {}

    def perform(self, record: Record) -> tuple[State, State]:
        """Start or end a request, or test what was drawn."""
        do = record["do"]
        if do == "end":
            server, prompt = self._sent.pop(record["request"])
            self._router.ended(server, prompt, 0.0)
            self._loads[server] -= 1
            return {}, {}
        if do == "report":
            self._router.polled([ServerLoad(*load) for load in record["loads"]], 0.0)
            return {}, {}
        if do == "evict" and isinstance(self._router, TreeRouter):
            self._router.forget()
            return {}, {}
        if do == "check":
            return self._chances() if any(self._drawn.values()) else ({}, {})
        if do != "start":
            raise ValueError(f"{do!r:.40}: start, end, report or check is expected")
        text = tuple((source, start, n) for source, start, n in record["text"])
        prompt = Prompt(record["request"], text, sum(n for _, _, n in text), record["session"])
        self._recorded, self._learned = record["server"], False
        server = self._router.route(prompt, 0.0)
        self._loads[server] += 1
        self._sent[prompt.request] = server, prompt
        if self._learned:
            return {}, {}
        self._decided += 1
        return {"server": record["server"]}, {"server": server}

    def operation(self, record: Record) -> Record:
        """The request."""
        return {key: record[key] for key in record if key != "server"}

    def _draw(self, among: Sequence[int]) -> int:
        """The recorded choice in place of a drawn one, if it could have been drawn."""
        loads = self._loads
        if self._recorded not in among:  # The second of two, which the first was better than.
            return max(among, key=lambda server: loads[server])
        if len(among) > 1:
            chances = self._pair_chances() if isinstance(self._router, PowerOfTwo) else [1.0] * len(loads)
            ordered = sorted(among, key=lambda server: (loads[server], server))
            before = sum(chances[server] for server in ordered[: ordered.index(self._recorded)])
            share = before + chances[self._recorded] * float(self._spread.random())
            unlike = len({loads[server] for server in among}) > 1
            self._drawn[unlike].append(share / sum(chances[server] for server in among))
        return self._recorded

    def _pair_chances(self) -> list[float]:
        """The number of pairs in which each server is the one taken; equals count a half each."""
        loads = self._loads
        return [sum((load < other) + (load == other) / 2 for other in loads) - 0.5 for load in loads]

    def _home(self, beginning: tuple[TextSegment, ...]) -> int:
        """The server that a beginning belongs to: where it first went, since the hash is theirs."""
        self._learned = beginning not in self._homes
        return self._homes.setdefault(beginning, self._recorded)

    def _chances(self) -> tuple[State, State]:
        from scipy.stats import kstest

        tests: list[Any] = [kstest(shares, "uniform") for shares in self._drawn.values() if shares]
        likely = min(1.0, len(tests) * min(test.pvalue for test in tests))
        drawn = f"{sum(map(len, self._drawn.values()))} of {self._decided} were drawn, each from those that could be"
        self.excused = [f"{drawn}; p = {likely:.2g} that they are as far from their chances as this"]
        ours = "yes" if likely >= _LEAST_LIKELY else f"no (p = {likely:.1g})"
        return {"drawn with these chances": "yes"}, {"drawn with these chances": ours}
