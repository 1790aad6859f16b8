"""What a server has done, in numbers that add up over servers; each class has the counts of one key of a summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from policies import Transfer
from policies.compiled import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Sums:
    """Numbers, and groups of them, that add up over servers field by field."""

    def add(self, other: Self) -> None:
        """Count what another server has done as well."""
        for name, theirs in other.by_name().items():
            mine = getattr(self, name)
            if isinstance(mine, Sums):
                mine.add(theirs)
            else:
                setattr(self, name, mine + theirs)

    def by_name(self) -> dict[str, Any]:
        """The fields."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]

    def to_dict(self, cell_bytes: float) -> dict[str, Any]:
        """The numbers, ready for JSON; ``cell_bytes``: bytes of K and V in one cell, all layers."""
        items = self.by_name().items()
        return {name: value.to_dict(cell_bytes) if isinstance(value, Sums) else value for name, value in items}


@dataclass
class CacheCounts(Sums):
    """What happened in the cache."""

    failed_allocations: int = 0
    batch_splits: int = 0
    compactions: int = 0
    move_runs: int = 0
    moved_cells: int = 0
    mapped_pages: int = 0
    """Pages of virtual memory that passes waited for."""
    scores: int = 0
    """Scores computed by attention, in the first cache group."""
    useful_scores: int = 0
    """Scores against a cell that the token's sequence can see."""

    def to_dict(self, cell_bytes: float) -> dict[str, Any]:
        """The counts; of scores, the useful share."""
        found = super().to_dict(cell_bytes)
        scores, useful = found.pop("scores"), found.pop("useful_scores")
        useful_share = useful / scores if scores else None
        return {"scored_useful": useful_share, **found, "moved_bytes": int(self.moved_cells * cell_bytes)}


@dataclass
class PrefixCounts(Sums):
    """Tokens of sequences when they first started."""

    tokens: int = 0
    found: int = 0
    """Tokens among them that were in the cache already."""


@dataclass
class TierCounts(Sums):
    """Cells that were copied to a slower memory and back."""

    cells_out: int = 0
    cells_in: int = 0

    def copied(self, cells: int, out: bool) -> None:
        """So many cells were copied out, or in."""
        if out:
            self.cells_out += cells
        else:
            self.cells_in += cells

    def to_dict(self, cell_bytes: float) -> dict[str, Any]:
        """The bytes, and the tokens that came back."""
        out, back = int(self.cells_out * cell_bytes), int(self.cells_in * cell_bytes)
        return {"bytes_out": out, "bytes_in": back, "tokens": self.cells_in}


@dataclass
class ChunkCounts(Sums):
    """Chunks that were copied to host memory and back beside the steps, or read from other servers."""

    servers: int = 0
    """Servers that keep chunks in host memory."""
    loads: int = 0
    """Times that a request waited for chunks to be loaded."""
    tokens: int = 0
    """Tokens that were found in them."""
    load_wait_s: float = 0.0
    """Seconds that the requests waited for them, summed up."""
    store_wait_s: float = 0.0
    """Seconds that steps waited until blocks had been stored that were given to others."""
    lookup_wait_s: float = 0.0
    """Seconds that requests were looked up again, before it was known what can be loaded of them."""

    def add(self, other: Self) -> None:
        """Count what another server has loaded from host memory, but not what it has read from others."""
        if other.servers:
            super().add(other)


@dataclass
class HostCounts(TierCounts):
    """What was copied to host memory and back, and what waited for it."""

    cells_prefetched: int = 0
    prefetch_wait_s: float = 0.0
    """Seconds that steps waited for prefetches under way."""
    saves: int = 0
    """Whole sequences that were copied to the host."""
    loads: int = 0
    """Whole sequences that were copied back."""
    copy_s: float = 0.0
    """Seconds that the server spent on these copies."""
    chunks: ChunkCounts = field(default_factory=ChunkCounts)

    def transferred(self, transfers: Sequence[Transfer], *, ahead: bool = False) -> None:
        """Copies between cache and host memory have been carried out; ``ahead`` of their use, or for a step."""
        for transfer in transfers:
            self.cells_prefetched += transfer.n if ahead and not transfer.to_host else 0
            self.copied(transfer.n, transfer.to_host)

    def to_dict(self, cell_bytes: float) -> dict[str, Any]:
        """The bytes, the copies of whole sequences, and those of chunks."""
        chunks = self.chunks.to_dict(cell_bytes)
        return {
            "bytes_out": int(self.cells_out * cell_bytes),
            "bytes_in": int(self.cells_in * cell_bytes),
            "bytes_prefetched": int(self.cells_prefetched * cell_bytes),
            "prefetch_wait_s": self.prefetch_wait_s,
            "chunk_loads": self.chunks.loads if self.chunks.servers else None,
            "chunk_tokens": self.chunks.tokens,
            **{name: chunks[name] for name in ("load_wait_s", "store_wait_s", "lookup_wait_s")},
            "saves": self.saves,
            "loads": self.loads,
            "copy_s": self.copy_s,
        }


@dataclass
class DraftCounts(Sums):
    """Drafts that were checked."""

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafting_s: float = 0.0
    """Seconds of the drafter's passes."""

    def verified(self, drafted: int, accepted: int) -> None:
        """A draft of so many tokens was checked, of which some were accepted."""
        self.drafts += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted

    def to_dict(self, cell_bytes: float) -> dict[str, Any]:
        """The counts, and what follows from them."""
        found = super().to_dict(cell_bytes)
        found["wasted_tokens"] = self.drafted_tokens - self.accepted_tokens
        found["tokens_per_draft"] = 1 + self.accepted_tokens / self.drafts if self.drafts else None
        found["drafting_s"] = found.pop("drafting_s")  # At the end.
        return found


@dataclass
class CheckpointCounts(Sums):
    """Context checkpoints."""

    made: int = 0
    restored: int = 0
    """Prompts that went on from a checkpoint."""
    lost_tokens: int = 0
    """Tokens that slots held of their prompts, and that were computed again since no checkpoint was near enough."""
    spared_tokens: int = 0
    """Tokens among them that a checkpoint at a message of a user would have spared."""

    def sought(self, held: int, found: int, message: int) -> None:
        """A checkpoint lets a slot use ``found`` of ``held`` tokens that it had of its prompt; 0 if there is none.

        ``message``: tokens before the last message of a user that begins within ``held``.
        """
        self.restored += found > 0
        self.lost_tokens += held - found
        self.spared_tokens += max(message - found, 0)


@dataclass
class Counts(Sums):
    """All counts of a server, by key of the summary."""

    cache: CacheCounts = field(default_factory=CacheCounts)
    context_shifts: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens computed once more because a preemption had discarded them."""
    prefix: PrefixCounts = field(default_factory=PrefixCounts)
    host: HostCounts = field(default_factory=HostCounts)
    disk: TierCounts = field(default_factory=TierCounts)
    speculation: DraftCounts = field(default_factory=DraftCounts)
    checkpoints: CheckpointCounts = field(default_factory=CheckpointCounts)
    forward_passes: int = 0
