"""Many small jobs at once: in this process, in others, or on a dask cluster; the results are the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import joblib
from threadpoolctl import ThreadpoolController

from kvsim.errors import UserError

Job = TypeVar("Job")
Done = TypeVar("Done")

_CONNECT_S = 10
"""Seconds in which a dask scheduler must answer."""


def usable() -> int:
    """Processors that this process may use; 1 within ``joblib.parallel_config("sequential")``."""
    return int(joblib.effective_n_jobs(-1))


def each(
    work: Callable[[Job], Done], jobs: Sequence[Job], workers: int | None = None, dask: str | None = None
) -> Iterator[Done]:
    """Do all jobs, in any order; yields what ``work`` returns, as soon as it does.

    ``workers``: processes (by default as many as there are processors; 1: this one); ``dask``: the address of a dask
    scheduler that has the work done instead. BLAS is held to one thread. Raises ``UserError`` where a process dies or
    no scheduler answers, and whatever ``work`` raises.
    """
    if dask is not None:
        yield from _on_dask(work, jobs, dask)
        return
    count = min(workers or usable(), len(jobs))
    yield from _here(work, jobs) if count <= 1 else _in_processes(work, jobs, count, ordered=False)


def in_order(work: Callable[[Job], Done], jobs: Sequence[Job], *, processes: bool = True) -> Iterator[Done]:
    """Do all jobs as ``each`` does, and yield what ``work`` returns in the jobs' order.

    ``processes``: as many as there are processors; else, where there is little to do, this one.
    """
    count = min(usable(), len(jobs)) if processes else 1
    yield from _here(work, jobs) if count <= 1 else _in_processes(work, jobs, count, ordered=True)


def _here(work: Callable[[Job], Done], jobs: Sequence[Job]) -> Iterator[Done]:
    for job in jobs:
        yield _threadless(work, job)


def _in_processes(work: Callable[[Job], Done], jobs: Sequence[Job], count: int, *, ordered: bool) -> Iterator[Done]:
    calls = (joblib.delayed(partial(_in_a_worker, os.getpid()))(work, job) for job in jobs)
    try:
        with joblib.parallel_config("loky", inner_max_num_threads=1):
            as_done = "generator" if ordered else "generator_unordered"
            with _deaf_children():
                done = joblib.Parallel(n_jobs=count, batch_size=1, return_as=as_done)(calls)
            yield from done
    except BrokenExecutor:
        # Who wants results in order neither keeps what is finished nor chooses how many workers there are.
        way_out = "" if ordered else f"; what is finished is kept; try fewer than {count} workers"
        raise UserError(f"a worker died, perhaps for want of memory{way_out}") from None


def _on_dask(work: Callable[[Job], Done], jobs: Sequence[Job], address: str) -> Iterator[Done]:
    try:
        from distributed import Client, KilledWorker, as_completed
    except ImportError:
        raise UserError("dask is not installed; it comes with: pip install 'kvsim[dask]'") from None
    try:
        client = Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(f"{address}: no dask scheduler answers there: {reason}") from None
    with client:
        futures = client.map(partial(_threadless, work), jobs, pure=False)
        try:
            for future in as_completed(futures, loop=client.loop):
                yield future.result()
        except KilledWorker:
            raise UserError(f"{address}: workers die of this work, perhaps for want of memory") from None
        finally:
            client.cancel([future for future in futures if not future.done()])


def _threadless(work: Callable[[Job], Done], job: Job) -> Done:
    with _one_thread():
        return work(job)


def _in_a_worker(parent: int, work: Callable[[Job], Done], job: Job) -> Done:
    _settle_in(parent)
    return work(job)


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes that are started meanwhile ignore interrupts from the very beginning, while they import as well."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


@cache
def _settle_in(parent: int) -> None:
    """Once in each worker: leave interrupts to the parent, and end with it, however it ends."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    with _controller().limit(limits=1):
        yield


@cache
def _controller() -> Any:
    return ThreadpoolController()
