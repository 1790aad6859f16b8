"""Replays: a scheduler and a policy of ours are driven along a recording, record by record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvsim.engines.recordings.recording_files import Record
from kvsim.simulation.backend import PassByPass
from policies import MicroBatch
from workloads import Request

State = dict[str, Any]
"""State compared field by field, as in the recording."""


class Replay(ABC):
    """Does what a recorded engine did, on our own scheduler and policy."""

    era: str
    """Version of the engine, or a range of versions that behave alike."""
    excused: Sequence[str] = ()
    """What was decided by the recording because its clock cannot tell, in words."""
    placed: tuple[MicroBatch, ...] = ()
    """The micro-batches of the last step; none if it found no room."""

    @abstractmethod
    def perform(self, record: Record) -> tuple[State, State]:
        """Perform one record; return the recorded state after it and ours, in the same fields.

        Nothing is to be compared where the recorded state is empty.
        """

    @abstractmethod
    def operation(self, record: Record) -> Record:
        """The part of a record that says what was done."""


class ZeroTimeBackend(PassByPass):
    """A backend on which everything takes zero time: what counts is what is decided."""

    wants_views = False

    def begin(self, seq: int, request: Request, *, again: bool = False) -> None:
        """Do nothing."""

    def discard(self, seq: int, start: int, stop: int) -> None:
        """Do nothing."""

    def forward(self, batch: object) -> float:
        """Zero seconds, as for whatever else is asked."""
        return 0.0

    move = transfer = copy = forward
