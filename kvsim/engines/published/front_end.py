"""What clients see beside the server's own time: HTTP and the network, and one tokenizer that takes prompts in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import simpy

from kvsim.simulation.arrivals import Inbox, Process
from workloads import Request, Workload


@dataclass
class FrontEndClients:
    """Clients of a closed loop behind a front end: ``clients`` of one run (``drive``)."""

    around_s: float
    """Seconds around each request: network, HTTP, the client."""
    token_s: float
    """Seconds per token of a prompt in the tokenizer."""
    waits_s: list[float] = field(default_factory=list)
    """What each request waited before the engine had it, seconds."""

    def __call__(self, env: simpy.Environment, inbox: Inbox, workload: Workload) -> Process:
        """Send the requests of a workload, and close the inbox behind the last one."""
        requests, tokenizer = iter(workload), simpy.Resource(env)
        yield env.all_of([env.process(self._user(env, inbox, requests, tokenizer)) for _ in range(workload.users or 1)])
        inbox.close()

    def _user(
        self, env: simpy.Environment, inbox: Inbox, requests: Iterator[Request], tokenizer: simpy.Resource
    ) -> Process:
        for request in requests:
            asked_s = env.now
            yield env.timeout(self.around_s)
            with tokenizer.request() as turn:
                yield turn
                yield env.timeout(self.token_s * request.prompt_tokens)
            self.waits_s.append(env.now - asked_s)
            answer = inbox.submit(request, notify=True).done
            assert answer is not None
            yield answer

    @property
    def mean_s(self) -> float:
        """The mean of the waits; 0 before there are any."""
        return sum(self.waits_s) / len(self.waits_s) if self.waits_s else 0.0
