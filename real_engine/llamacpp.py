"""The llama.cpp backend: the server drives the real llama.cpp step by step and times it.

llama.cpp chooses its cells itself. A policy that describes it therefore runs in parallel (``MirroredPolicy``): every
operation that the scheduler performs on the policy is also performed in llama.cpp, and whenever llama.cpp shows its
cells they are compared with the policy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvsim.errors import Divergence, UserError
from policies import Checkpoint, Chunk, Exported, HostCopy, MicroBatch, Moves, OutOfCells, Policy, Transfer
from policies.cells.arena import Arena
from policies.delegating import DelegatingPolicy
from policies.layouts.multi_stream import MultiStreamPolicy, Rejected
from policies.layouts.unified import UnifiedPolicy
from policies.vocabulary import Cells
from real_engine.arrays import IntArray
from real_engine.llama_cells import SHARED, Era, StreamCells, sequence_offset
from real_engine.llama_library import BatchRow, Context, ContextSettings, LlamaModel
from real_engine.sequence_tokens import SequenceTokens

POLICIES: dict[Era, tuple[str, ...]] = {
    "A": ("llama.cpp-b4666",),
    "B": ("llama.cpp-b6975", "streams", "sliding-window"),
}
"""Presets that describe each era of llama.cpp."""

DONE, NO_SLOT, REJECTED = 0, 1, -1
"""Return codes of ``llama_decode``."""


class StreamState(NamedTuple):
    """Contents of one of the policy's streams, in llama.cpp's terms."""

    head: int
    used: int
    largest: int
    position: IntArray
    owner: IntArray
    """As ``StreamCells.owner``."""
    shared: dict[int, tuple[int, ...]]
    """As ``StreamCells.shared``."""


class OperationObserver(Protocol):
    """Receives every operation performed in llama.cpp, and the cells that it shows."""

    def operation_done(self, operation: str, arguments: Sequence[Any], returned: int | None = None) -> None:
        """An operation has been performed."""
        ...

    def cells_shown(self, cells: Sequence[StreamCells]) -> None:
        """Cells before the last operation (era B) or after it (era A)."""
        ...


@dataclass(slots=True)
class ComparisonCounts:
    """How often llama.cpp's cells were compared."""

    streams: int = 0
    """Dumps of whole streams that were compared."""
    steps: int = 0
    """Steps with at least one comparison."""


