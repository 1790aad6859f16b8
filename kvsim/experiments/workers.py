"""Run many small jobs in this process, in worker processes, or on a dask cluster; the results are the same."""

from __future__ import annotations

import ctypes
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from typing import Any, TypeVar

from kvsim.errors import UserError
from kvsim.installation import install_extra
from kvsim.scenario.scenario import Scenario
from policies import PluginError
from policies.plugins import loaded_files, reload_files

Job = TypeVar("Job")
Done = TypeVar("Done")

PluginFiles = tuple[tuple[str, str], ...]
"""Files with policies of the user's own, each with the digest of its code."""

_PR_SET_PDEATHSIG = 1
"""Number of the option of Linux's ``prctl`` that sets the signal a process gets when its parent ends."""
_CONNECT_S = 10
"""Seconds in which a dask scheduler must answer."""


def can_fork() -> bool:
    """Whether forking this process is safe.

    It is on Linux, while no other thread runs, which might hold a lock that is never released in the child, and where
    this process may have children at all.
    """
    alone = threading.active_count() == 1
    return sys.platform == "linux" and alone and not multiprocessing.current_process().daemon


def preload(scenarios: Iterable[Scenario]) -> None:
    """Import here what runs of these scenarios need, rather than in each process that is forked from this one."""
    if not can_fork():
        return
    from kvsim.simulation.set_up import build_policy

    for scenario in {scenario.cache.policy: scenario for scenario in scenarios}.values():
        with suppress(UserError):  # The run itself will say so.
            build_policy(scenario)


def usable_processors() -> int:
    """Return the number of processors this process may use; 1 within ``joblib.parallel_config("sequential")``."""
    import joblib

    return int(joblib.effective_n_jobs(-1))


def map_unordered(
    work: Callable[[Job], Done], jobs: Sequence[Job], workers: int | None = None, dask: str | None = None
) -> Generator[Done, None, None]:
    """Apply ``work`` to all jobs in any order, and yield each value as soon as it is there.

    ``workers``: number of processes, by default one per processor; 1 uses this process. ``dask``: the address of a dask
    scheduler whose workers do the jobs instead. BLAS is limited to one thread. Raises ``UserError`` if a process dies
    or no scheduler answers, and any error of ``work``.
    """
    if dask is not None:
        yield from _on_dask(work, jobs, dask)
        return
    count = min(workers or usable_processors(), len(jobs))
    yield from _in_this_process(work, jobs) if count <= 1 else _in_processes(work, jobs, count, ordered=False)


def map_ordered(work: Callable[[Job], Done], jobs: Sequence[Job], *, processes: bool = True) -> Iterator[Done]:
    """Apply ``work`` to all jobs and yield the values in the order of the jobs.

    ``processes``: use one per processor; otherwise, for little work, this process. Errors are those of
    ``map_unordered``.
    """
    count = min(usable_processors(), len(jobs)) if processes else 1
    yield from _in_this_process(work, jobs) if count <= 1 else _in_processes(work, jobs, count, ordered=True)


def _in_this_process(work: Callable[[Job], Done], jobs: Sequence[Job]) -> Iterator[Done]:
    for job in jobs:
        yield _with_one_thread(work, job)


def _in_processes(work: Callable[[Job], Done], jobs: Sequence[Job], count: int, *, ordered: bool) -> Iterator[Done]:
    in_processes = _in_forks if can_fork() else _in_loky
    try:
        with closing(in_processes(work, jobs, count, ordered)) as done:
            yield from done
    except BrokenExecutor:
        # Callers that want results in order neither keep finished ones nor choose the number of workers.
        advice = "" if ordered else f"; finished runs are kept; try fewer than {count} workers"
        raise UserError(f"a worker died, perhaps because memory ran out{advice}") from None


def _in_forks(
    work: Callable[[Job], Done], jobs: Sequence[Job], count: int, ordered: bool
) -> Generator[Done, None, None]:
    """In processes forked from this one: they start in milliseconds, with all that is imported and loaded here."""
    _thread_pools()  # Looked for once, here.
    begin = (os.getpid(), partial(_with_one_thread, work), jobs)
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _begin_fork, begin)
    try:
        futures = _submitted(pool, len(jobs))
        if ordered:
            while futures:
                yield futures.popleft().result()
        else:
            done = as_completed(futures)
            futures = deque()  # No value is kept once it has been yielded.
            yield from (future.result() for future in done)
    finally:
        # What still runs is no longer wanted.
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(cancel_futures=True)


