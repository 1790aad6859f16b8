"""Chunks in files on a disk behind host memory, as vLLM 0.32.0 keeps them.

Source: ``vllm/v1/kv_offload/tiering/``, its ``TieringOffloadingManager`` before one tier of files (``fs``) with the
defaults, that is without backpressure. It knows no clock: others say which files have been read and written, and when
the disk has answered what it was asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from policies.content import Key
from policies.paging.host_chunks import Access, HostChunks, OffloadOrder


@dataclass(slots=True, eq=False)
class FileCopy:
    """Chunks on their way between host memory and files."""

    number: int
    to_disk: bool
    slots: dict[Key, int]
    """The chunks' keys, and where in host memory they are."""
    files: int
    """How many files are read or written; of those that are there already, none is written again."""


@dataclass(slots=True)
class _LookUp:
    """What is known of a file."""

    asked_by: set[Access] = field(default_factory=set)
    """Requests for which it was asked that have not ended: as long as there are any, it is not asked again."""
    found: bool | None = None
    """None before the answer."""


class TieredChunks(HostChunks):
    """Chunks in host memory, all of which are written to files, too, and that come from there when they are asked for.

    What has been stored is written at once, and cannot be evicted meanwhile. A chunk that only a file has gets a place
    in host memory, and is read into it. No file is ever deleted: when the disk is full, no more are written.
    """

    def __init__(
        self, n: int, blocks_per_chunk: int = 1, order: OffloadOrder = "lru", *, answers: bool = False, most_files: int
    ):
        """``most_files``: chunks that the disk has room for; the other arguments are those of host memory."""
        super().__init__(n, blocks_per_chunk, order, answers=answers)
        self.begun: list[FileCopy] = []
        """Copies that have begun since this was last cleared."""
        self.unanswered: deque[list[Key]] = deque()
        """What the disk was asked at the end of each step, and has not answered."""
        self.files: set[Key] = set()
        """The chunks on the disk."""
        self._most_files = most_files
        self._under_way: dict[int, FileCopy] = {}
        self._n_begun = self._n_read = self._n_written = 0
        self._ended: list[FileCopy] = []
        """Copies that have ended, of which nobody has taken note."""
        self.noted = False
        self._to_read: dict[Access, dict[Key, int]] = {}
        """Chunks that are to be read at the end of the step, by request."""
        self._look_ups: dict[Key, _LookUp] = {}
        self._to_ask: list[Key] = []

    @property
    def busy(self) -> bool:
        """Whether requests may wait for files."""
        return bool(self._to_ask or self.unanswered or self._to_read or self._n_read)

    def is_there(self, key: Key, access: Access) -> bool | None:
        """Whether a chunk can be read; None while it is being written, or sought or read on the disk."""
        self._take_note()
        there = super().is_there(key, access)
        if there is not False:
            return there
        found = self._is_on_disk(key, access)
        if not found:
            return found
        slots = super().prepare_store([key], access)
        if slots is None:
            return False
        self._to_read.setdefault(access, {}).update(slots)
        return None

    def prepare_store(self, keys: Sequence[Key], access: Access) -> dict[Key, int] | None:
        """Begin to write those of the offered chunks that are to be stored; None where there is no room."""
        self._take_note()
        return super().prepare_store(keys, access)

    def stored(self, keys: Collection[Key]) -> None:
        """End writing chunks to host memory, and begin to write them to files."""
        super().stored(keys)
        slots = dict(zip(keys, self.pin(keys, None), strict=True))
        files = min(len(slots.keys() - self.files), self._most_files - self._n_written)
        self._n_written += files
        self._begin(slots, to_disk=True, files=files)

    def step_composed(self) -> None:
        """A step has been composed: begin to read files, and ask the disk."""
        self._take_note()
        self.noted = False
        for slots in self._to_read.values():
            self._n_read += 1
            self._begin(slots, to_disk=False, files=len(slots))
        self._to_read = {}
        if self._to_ask:
            self.unanswered.append(self._to_ask)
            self._to_ask = []

    def forget(self, access: Access) -> None:
        """A request has ended, and nothing of it is being stored any more."""
        for key in access.sought:
            look_up = self._look_ups[key]
            look_up.asked_by.discard(access)
            if not look_up.asked_by and look_up.found is not None:
                del self._look_ups[key]
        access.sought.clear()

    def proceed(self, ended: Iterable[int], answers: int) -> None:
        """These copies have ended, and the disk has answered what it was asked in so many steps."""
        for number in ended:
            copy = self._under_way.pop(number)
            if copy.to_disk:
                for key in copy.slots:
                    if len(self.files) < self._most_files:
                        self.files.add(key)
            self._ended.append(copy)
        for _ in range(answers):
            for key in self.unanswered.popleft():
                look_up = self._look_ups[key]
                look_up.found = key in self.files
                if not look_up.asked_by:
                    del self._look_ups[key]

    def _take_note(self) -> None:
        """Take note of the copies that have ended, unless that has been done in this step."""
        if self.noted:
            return
        self.noted = True
        for copy in self._ended:
            if copy.to_disk:
                self.unpin(copy.slots)
            else:
                self._n_read -= 1
                super().stored(copy.slots)
        self._ended.clear()

    def _is_on_disk(self, key: Key, access: Access) -> bool | None:
        look_up = self._look_ups.get(key)
        if look_up is None:
            look_up = self._look_ups[key] = _LookUp()
            self._to_ask.append(key)
        look_up.asked_by.add(access)
        access.sought.add(key)
        return look_up.found

    def _begin(self, slots: dict[Key, int], *, to_disk: bool, files: int) -> None:
        copy = FileCopy(self._n_begun, to_disk, slots, files)
        self._n_begun += 1
        self._under_way[copy.number] = copy
        self.begun.append(copy)