class MirroredPolicy(DelegatingPolicy):
    """A policy that describes llama.cpp, and repeats every sequence operation in llama.cpp."""

    def __init__(self, inner: UnifiedPolicy | MultiStreamPolicy, context: Context, offset: int = 0):
        """``offset``: added to our sequence numbers to give llama.cpp's."""
        super().__init__(inner)
        self.context = context
        self.offset = offset
        self.observer: OperationObserver | None = None
        self.expected = DONE
        """What ``llama_decode`` should return for the last step."""
        self.before: dict[tuple[int, int], StreamState] = {}
        """Era B with ``show_cells``: state before the last step, by cache and stream."""
        self.copying_s = 0.0
        """Seconds that llama.cpp spent on copies of sequences since ``LlamaCpp.copy`` was last asked."""

    def states(self) -> dict[tuple[int, int], StreamState]:
        """The policy's present state, by cache and stream."""
        inner = self.inner
        if isinstance(inner, UnifiedPolicy):
            return {(0, 0): self._state(inner.arena)}
        assert isinstance(inner, MultiStreamPolicy)
        arenas = inner.arenas
        return {(c, s): self._state(arena) for c, streams in enumerate(arenas) for s, arena in enumerate(streams)}

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Allocate in the policy, and note what ``llama_decode`` should return."""
        if self.context.era == "B" and self.context.settings.show_cells:
            self.before = self.states()
        try:
            batches = self.inner.allocate(step, views=views)
        except OutOfCells:
            self.expected = NO_SLOT
            raise
        except Rejected:
            self.expected = REJECTED
            raise
        self.expected = DONE
        return batches

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Free positions in the policy and in llama.cpp."""
        self.inner.free(seq, start, stop)
        self.context.remove(*self._notify("seq_rm", self._llama_seq(seq), start, _end(stop)))

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Copy a sequence in the policy and in llama.cpp."""
        self.inner.copy(src, dst, start, stop)
        self.context.copy(*self._notify("seq_cp", self._llama_seq(src), self._llama_seq(dst), start, _end(stop)))

    def keep(self, seq: int) -> None:
        """Remove all other sequences in the policy and in llama.cpp."""
        self.inner.keep(seq)
        self.context.keep(*self._notify("seq_keep", self._llama_seq(seq)))

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> None:
        """Shift positions in the policy and in llama.cpp."""
        self.inner.shift(seq, start, stop, delta)
        self.context.shift(*self._notify("seq_add", self._llama_seq(seq), start, _end(stop), delta))

    def export(self, seq: int, host: Cells | None = None) -> Exported | None:
        """Export a sequence from the policy, and have llama.cpp do so (``llama_state_seq_get_data``)."""
        exported = self.inner.export(seq, host)
        if exported is None:
            return None
        began = perf_counter()
        state = self.context.state_of(self._llama_seq(seq))
        self.copying_s += perf_counter() - began
        return exported._replace(state=(exported, state))

    def import_(self, seq: int, exported: Exported, *, upto: int = 0, waits: bool = False) -> tuple[HostCopy, ...]:
        """Import a sequence in the policy and in llama.cpp (``llama_state_seq_set_data``). Raises ``Divergence``."""
        inner, state = exported.state
        n = exported.tokens
        began = perf_counter()
        found = self.context.put(self._llama_seq(seq), state)
        self.copying_s += perf_counter() - began
        if self.context.era == "B":
            self.context.cells()  # What it printed while it searched: not of the next batch.
        try:
            copies = self.inner.import_(seq, inner)
        except OutOfCells:
            if found:
                raise Divergence(f"llama.cpp found {n} cells for a saved sequence, {self.name} none") from None
            self.context.remove(self._llama_seq(seq), 0, -1)
            raise
        if not found:
            raise Divergence(f"{self.name} found {n} cells for a saved sequence, llama.cpp none")
        return copies

    def save_checkpoint(self, seq: int, host: Cells) -> Checkpoint:
        """Save a checkpoint in the policy, and have llama.cpp do so (``llama_state_seq_get_data_ext``)."""
        saved = self.inner.save_checkpoint(seq, host)
        began = perf_counter()
        state = self.context.state_of(self._llama_seq(seq), partial=True)
        self.copying_s += perf_counter() - began
        return saved._replace(state=(saved, state))

    def restore_checkpoint(self, seq: int, checkpoint: Checkpoint) -> tuple[HostCopy, ...]:
        """Restore a checkpoint in both, and free what was placed since. Raises ``Divergence``."""
        inner, state = checkpoint.state
        began = perf_counter()
        found = self.context.put(self._llama_seq(seq), state, partial=True)
        self.copying_s += perf_counter() - began
        if not found:
            raise Divergence(f"{self.name} found cells for a checkpoint, llama.cpp none")
        self.context.cells()  # What it printed while it searched: not of the next batch.
        copies = self.inner.restore_checkpoint(seq, inner)
        self.context.remove(*self._notify("seq_rm", self._llama_seq(seq), checkpoint.last + 1, -1))
        return copies

    def compact(self) -> Moves:
        """One pass of defragmentation in the policy and in llama.cpp; era A."""
        inner = self.inner
        assert isinstance(inner, UnifiedPolicy), "only caches of era A are ever compacted"
        moves = inner.compact()
        # llama.cpp makes one pass, whether or not one was already due.
        inner.wants_compaction = False
        self.context.defragment(*self._notify("defrag"))
        self.context.update(*self._notify("update"))
        return moves

    def llama_seqs(self, chunk: Chunk) -> tuple[int, ...]:
        """llama.cpp's numbers of the sequences that see a chunk."""
        return tuple(self._llama_seq(seq) for seq in chunk.seqs)

    def _llama_seq(self, seq: int) -> int:
        return seq + self.offset if seq >= 0 else seq

    def _notify(self, operation: str, *arguments: int) -> tuple[int, ...]:
        if self.observer is not None:
            self.observer.operation_done(operation, arguments)
        return arguments

    def _state(self, arena: Arena) -> StreamState:
        sets = [tuple(sorted(seq + self.offset for seq in seqs)) for seqs in arena.sets]
        owner = np.array([-1 if not seqs else seqs[0] if len(seqs) == 1 else SHARED for seqs in sets])
        owners = owner[arena.owner]
        shared = {cell: sets[arena.owner[cell]] for cell in np.flatnonzero(owners == SHARED).tolist()}
        return StreamState(arena.head, arena.used, arena.free.largest, arena.position.copy(), owners, shared)


