"""When files behind host memory are read and written, and look-ups of them answered."""

from __future__ import annotations

from collections import deque

from kvsim.scenario.serving_sections import MachineSection
from kvsim.simulation.recorder import Recorder
from policies.paging.disk_chunks import TieredChunks


class Disk:
    """Reads files one after another, beside that writes them, and is asked at the end of a step.

    vLLM has several threads for each direction, which share the bandwidth: together they take as long.
    """

    def __init__(self, chunks: TieredChunks, machine: MachineSection, tokens: int, cell_bytes: float, of: Recorder):
        """``tokens``: of a file; ``cell_bytes``: of one token; ``of``: counts what is read and written."""
        self._chunks = chunks
        self._tokens = tokens
        self._latency_s = machine.disk_latency_s
        self._file_s = machine.disk_latency_s + tokens * cell_bytes / (machine.disk_gb_s * 1e9)
        self._recorder = of
        self._free_s = {True: 0.0, False: 0.0}
        """When the last file will have been written, and read."""
        self._ends_s: dict[int, float] = {}
        self._answers_s: deque[float] = deque()

    def begin(self, at_s: float) -> None:
        """Begin what has been decided since the last call."""
        for copy in self._chunks.begun:
            began_s = max(self._free_s[copy.to_disk], at_s)
            self._ends_s[copy.number] = self._free_s[copy.to_disk] = began_s + copy.files * self._file_s
            self._recorder.counts.disk.copied(copy.files * self._tokens, copy.to_disk)
        self._chunks.begun.clear()
        while len(self._answers_s) < len(self._chunks.unanswered):
            self._answers_s.append(at_s + self._latency_s)

    def proceed(self, now: float) -> None:
        """Tell what has ended by now."""
        ended = [number for number, at_s in self._ends_s.items() if at_s <= now]
        for number in ended:
            del self._ends_s[number]
        answers = sum(at_s <= now for at_s in self._answers_s)
        for _ in range(answers):
            self._answers_s.popleft()
        self._chunks.proceed(ended, answers)
