"""Servers that divide the experts of a model. Each layer needs the experts of all, so all step together.

As vLLM's ranks do (``DPEngineCoreProc.run_busy_loop`` in ``v1/engine/core.py``, 0.32.0): a step takes as long as that
of the slowest, and a server without requests makes a dummy pass, which is never the slowest. What has come meanwhile is
taken in with the next step.
"""

from __future__ import annotations

import simpy

from kvsim.simulation.arrivals import IdleWork, Wait
from kvsim.simulation.cluster.replica import LocalClock, LocalInbox
from kvsim.simulation.job import Job


class Lockstep:
    """Lets servers on one clock begin their steps together."""

    def __init__(self) -> None:
        self.clock = LocalClock()
        self._stepping = 0
        self._ready: list[simpy.Event] = []

    def ended(self) -> None:
        """A server's step has ended."""
        self._stepping -= 1

    def ready(self) -> simpy.Event:
        """A server could begin its next step; the event tells it to."""
        self._ready.append(self.clock.env.event())
        return self._ready[-1]

    def go(self) -> None:
        """Let all that are ready begin, unless one is in a step."""
        if not self._stepping:
            ready, self._ready = self._ready, []
            self._stepping = len(ready)
            for event in ready:
                event.succeed()


class LockstepInbox(LocalInbox):
    """Arrivals at one of the servers that step together."""

    def __init__(self, lockstep: Lockstep):
        super().__init__(lockstep.clock)
        self._lockstep = lockstep
        self._in_step = False

    def horizon_s(self) -> float:
        """Now: a server looks at the others behind each step."""
        return float(self._env.now)

    def ready(self) -> None:
        """None: a server must wait for the others."""

    def next(self, busy: bool, began_s: float, idle: IdleWork) -> Wait:
        """All that has arrived when the next step of all servers begins."""
        lockstep, jobs = self._lockstep, list[Job]()
        if self._in_step:
            self._in_step = False
            lockstep.ended()
        if not (busy or self._jobs):
            lockstep.go()
            found = yield from super().next(False, began_s, idle)
            if found is None:
                return None
            jobs.extend(found)
        event = lockstep.ready()
        lockstep.go()
        yield event
        self._in_step = True
        return [*jobs, *self.take()]