class LlamaCpp(SequenceTokens):
    """The backend: each step is one timed ``llama_decode``.

    The time of a step is divided among its micro-batches by their tokens. Prompts are made up as in our own engine;
    the next token is the most likely one, and finding it counts towards the step's time.
    """

    wants_views = False

    def __init__(self, policy: MirroredPolicy, seed: int):
        super().__init__(policy.context.model.vocabulary, seed)
        self.policy = policy
        self.context = policy.context
        self.compared = ComparisonCounts()
        self.checks = True
        """Whether shown cells are compared with the policy's; a difference raises ``Divergence``."""

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """Run the step and return the seconds of each micro-batch. Raises ``Divergence``."""
        policy, context = self.policy, self.context
        rows: list[BatchRow] = []
        last: dict[tuple[int, int], int] = {}
        """Last row of each chunk that reaches its sequence's end, by sequence and end position."""
        for chunk in step:
            seqs, ends = policy.llama_seqs(chunk), self.reaches_end(chunk)
            at = chunk.start + chunk.n
            rows += [
                (token, position, ends and position == at - 1, seqs)
                for position, token in enumerate(self.chunk_tokens(chunk), chunk.start)
            ]
            if ends:
                last[chunk.seq, at] = len(rows) - 1
        if policy.observer is not None and context.era == "A":
            policy.observer.cells_shown(context.cells())
        returned, seconds = context.decode(rows)
        seconds += self._append_best_tokens(batches, last)
        self._observe_cells(step, returned)
        if returned != policy.expected:
            raise Divergence(
                f"llama_decode of {len(rows)} tokens returned {returned}, {policy.name} expects {policy.expected}"
            )
        total = sum(batch.n_tokens for batch in batches)
        return [seconds * batch.n_tokens / total for batch in batches]

    def move(self, moves: Moves) -> float:
        """Raise ``Divergence``: policies that describe llama.cpp never move cells by themselves."""
        raise Divergence(f"{self.policy.name} moves {moves.n_cells} cells, which llama.cpp does not do")

    def transfer(self, transfers: Sequence[Transfer]) -> float:
        """Raise ``Divergence``: llama.cpp has no host tier for single cells."""
        raise Divergence(f"{self.policy.name} copies cells to or from a host tier, which llama.cpp does not have")

    def copy(self, copies: Sequence[HostCopy]) -> float:
        """The seconds that llama.cpp spent when the policy was asked for the copies."""
        seconds, self.policy.copying_s = self.policy.copying_s, 0.0
        return seconds

    def _append_best_tokens(self, batches: Sequence[MicroBatch], last: dict[tuple[int, int], int]) -> float:
        """Append the next token to each sequence that has one; return the seconds spent finding them."""
        began = perf_counter()
        found = [
            (chunk, self.context.best(last[chunk.seq, chunk.start + chunk.n]) or 0)
            for batch in batches
            for chunk in batch.chunks
            if (chunk.seq, chunk.start + chunk.n) in last
        ]
        seconds = perf_counter() - began
        for chunk, best in found:
            self.append_token(chunk, best)
        return seconds

    def _observe_cells(self, step: Sequence[Chunk], returned: int) -> None:
        observer, context = self.policy.observer, self.context
        era_b = context.era == "B"
        shown = context.cells() if not era_b or context.settings.show_cells else []
        if observer is not None:
            if era_b:
                observer.cells_shown(shown)
            batch = [[list(self.policy.llama_seqs(chunk)), chunk.start, chunk.n] for chunk in step]
            observer.operation_done("decode", batch, returned)
            if not era_b:
                observer.cells_shown(shown)
        if era_b and context.settings.show_cells and returned == DONE and not shown:
            raise Divergence(f"{context.library.name} shows none of its cells, or not as it did when this was written")
        if self.checks and shown:
            self._compare(shown, self.policy.before if era_b else self.policy.states())

    def finish(self) -> None:
        """Era B with ``show_cells``: compare the final cells, shown by one more batch of one token in each stream.

        The context cannot be used afterwards.
        """
        context, policy = self.context, self.policy
        if context.era == "A" or not context.settings.show_cells:
            return
        streams = 1 if context.settings.unified else context.settings.sequences
        states = policy.states()
        shown: list[StreamCells] = []
        for stream in range(streams):
            seq = stream + policy.offset
            context.decode([(0, context.last_position(seq) + 1, True, (seq,))])
            shown += context.cells()
        if policy.observer is not None:
            policy.observer.cells_shown(shown)
        if self.checks:
            self._compare(shown, states)

    def _compare(self, shown: Sequence[StreamCells], ours: dict[tuple[int, int], StreamState]) -> None:
        for cells in shown:
            state = ours[cells.cache, cells.stream]
            differing = _difference(cells, state)
            if differing is not None:
                raise Divergence(
                    f"cache {cells.cache}, stream {cells.stream}, step {self.compared.steps + 1}: {differing}"
                )
        self.compared.streams += len(shown)
        self.compared.steps += bool(shown)


