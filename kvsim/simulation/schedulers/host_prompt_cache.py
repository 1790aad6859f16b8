"""llama-server's host cache: what slots held, kept in host memory as long as there is room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvsim.model.cache_groups import MemoryShape
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.schedulers.slots import DecisionLog, no_log
from policies import Content, Exported, Group, Policy
from policies.cells.free_extents import FreeExtents

if TYPE_CHECKING:
    from kvsim.simulation.schedulers.context_checkpoints import ContextCheckpoint

MIB = 1 << 20
_CELLS = 1 << 40
"""Cells of the host tier, more than are ever used: what there is room for is said in bytes. Where layers have a window,
these are fewer than the tokens of a text would take."""
_KEPT_AT_LEAST = np.float32(0.25)
"""Share of an entry that a prompt must begin with for the entry to be brought back."""
_PER_TOKEN, _PER_LAYER, _PER_STREAM, _PER_GROUP = 12, 24, 4, 12
"""Bytes of a saved state beside K and V: position and sequence of each token, types and sizes of each layer, a count
for each stream, three for each group (llama.cpp, ``llama_kv_cache::state_write``)."""
_PER_STATE = 20
"""Bytes of a saved state of fixed size beside its layers (``llama_memory_recurrent::state_write``)."""
STATE_HEADER = 28
"""Bytes of a saved state of one group besides: by the sizes that llama-server 0.6.0-dev prints; 20 in 0.5.0-dev."""


def ratio(part: int, whole: int) -> np.float32:
    """``part / whole`` as the server has it, in single precision; not a number for 0 / 0."""
    return np.float32(part) / np.float32(whole) if whole else np.float32(np.nan)


class HostCells:
    """Cells of the host tier that are free: what there is room for is said in bytes, not in them."""

    def __init__(self) -> None:
        self._free = FreeExtents(_CELLS)

    def take(self, n: int) -> range:
        """So many cells, the first that lie together."""
        if n == 0:
            return range(0)
        at = self._free.first_of(n, 0)
        assert at is not None, "there are more cells than any limit lets be used"
        start = self._free.starts[at]
        self._free.take(start, n)
        return range(start, start + n)

    def give_back(self, cells: range) -> None:
        """They are free again."""
        if cells:
            self._free.give_back(cells.start, len(cells))


@dataclass(slots=True, eq=False)
class Entry:
    """The state of a text in host memory."""

    content: Content
    bytes: int
    cells: range
    """Cells of the host tier, by position."""
    checkpoints: tuple[ContextCheckpoint, ...] = ()
    """Those of the slot, which come back with it."""
    exported: Exported | None = None
    """What the policy knows of it."""


class StateSize:
    """Bytes of the saved state of a sequence, and of a checkpoint, which has only what cannot be rolled back."""

    def __init__(
        self,
        groups: tuple[Group, ...],
        cell_bytes: float,
        layers: float,
        state_bytes: int | None = None,
        header: int = STATE_HEADER,
    ):
        """``cell_bytes``: of a token in all of the ``layers``, of which one that has no V counts half.
        ``state_bytes``: of a state with types and sizes of its layers; None where there is none.
        ``header``: bytes of a saved state of one group besides."""
        self._groups, self._cell_bytes, self._layers = groups, cell_bytes, layers
        self._header = header - _PER_GROUP
        self._state = 0 if state_bytes is None else state_bytes + _PER_STATE

    def of(self, tokens: int) -> int:
        """Bytes of a sequence of that many tokens: of each cache group, what attention may still see of it."""
        return round(sum(self._of_group(group, tokens) for group in self._groups)) + self._header + self._state

    def of_checkpoint(self, window_tokens: int) -> int:
        """Bytes of a checkpoint whose windows hold that many tokens."""
        windows = (self._of_group(group, window_tokens) for group in self._groups if group.window is not None)
        return round(sum(windows)) + self._header + self._state

    def _of_group(self, group: Group, tokens: int) -> float:
        held = tokens if group.window is None else min(tokens, group.window)
        each = self._cell_bytes * group.share + _PER_TOKEN
        return held * each + _PER_STREAM * group.streams + _PER_GROUP + _PER_LAYER * self._layers * group.share


def size_of_states(scenario: Scenario, policy: Policy, header: int = STATE_HEADER) -> StateSize:
    """The sizes of states that a policy saves in a scenario."""
    shape, keeping = scenario.model.shape, 0
    layers = float(shape.n_layers)
    if isinstance(shape, MemoryShape):
        # A latent has no V beside it.
        layers = sum(group.layers / (2 if group.kind == "latent" else 1) for group in shape.cells)
        keeping = sum(group.layers for group in shape.states)
    state_bytes = scenario.model.state_bytes + _PER_LAYER * keeping if policy.holds_states else None
    return StateSize(policy.groups, scenario.cell_bytes, layers, state_bytes, header)


class HostPromptCache:
    """Entries, the oldest first (llama.cpp, ``server_prompt_cache`` in ``tools/server/server-task.cpp``; pull request
    16391)."""

    def __init__(self, scenario: Scenario, policy: Policy, log: DecisionLog = no_log, host: HostCells | None = None):
        limit = scenario.server.cache_ram
        self.limit_bytes = max(limit, 0) * MIB
        """0: no limit."""
        self._limit_tokens = scenario.context_cells
        self.size = size_of_states(scenario, policy)
        self._log = log
        self._logs = log is not no_log
        self.bytes = 0
        """Bytes of all entries."""
        self.tokens = 0
        """Tokens of all entries."""
        self.most_bytes = 0
        """The most bytes that there were of all entries."""
        self._entries: dict[Entry, None] = {}
        """The oldest first."""
        self._by_first: dict[tuple[int, int], dict[Entry, None]] = {}
        """Entries by their first token: only those that begin alike can be of use to each other."""
        self._host = HostCells() if host is None else host

    @property
    def prompts(self) -> int:
        """Number of entries."""
        return len(self._entries)

    @property
    def entries(self) -> list[Entry]:
        """All entries, the oldest first."""
        return list(self._entries)

    def save(self, content: Content, checkpoints: Sequence[ContextCheckpoint] = ()) -> Entry | None:
        """Make an entry for what a slot holds, and room for it; None if it is there already or too large.

        The caller exports the state to the entry's cells.
        """
        n = content.n
        if n == 0:
            return None
        size = self.size.of(n)
        self._log("save", tokens=n, mib=size / MIB)
        alike = [(entry, entry.content.common_prefix(content)) for entry in self._beginning_like(content)]
        if any(same == n for _, same in alike):
            self._log("already_saved")
            return None
        size += sum([checkpoint.bytes for checkpoint in checkpoints])
        if self.limit_bytes and size > self.limit_bytes:
            self._log("too_large", mib=size / MIB, limit=self.limit_bytes / MIB)
            return None
        for entry, same in alike:
            if same == entry.content.n:
                self._log("obsolete", tokens=same)
                self.remove(entry)
        while self.limit_bytes and self._entries and self.bytes + size > self.limit_bytes:
            self._drop_oldest("make_room")
        made = Entry(content, size, self._host.take(n), tuple(checkpoints))
        self._entries[made] = None
        self._by_first.setdefault(_first(content), {})[made] = None
        self.bytes, self.tokens = self.bytes + size, self.tokens + n
        self.most_bytes = max(self.most_bytes, self.bytes)
        return made

    def find(self, held: Content, prompt: Content) -> Entry | None:
        """The entry to bring back for a prompt, better than what the slot holds and than all others; None if none is.

        Better is what is kept of it in a larger share, and of what the prompt gets a larger share.
        """
        n, prefix = prompt.n, held.common_prefix(prompt)
        keep = ratio(prefix, held.n) if held.n else np.float32(-1)  # Whatever there is beats an empty slot.
        similarity = ratio(prefix, n)
        self._log("look", keep=keep, sim=similarity)
        best = None
        for entry in self._entries if self._logs else self._beginning_like(prompt):
            prefix = entry.content.common_prefix(prompt)
            kept, similar = ratio(prefix, entry.content.n), ratio(prefix, n)
            self._log("candidate", tokens=entry.content.n, lcp=prefix, keep=kept, sim=similar)
            if kept >= _KEPT_AT_LEAST and keep < kept and similarity < similar:
                keep, similarity, best = kept, similar, entry
        if best is not None:
            self._log("found", keep=keep, sim=similarity)
        return best

    def remove(self, entry: Entry) -> None:
        """Take an entry out: it was brought back, or there is no more room for it."""
        first = _first(entry.content)
        del self._entries[entry], self._by_first[first][entry]
        if not self._by_first[first]:
            del self._by_first[first]
        self.bytes, self.tokens = self.bytes - entry.bytes, self.tokens - entry.content.n
        self._host.give_back(entry.cells)

    def enforce_limits(self) -> None:
        """Drop the oldest entries while there are too many bytes or tokens."""
        while self.limit_bytes and self.bytes > self.limit_bytes:
            self._drop_oldest("size_limit")
        limit = self._limit_tokens
        if self.limit_bytes:
            each = max(np.float32(1), ratio(self.bytes, max(1, self.tokens)))
            limit = max(limit, int(np.float32(self.limit_bytes) / each))
        while self._entries and self.tokens > limit:
            self._drop_oldest("token_limit")
        self._log("host_cache", prompts=len(self._entries), mib=self.bytes / MIB)
        if self._logs:
            for entry in self._entries:
                kept = {"checkpoints": len(entry.checkpoints)} if entry.checkpoints else {}
                self._log("host_entry", tokens=entry.content.n, **kept, mib=entry.bytes / MIB)

    def _beginning_like(self, content: Content) -> list[Entry]:
        """The entries whose first token is that of a text, the oldest first."""
        return list(self._by_first.get(_first(content), ())) if content.n else []

    def _drop_oldest(self, reason: str) -> None:
        oldest = next(iter(self._entries))
        self._log(reason, mib=oldest.bytes / MIB)
        self.remove(oldest)


def _first(content: Content) -> tuple[int, int]:
    """The source and the place in it of a text's first token."""
    source, start, _ = next(iter(content))
    return source, start
