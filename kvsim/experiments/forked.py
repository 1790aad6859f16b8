"""Worker processes forked from this one: they start in milliseconds, with all that is imported here."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Job = TypeVar("Job")


def can_fork() -> bool:
    """Whether forking this process is safe.

    It is on Linux, while no other thread runs, which might hold a lock that is never released in the child, and where
    this process may have children at all.
    """
    alone = threading.active_count() == 1
    return sys.platform == "linux" and alone and not multiprocessing.current_process().daemon


class ForkedWorkers:
    """Forked processes, each of which is told the number of its next job when it has done one."""

    def __init__(
        self, work: Callable[[Job], Any], jobs: Sequence[Job], count: int, prepare: Callable[[], object]
    ) -> None:
        """Start ``count`` processes; ``prepare`` is called first in each.

        Neither ``work`` nor the jobs are sent: a fork has them. Raises ``BrokenExecutor`` if there cannot be so many
        processes.
        """
        context = multiprocessing.get_context("fork")
        self._n_jobs = len(jobs)
        self._connections: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                self._connections.append(ours)
                arguments = (work, jobs, prepare, theirs, self._connections)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                self._processes.append(process)
                # The only copy of this end is the process's own, so that its death is seen.
                theirs.close()
        except OSError:
            self.close()
            raise BrokenExecutor("no more processes") from None

    def done(self) -> Iterator[tuple[int, Any]]:
        """Yield the number of each job with its value, in the order in which they are done.

        Raises any error of the work, and ``BrokenExecutor`` if a process dies.
        """
        numbers = iter(range(self._n_jobs))
        busy = set[Any]()
        for connection in self._connections:
            self._assign(connection, next(numbers, None), busy)
        while busy:
            for ready in wait(list(busy)):
                busy.discard(ready)
                number, failed, value = self._receive(ready)
                if failed:
                    raise value
                # The process goes on before this one looks at what came.
                self._assign(ready, next(numbers, None), busy)
                yield number, value

    def close(self) -> None:
        """End all processes at once, whether or not they have done their jobs."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()

    @staticmethod
    def _assign(connection: Any, number: int | None, busy: set[Any]) -> None:
        """Have a process do a job; None if there are no more."""
        if number is None:
            return
        try:
            connection.send(number)
        except OSError:
            raise BrokenExecutor("a worker died") from None
        busy.add(connection)

    @staticmethod
    def _receive(connection: Any) -> tuple[int, bool, Any]:
        try:
            number, failed, value = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            raise BrokenExecutor("a worker died") from None
        return number, failed, value


def _serve(
    work: Callable[[Job], Any],
    jobs: Sequence[Job],
    prepare: Callable[[], object],
    connection: Connection,
    ends_of_parent: Sequence[Connection],
) -> None:
    """Do jobs by their numbers until the parent closes its end of the connection, or is no more."""
    for end in ends_of_parent:
        end.close()
    # What the parent had is neither searched for garbage nor, for that, copied.
    gc.freeze()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prepare()
    while True:
        try:
            number = connection.recv()
            connection.send_bytes(_attempt(work, jobs[number], number))
        except (EOFError, OSError):
            return


def _attempt(work: Callable[[Job], Any], job: Job, number: int) -> bytes:
    """The number of the job, whether it failed, and its value or error; pickled."""
    try:
        return pickle.dumps((number, False, work(job)), pickle.HIGHEST_PROTOCOL)
    except Exception as e:
        return pickle.dumps((number, True, _sendable(e)), pickle.HIGHEST_PROTOCOL)


def _sendable(error: Exception) -> Exception:
    """The error, with where it was raised; one that cannot be sent becomes one that says the same."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception_only(error)).strip())
    return error
