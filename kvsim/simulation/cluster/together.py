"""What several servers recorded, as if they were one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvsim.simulation.cache_states import CacheStates
from kvsim.simulation.run_tables import SHARES, STATES, KeptStates, Table, Tables

Values = TypeVar("Values", float, NDArray[np.float64])


def _combined(state: str, values: Sequence[Values], shares: Sequence[float]) -> Values:
    """A field of the state of all caches from that of each; ``shares``: of all cells that each has.

    Cells and extents add up, the largest extent is that of the server with the largest, and shares are means by cells.
    """
    if state in SHARES:
        return reduce(add, [share * value for share, value in zip(shares, values, strict=True)])
    return reduce(np.maximum if state.startswith("largest") else add, values)


def states_together(servers: Sequence[CacheStates]) -> dict[str, float | None]:
    """Means over time of the states of all caches (see ``_combined``); None where no server has any."""
    cells = sum(states.capacity for states in servers) or 1
    known = [(states.capacity / cells, means) for states in servers if _is_known(means := states.means())]
    if not known:
        return servers[0].means()
    shares = [share for share, _ in known]
    return {
        name: float(_combined(name.removesuffix("_mean"), [means[name] or 0.0 for _, means in known], shares))
        for name in known[0][1]
    }


def _is_known(means: Mapping[str, float | None]) -> bool:
    """Whether a server has had a request, so that there are means of its cache."""
    return means["utilization_mean"] is not None


def waits_beside_free(waits: Sequence[tuple[int, float, float]], servers: int) -> tuple[float, float | None]:
    """Seconds that requests waited for their server, in all, and the share of these in which another server had no
    request waiting; None where none waited.

    ``waits``: of each request its server, its arrival and its start, seconds.
    """
    taken, begins, ends = np.array(waits, dtype=np.float64).reshape(-1, 3).T
    total = float((ends - begins).sum())
    if total <= 0:
        return 0.0, None
    changes = list[tuple[NDArray[np.float64], int]]()
    for server in range(servers):
        own = taken == server
        order = np.argsort(begins[own], kind="stable")
        first, last = begins[own][order], np.maximum.accumulate(ends[own][order])
        # A stretch in which requests wait begins where all that came before have started.
        fresh = np.append(True, first[1:] > last[:-1])[: len(first)]
        changes += [(first[fresh], 1), (last[np.append(fresh[1:], True)[: len(last)]], -1)]
    times = np.concatenate([at for at, _ in changes])
    steps = np.concatenate([np.full(len(at), step) for at, step in changes])
    order = np.argsort(times, kind="stable")
    times, with_queue = times[order], np.cumsum(steps[order])
    passed = np.append(0.0, np.cumsum(np.diff(times) * (with_queue[:-1] < servers)))
    return total, float((np.interp(ends, times, passed) - np.interp(begins, times, passed)).sum()) / total


def tables_together(servers: Sequence[Tables | None], roles: Sequence[str]) -> Tables | None:
    """The rows of all servers, with the number of the server in a column ``server``; None where none are kept.

    Of a request that two servers had, one after the other, the requests have the row of the last, and what its seconds
    were spent on is the sum of both.
    """
    tables = [each for each in servers if each is not None]
    if not tables:
        return None
    states = _kept_together([each.states for each in tables])
    answering = [
        each.requests[each.requests.columns["status"] != "completed"] if role == "prefill" else each.requests
        for each, role in zip(tables, roles, strict=True)
    ]
    requests = _joined(answering, "id")
    assert requests is not None
    causes = _joined([each.causes for each in tables], "id", "arrival_s")
    return Tables(
        requests,
        states,
        None if tables[0].cache is None else states.table(),
        _joined([each.passes for each in tables], "start_s", "server"),
        causes if causes is None or "prefill" not in roles else _summed(causes, requests),
    )


def _summed(causes: Table, requests: Table) -> Table:
    """One row for each completed request, with the sums of its rows; ``causes``: in order of requests and of time."""
    completed = requests.columns["id"][requests.columns["status"] == "completed"]
    kept = causes[np.isin(causes.columns["id"], completed)]
    ids, first = np.unique(kept.columns["id"], return_index=True)
    last = np.append(first[1:], len(kept)) - 1
    sums = {
        name: column[first]
        if name == "arrival_s"
        else column[last]
        if name == "server"
        else np.add.reduceat(column, first)
        for name, column in kept.columns.items()
        if len(kept)
    }
    return Table({**kept.columns, **sums, "id": ids})


def _joined(tables: Sequence[Table | None], *order: str) -> Table | None:
    """Rows of all tables, in order of some columns; None where they were not kept."""
    kept = [table for table in tables if table is not None]
    if not kept:
        return None
    columns = {name: np.concatenate([table.columns[name] for table in kept]) for name in kept[0].columns}
    columns["server"] = np.repeat(np.arange(len(kept)), [len(table) for table in kept])
    return Table(columns).sorted_by(*order)


def _kept_together(servers: Sequence[KeptStates]) -> KeptStates:
    """The states of all caches at each time at which one of them changes (see ``_combined``)."""
    changes = np.unique(np.concatenate([each.rows[:, 0] for each in servers]))
    capacity, rows = sum(each.capacity for each in servers), list[NDArray[np.float64]]()
    for each in servers:
        # Of several states that begin at one time, the last holds.
        at = np.searchsorted(each.rows[:, 0], changes, side="right") - 1
        rows.append(np.where((at >= 0)[:, None], each.rows[np.maximum(at, 0)], 0.0))
    shares = [each.capacity / capacity for each in servers]
    fields = [_combined(name, [row[:, column] for row in rows], shares) for column, name in enumerate(STATES, 1)]
    return KeptStates(np.column_stack([changes, *fields]), capacity)
