"""Replay recorded calls of vLLM's ``KVCacheManager`` on the paged policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvsim.engines.recordings.recording_files import Record
from kvsim.engines.recordings.replay import Replay, State
from kvsim.engines.recordings.vllm_blocks import COMMON, UNBOUNDED, PolicyStates, VllmCache, recorded_state
from policies import Chunk, Content, SequencePlan
from policies.layouts.paged import PagedPolicy


class ManagerReplay(Replay):
    """Performs calls of ``KVCacheManager`` on the paged policy."""

    def __init__(self, header: Record):
        self.era = f"{header['vllm']}, manager"
        self._policy = VllmCache.of(header, UNBOUNDED).build(PagedPolicy)
        self._states = PolicyStates(self._policy.pool, self._policy.block_size)
        self._contents: dict[str, Content] = {}
        self._prompts: dict[str, int] = {}
        self._seqs: dict[str, int] = {}

    def perform(self, record: Record) -> tuple[State, State]:
        """Perform one call."""
        operations: dict[str, Callable[[Record], State]] = {
            "add": self._add,
            "append": self._append,
            "lookup": self._lookup,
            "alloc": self._alloc,
            "free": self._free,
            "preempt": self._free,
            "reset": lambda _: {"ok": self._policy.pool.forget_all()},
            "evict": self._evict,
        }
        if record["op"] not in operations:
            raise ValueError(f"operation {record['op']!r} is unknown; accepted: {', '.join(operations)}")
        found = operations[record["op"]](record)
        return recorded_state(record, tuple(found)), found | self._states.after(record)

    def operation(self, record: Record) -> dict[str, Any]:
        """The call and its arguments."""
        left_out = {"out", "tbl", "hit", "blocks", "i", "ev", *COMMON} - ({"hit"} if record["op"] == "alloc" else set())
        return {key: value for key, value in record.items() if key not in left_out}

    def _add(self, record: Record) -> State:
        content = self._contents[record["r"]] = Content()
        self._seqs[record["r"]] = len(self._seqs)
        for piece in record["prompt"]:
            self._states.extend(content, piece)
        self._prompts[record["r"]] = content.n
        return {}

    def _append(self, record: Record) -> State:
        self._states.extend(self._contents[record["r"]], record["seg"])
        return {}

    def _lookup(self, record: Record) -> State:
        seq, content = self._seqs[record["r"]], self._contents[record["r"]]
        hit = self._policy.match(seq, content, content.n)
        return {"hit": hit, "blocks": self._policy.admission.found(seq)}

    def _alloc(self, record: Record) -> State:
        seq, content = self._seqs[record["r"]], self._contents[record["r"]]
        policy = self._policy
        if record["first"]:
            policy.open(seq, SequencePlan(self._prompts[record["r"]], UNBOUNDED, UNBOUNDED, content))
        # After a look-up that disagreed, continue with the blocks that our own look-up found.
        hit = len(policy.admission.found(seq)) * policy.block_size if record["first"] and record["hit"] else 0
        held = hit // policy.block_size if record["first"] else len(policy.tables[seq].blocks)
        chunk = Chunk(seq, record["nct"] + hit, record["new"])
        done = policy.reserve(
            chunk,
            whole=content.n if record["ff"] else 0,
            waits=record["hs"] and not record["stt"],
            lookahead=record["look"],
            in_flight=record["infl"],
        )
        if done:
            policy.allocate([chunk])
        table = list(policy.tables[seq].blocks)
        return {"out": table[held:] if done else None, "tbl": table}

    def _free(self, record: Record) -> State:
        self._policy.free(self._seqs[record["r"]])
        return {}

    def _evict(self, record: Record) -> State:
        for block in record["ids"]:
            self._policy.pool.forget(block)
        return {}