def _submitted(pool: ProcessPoolExecutor, n_jobs: int) -> deque[Future[Any]]:
    """All jobs as futures; the processes start with the first of them."""
    try:
        with _children_ignoring_interrupts():
            return deque(pool.submit(_do, number) for number in range(n_jobs))
    except OSError:
        raise BrokenExecutor("no more processes") from None


_forked: tuple[Callable[[Any], Any], Sequence[Any]]
"""In a forked process, what it does, and all jobs: a fork has both, so only numbers of jobs are sent to it."""


def _begin_fork(parent: int, work: Callable[[Any], Any], jobs: Sequence[Any]) -> None:
    global _forked
    _forked = work, jobs
    # What the parent had is neither searched for garbage nor, for that, copied.
    gc.freeze()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The system ends it with its parent, at once and even where compiled code never lets another thread look.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prepare_worker(parent)


def _do(number: int) -> Any:
    work, jobs = _forked
    try:
        return work(jobs[number])
    except Exception as e:
        if _can_be_sent(e):
            raise
        said = "".join(traceback.format_exception_only(e)).strip()
    raise RuntimeError(said)


def _can_be_sent(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def _in_loky(
    work: Callable[[Job], Done], jobs: Sequence[Job], count: int, ordered: bool
) -> Generator[Done, None, None]:
    """In new processes, which import what they need."""
    import joblib

    # A worker that ended for lack of work as more came: another takes its place, and no result changes.
    warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning)
    in_a_worker = partial(_in_a_worker, os.getpid(), loaded_files())
    calls = (joblib.delayed(in_a_worker)(work, job) for job in jobs)
    with joblib.parallel_config("loky", inner_max_num_threads=1):
        return_as = "generator" if ordered else "generator_unordered"
        with _children_ignoring_interrupts():
            done = joblib.Parallel(n_jobs=count, batch_size=1, return_as=return_as)(calls)
        yield from done


def _on_dask(work: Callable[[Job], Done], jobs: Sequence[Job], address: str) -> Iterator[Done]:
    try:
        from concurrent.futures import CancelledError as Cancelled

        from distributed import CancelledError, Client, KilledWorker
        from distributed import as_completed as completed
    except ImportError:
        raise UserError(f"dask is not installed; install it with: {install_extra('dask')}") from None
    reason = ""
    try:
        client = Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
    if reason:
        # It closes itself when it is collected: in a thread that the next client starts, both would wait for ever.
        gc.collect()
        raise UserError(f"{address}: no dask scheduler answers there: {reason}")
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # What goes wrong is said below, in a line.
    with client:
        futures = client.map(partial(_with_plugins, loaded_files(), partial(_with_one_thread, work)), jobs, pure=False)
        try:
            for future in completed(futures, loop=client.loop):
                yield future.result()
        except KilledWorker:
            raise UserError(f"{address}: workers die during these runs, perhaps because memory ran out") from None
        except (CancelledError, Cancelled, OSError, TimeoutError):
            advice = "start it again, or leave out --dask, and give the same command: finished runs are kept"
            raise UserError(f"{address}: the dask scheduler was lost; {advice}") from None
        finally:
            client.cancel([future for future in futures if not future.done()])


def _with_one_thread(work: Callable[[Job], Done], job: Job) -> Done:
    with _thread_pools().limit(limits=1):
        return work(job)


def _with_plugins(files: PluginFiles, work: Callable[[Job], Done], job: Job) -> Done:
    """Work with the plug-ins that the sending process had loaded from files."""
    try:
        reload_files(files)
    except PluginError as e:
        raise UserError(str(e)) from None
    return work(job)


def _in_a_worker(parent: int, files: PluginFiles, work: Callable[[Job], Done], job: Job) -> Done:
    _prepare_worker(parent)
    return _with_plugins(files, work, job)


@contextmanager
def _children_ignoring_interrupts() -> Iterator[None]:
    """Let processes started within this context ignore interrupts from the start, even during their imports."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


@cache
def _prepare_worker(parent: int) -> None:
    """Once in each worker: leave interrupts to the parent, and exit when the parent does, however it ends."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


@cache
def _thread_pools() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
