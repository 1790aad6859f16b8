"""What each request's seconds were spent on: every second has exactly one cause.

While a request has a slot, it waits for every forward pass, whichever requests' tokens are in it. A pass costs what the
terms of its price say (``kvsim/costs/pass_price.py``), and each term is put down to a cause:

- ``queueing``: from the arrival to the slot, as long as all slots were taken;
- ``cells``: passes that were run meanwhile although a slot was free, since the scheduler found no cells for the request
  or for one before it;
- ``steps``: passes that were run meanwhile although a slot was free and no cells were wanting: the step during which
  the request came, one that had been composed by then, or one whose budget of tokens was used up;
- ``own``: the base of a pass that has tokens of the request, and what these would cost in it alone;
- ``batch``: all that the tokens of other requests add to that, apart from attention; passes without tokens of its own;
- ``context``: attention over cells that the token's sequence can see, of all tokens in the pass;
- ``holes``: over all other cells that were scanned: those of other sequences, free ones, padding; where cells do not
  come in blocks, also the further runs that a sequence's cells lie in;
- ``compaction``: moves and rotations, before a pass or in idle time that the request arrived in;
- ``failures``: the base of passes that there would not be if a batch had not been cut for want of room; from a
  preemption to the next slot, and what was computed once more after it;
- ``prefix``: prompt tokens computed although an earlier request had computed the same beginning;
- ``transfers``: copies to and from the host tier, and waiting for them, in a slot or before;
- ``mapping``: mapping pages of virtual memory before a pass;
- ``drafting``: passes of a drafter, and what the drafted tokens of all requests add to the model's passes, apart from
  attention.

Tokens that are computed once more, or might have been found, are charged the difference that they make to the pass;
if a pass has no other tokens of the request, they are charged all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvsim.costs.cost_model import CostModel
from kvsim.costs.pass_price import RegimePrice
from kvsim.costs.tables import FloatArray
from kvsim.simulation.job import Job
from kvsim.simulation.run_tables import Rows, Table
from policies import Chunk, Policy
from policies.placement.rule import PassReads

CAUSES = (
    *("queueing", "cells", "steps", "own", "batch", "context", "holes"),
    *("compaction", "failures", "prefix", "transfers", "mapping", "drafting"),
)
"""Causes, in the order of the columns of ``TimeBreakdown.table``, where each ends in ``_s``."""

SECONDS = [f"{cause}_s" for cause in CAUSES]
"""Names of these columns."""

TERMS = ("fixed_s", "matrix_s", "useful_s", "holes_s", "moves_s", "transfers_s", "mapping_s")
"""Terms of a pass: its base and its chunks; matrix work; attention over cells that are seen, and over others; moves and
rotations; copies to and from the host tier; mapping pages of virtual memory."""

_WAITS = ("queueing", "cells", "steps")
"""The causes that are not of a pass with the request in a slot."""
_OWN, _BATCH, _CONTEXT, _HOLES, _COMPACTION, _FAILURES, _PREFIX, _TRANSFERS = range(8)
_DRAFTING = 9
_BLOCK = 16
"""Tokens in a block of text by which shared prefixes are recognised, where cells do not come in blocks."""


@dataclass(slots=True)
class _Watch:
    """A request some of whose next tokens are charged to a cause other than ``own``."""

    job: Job
    stop: int
    """Position up to which tokens are charged to the cause."""
    cause: int
    prompt_tokens: int
    """Tokens of the prompt that the request started with, which the server may have cut."""


class TimeBreakdown:
    """Splits the price of passes by cause, and keeps an account for each slot; all times in seconds."""

    def __init__(self, costs: CostModel, policy: Policy, slots: int, n_ubatch: int):
        """``slots``: number of slots; ``n_ubatch``: the most tokens in a pass."""
        self._costs = costs
        self._price = costs.pass_price(policy.kernel, policy.groups)
        self._groups = policy.groups
        self._n_ubatch = n_ubatch
        self._block = policy.block_size if policy.block_size > 1 else _BLOCK
        self._pieces_are_holes = policy.block_size == 1
        self._spent = np.zeros((slots, len(CAUSES) - len(_WAITS)))
        """Seconds by cause since the slot's request started; shape (slots, causes). Meaningless for an empty slot."""
        self._pass = np.zeros_like(self._spent)
        self._watched: dict[int, _Watch] = {}
        self._slots = slots
        self.short_of_cells = False
        """Whether the next request in the queue, if there is one, was not admitted for want of cells."""
        self._by_slot: dict[int, Job] = {}
        """The job in each slot that is taken."""
        self._waits_s = np.zeros(len(_WAITS))
        """Seconds so far in which waiting requests waited for each of ``_WAITS``."""
        self._wait = _WAITS.index("steps")
        """What they waited for in the last pass."""
        self._waiting: dict[int, tuple[int, FloatArray]] = {}
        """Values of ``_wait`` and ``_waits_s`` when each waiting request arrived."""
        self._waited: dict[int, tuple[int, FloatArray]] = {}
        """Of each request with a slot, what the step in which it arrived made it wait for, and the seconds by
        ``_WAITS`` that passed after that step."""
        self._at_load: dict[int, FloatArray] = {}
        """Value of ``_waits_s`` when each request that waits for its first chunks began to."""
        self._loading_s: dict[int, float] = {}
        """Seconds that requests waited for these."""
        self._seen: set[int] = set()
        """Keys of blocks of text that have been computed."""
        self._kept: dict[int, FloatArray] = {}
        """Account of each request that is preempted."""
        self._cut = self._allowed = 0
        """Tokens left of a batch that was cut, and the number of passes that they would have taken in any case."""
        self._waited_s = 0.0
        """Seconds of copies, and of waiting for them, since the last pass."""
        self._idle_until = 0.0
        self._beside_idle: dict[int, float] = {}
        self._terms = Rows({**dict.fromkeys(TERMS, float), "cut": int, "waited_s": float})
        self._rows: list[tuple[float, ...]] = []

    def forward(self, work: PassReads) -> None:
        """A forward pass has been run."""
        n, chunks, now = work.tokens, work.chunks, self._pass
        price, extra = self._price.regime_of(work), self._count_off(n)
        useful, holes = self._price.attention_of(work, runs_are_holes=self._pieces_are_holes)
        moves = transfers = mapping = 0.0
        for reads, group in zip(work.groups, self._groups, strict=True):
            if reads.prepares:
                before = self._costs.before_pass(reads, group)
                moves += before.moves_s
                moves += before.shift_s
                transfers += before.transfers_s
                mapping += before.mapping_s
        matrix, first_s = price.matrix_s(n), price.chunks_s(1)
        pieces = price.chunks_s(chunks, price.drafts_in(work))
        waited_s, self._waited_s = self._waited_s, 0.0
        base_s = price.base_s + price.waits_s(price.base_s + pieces + matrix + useful + holes)
        self._terms.add((base_s + pieces, matrix, useful, holes, moves, transfers, mapping, extra, waited_s))
        self._wait = 0 if len(self._by_slot) >= self._slots else 1 if self.short_of_cells else 2
        self._waits_s[self._wait] += base_s + pieces + matrix + useful + holes + moves + transfers + mapping
        base = 0.0 if extra else base_s
        all_but_attention, checking = base + matrix + pieces, 0.0
        if drafts := price.drafts_in(work):
            undrafted = base + price.matrix_s(n - drafts) + price.chunks_s(chunks)
            all_but_attention, checking = min(undrafted, all_but_attention), max(all_but_attention - undrafted, 0.0)
        now[:] = (0.0, all_but_attention, useful, holes, moves, base_s - base, 0.0, transfers, mapping, checking)
        placed = [*work.beside, *[Chunk(row.seq, row.length - row.n, row.n) for row in work.rows]]
        ones = [chunk.seq for chunk in placed if chunk.n == 1]
        # A few tokens more can take less time, where a device cuts its work into tiles.
        now[ones, _OWN] = one = min(base + price.matrix_s(1) + first_s, all_but_attention)
        now[ones, _BATCH] = all_but_attention - one
        for seq, start, tokens, _ in placed:
            if tokens > 1:
                now[seq, _OWN] = own = min(base + price.matrix_s(tokens) + first_s, all_but_attention)
                now[seq, _BATCH] = all_but_attention - own
            if seq in self._watched:
                self._look(self._watched[seq], now[seq], start, tokens, price)
        self._spent += now

    def waited(self, seconds: float) -> None:
        """A step waited for copies, or for copies that were on their way."""
        self._spent[:, _TRANSFERS] += seconds
        self._waited_s += seconds
        self._waits_s[self._wait] += seconds

    def drafted(self, seconds: float) -> None:
        """The drafter ran beside the last pass."""
        self._spent[:, _DRAFTING] += seconds
        self._waits_s[self._wait] += seconds

    def idled(self, start_s: float, seconds: float) -> None:
        """Cells were moved while there was nothing else to do."""
        self._idle_until = start_s + seconds

    def arrived(self, job: Job) -> None:
        """The server has taken a request in."""
        self._waiting[job.request.id] = self._wait, self._waits_s.copy()
        if job.arrival_s < self._idle_until:
            self._beside_idle[job.request.id] = self._idle_until - job.arrival_s

    def loading(self, job: Job) -> None:
        """A request waits for chunks from host memory from now on, and for nothing else."""
        if job.request.id in self._waiting:
            self._at_load[job.request.id] = self._waits_s.copy()

    def loaded(self, job: Job, seconds: float) -> None:
        """A request has waited so long for chunks; after a preemption that is part of what the preemption cost."""
        at_load = self._at_load.pop(job.request.id, None)
        if at_load is not None and job.request.id in self._waiting:
            first, before = self._waiting[job.request.id]
            self._waiting[job.request.id] = first, before + self._waits_s - at_load
            self._loading_s[job.request.id] = seconds

    def begun(self, job: Job, held: int) -> None:
        """A request was given a slot; ``held`` of its tokens are in the cache already."""
        self._watched.pop(job.slot, None)
        self._by_slot[job.slot] = job
        if job.request.id in self._waiting:
            first, before = self._waiting.pop(job.request.id)
            self._waited[job.request.id] = first, self._waits_s - before
        prompt = job.request.prompt_tokens - job.discarded
        if job.preemptions:
            self._spent[job.slot] = self._kept.pop(job.request.id)
            self._watched[job.slot] = _Watch(job, job.furthest, _FAILURES, prompt)
            return
        self._spent[job.slot] = 0.0
        if job.request.content:
            # The last token is always computed: what it says comes out of it.
            known = min(self._known(job, prompt), prompt - 1)
            self._watched[job.slot] = _Watch(job, max(known, held), _PREFIX, prompt)

    def _known(self, job: Job, prompt: int) -> int:
        """Number of tokens at the beginning of the prompt that were computed before, in whole blocks."""
        keys = job.content.keys(self._block, prompt // self._block)
        return self._block * next((i for i, key in enumerate(keys) if key not in self._seen), len(keys))

    def _look(self, watch: _Watch, row: FloatArray, start: int, tokens: int, price: RegimePrice) -> None:
        """Charge the tokens of a pass that come before the watched position to their cause."""
        undue = min(max(watch.stop - start, 0), tokens)
        if undue == tokens:
            seconds = float(row.sum())
            row[:] = 0.0
            row[watch.cause] = seconds
        elif undue:
            seconds = price.matrix_s(tokens) - price.matrix_s(tokens - undue)
            row[_OWN] -= seconds
            row[watch.cause] += seconds
        job = watch.job
        if start + tokens >= max(watch.stop, watch.prompt_tokens):
            self._remember(job, start + tokens)
            del self._watched[job.slot]

    def _remember(self, job: Job, tokens: int) -> None:
        if job.request.content:
            self._seen.update(job.content.keys(self._block, tokens // self._block))

    def _count_off(self, n: int) -> bool:
        """Whether a pass of ``n`` tokens is run only because a batch was cut."""
        if not self._cut:
            return False
        self._cut = max(self._cut - n, 0)
        self._allowed -= 1
        return self._allowed < 0

    def cut(self, tokens: int) -> None:
        """A batch found no room and will be tried in parts; ``tokens`` of it are still to be run."""
        if not self._cut:
            self._cut, self._allowed = tokens, -(-tokens // self._n_ubatch)

    def preempted(self, job: Job) -> None:
        """A request has given up its slot."""
        self._by_slot.pop(job.slot, None)
        self._kept[job.request.id] = self._spent[job.slot].copy()

    def finish(self, job: Job) -> None:
        """A request has ended, well or not."""
        number = job.request.id
        beside_idle, loading_s = self._beside_idle.pop(number, 0.0), self._loading_s.pop(number, 0.0)
        first, waits = self._waited.pop(number, (0, np.zeros(len(_WAITS))))
        self._waiting.pop(number, None)
        if self._by_slot.get(job.slot) is job:
            del self._by_slot[job.slot]
        if job.status != "completed":
            self._cut = 0
            self._kept.pop(number, None)
            return
        self._remember(job, job.computed)
        spent, waited = self._spent[job.slot].copy(), job.started_s - job.arrival_s
        spent[_COMPACTION] += beside_idle
        if job.preemptions:
            spent[_FAILURES] += job.finished_s - job.arrival_s - waited - (float(spent.sum()) - beside_idle)
        spent[_TRANSFERS] += loading_s
        e2e = job.finished_s - job.arrival_s
        queued = max(waited - beside_idle - loading_s, 0.0)
        rest, whole = queued - float(waits.sum()), float(waits.sum())
        if abs(rest) <= 1e-9 * e2e or rest < 0:  # Sums of passes may stray from the clock in the last digits.
            waits = waits * (queued / whole) if whole else waits
            rest = 0.0 if whole else queued
        waits[first] += rest
        self._rows.append((number, job.arrival_s, e2e, *waits.tolist(), *spent.tolist()))

    def table(self) -> Table:
        """One row for each completed request, in order of its number: id, arrival_s, e2e_s, and the seconds of each of
        ``CAUSES``, which make up e2e_s."""
        names = ["id", "arrival_s", "e2e_s", *SECONDS]
        rows = np.array(self._rows, dtype=float).reshape(-1, len(names))
        columns = dict(zip(names, rows.T, strict=True))
        return Table({**columns, "id": columns["id"].astype(int)}).sorted_by("id")

    def terms(self) -> Table:
        """One row for each forward pass: ``TERMS``, ``cut``, whether it was run only because a batch was cut (0 or 1),
        and ``waited_s``, seconds of copies, and of waiting for them, before it."""
        return self._terms.table()