def _difference(cells: StreamCells, state: StreamState) -> str | None:
    """The first difference between llama.cpp's cells and the policy's; None if they agree."""
    counts = (
        ("head", cells.head, state.head),
        ("used", cells.used, state.used),
        ("largest", cells.largest, state.largest),
    )
    for name, theirs, ours in counts:
        if theirs is not None and theirs != ours:
            return f"{name} is {theirs} in llama.cpp, {ours} in the policy"
    for name, there, here in (("position", cells.position, state.position), ("owner", cells.owner, state.owner)):
        differ = np.flatnonzero(there != here)
        if len(differ):
            cell = int(differ[0])
            both = f"is {there[cell]} in llama.cpp, {here[cell]} in the policy"
            return f"{len(differ)} cells differ; the {name} in cell {cell} {both}"
    if cells.shared is not None and cells.shared != state.shared:
        return "a cell is seen by other sequences"
    return None


def _end(stop: int | None) -> int:
    return -1 if stop is None else stop


def context_settings(
    policy: Policy, settings: ContextSettings, era: Era
) -> tuple[UnifiedPolicy | MultiStreamPolicy, ContextSettings, int]:
    """The policy, settings that give llama.cpp an equal cache, and the offset of its sequence numbers.

    ``settings`` supplies what the policy does not determine. Raises ``UserError`` if llama.cpp has no such cache.
    """
    if policy.name not in POLICIES[era] or not isinstance(policy, UnifiedPolicy | MultiStreamPolicy):
        raise UserError(
            f"llama.cpp hands out its cells itself; this version does it as {' or '.join(POLICIES[era])}, "
            f"not as {policy.name}"
        )
    if policy.kernel not in ("masked", "tiled"):
        raise UserError(f"llama.cpp has no kernel {policy.kernel!r}; masked and tiled (flash attention) are accepted")
    streams = policy.n_streams if isinstance(policy, MultiStreamPolicy) else 1
    windows = isinstance(policy, MultiStreamPolicy) and len(policy.caches) > 1
    settings = replace(settings, cells=policy.capacity, unified=streams == 1, flash_attention=policy.kernel == "tiled")
    offset = 0
    if settings.show_cells and streams == 1:
        offset = sequence_offset(settings.sequences, era)
        if offset and windows:
            raise UserError("a cache with a window can be looked at with 10 slots at most, as llama.cpp prints it")
    return policy, replace(settings, sequences=settings.sequences + offset), offset


def mirrored_backend(model: LlamaModel, policy: Policy, settings: ContextSettings, seed: int) -> LlamaCpp:
    """A llama.cpp backend, to be driven with its own ``backend.policy``. Raises ``UserError``."""
    own, settings, offset = context_settings(policy, settings, model.library.era)
    context = Context(model, settings)
    made = tuple(spec.size for spec in own.caches) if isinstance(own, MultiStreamPolicy) else (own.capacity,)
    if context.sizes != made:
        context.close()
        raise UserError(
            f"{model.path.name}: llama.cpp makes caches of {' and '.join(map(str, context.sizes))} cells, "
            f"policy {own.name} of {' and '.join(map(str, made))}"
        )
    return LlamaCpp(MirroredPolicy(own, context, offset), seed)
