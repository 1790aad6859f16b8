"""Progress of long runs: on a terminal a bar, after two seconds; elsewhere a line on standard error now and then."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Literal, Self

from kvsim.model.durations import about

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_AFTER_S = 2.0
_EVERY_S = 0.1
_FIRST_LINE_S = 5.0
_LINE_EVERY_S = 10.0


def _bar(counts: str, clock: Literal["elapsed", "remaining"]) -> Progress | None:
    """A progress bar on the terminal's error stream; None if that is not a terminal.

    It is drawn when it is updated, not by a thread of its own, beside which no process could be forked.
    """
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    time_column = TimeElapsedColumn() if clock == "elapsed" else TimeRemainingColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(counts), time_column)
    return Progress(*columns, console=console, transient=True, auto_refresh=False)


class _Progress:
    """A bar on a terminal; elsewhere a line on standard error after 5 s, then every 10 s. A context manager."""

    def __init__(self, title: str, counts: str, clock: Literal["elapsed", "remaining"]):
        self.title = title
        self._began = time.perf_counter()
        self._due_s = self._began + _FIRST_LINE_S
        self._bar = _bar(counts, clock)
        self._task: TaskID | None = None
        self._shown = self._began
        self._live = False

    def _line_due(self, now: float) -> bool:
        """Whether a line is due; if so, the next one is due later."""
        if now < self._due_s:
            return False
        self._due_s = now + _LINE_EVERY_S
        return True

    def _print(self, now: float, said: str, left: str = "") -> None:
        print(f"{self.title}: {said} after {now - self._began:.0f} s{left}", file=sys.stderr, flush=True)

    def _update(self, now: float, done: int, total: int | None, detail: str, *, refresh: bool) -> None:
        """Show this on the bar."""
        assert self._bar is not None
        assert self._task is not None
        if not self._live:
            self._bar.start()
            self._live = True
        self._shown = now if refresh else self._shown
        self._bar.update(
            self._task, description=self.title, completed=done, total=total, detail=detail, refresh=refresh
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None and self._live:
            self._bar.stop()


class RunProgress(_Progress):
    """Shows the requests done, the simulated time and the speed, or the share of the work that is done.

    Pass the object itself as a run's ``progress``.
    """

    def __init__(self, title: str, total: int | None = None):
        """``total``: requests of all runs, where that is known."""
        of = "" if total is None else "/{task.total:,.0f}"
        super().__init__(title, f"{{task.completed:,.0f}}{of} {{task.fields[detail]}}", "elapsed")
        self._total = total
        self._run_began = self._began
        self._task = self._bar.add_task(title, total=total, detail="") if self._bar else None

    def begin(self, title: str, total: int | None = None) -> None:
        """Start the count and the clock of the next run."""
        self.title, self._run_began = title, time.perf_counter()
        self._total = self._total if total is None else total

    def __call__(self, done: int, simulated_s: float) -> None:
        """Show that ``done`` requests have ended at this simulated time."""
        now = time.perf_counter()
        # Called at the end of every request, so text is only made when it is shown.
        if self._bar is None:
            if self._line_due(now):
                of = "" if self._total is None else f" of {self._total:,}"
                self._print(now, f"{done:,}{of} requests, {simulated_s:,.1f} s simulated")
        elif self._due(now):
            speed = done / max(now - self._run_began, 1e-9)
            detail = f"requests, {simulated_s:,.1f} s simulated, {speed:,.0f} requests/s"
            self._update(now, done, self._total, detail, refresh=True)

    def share(self, done: float, doing: str = "") -> None:
        """Show that this share of the work, between 0 and 1, is done, and what is being done, by default about how long
        the rest takes.
        """
        now = time.perf_counter()
        left = f"{about((now - self._run_began) * (1 - done) / done)} left" if 0 < done < 1 else ""
        more = f", {doing or left}" if doing or left else ""
        if self._bar is None:
            if self._line_due(now):
                self._print(now, f"{done:.0%}", more)
        elif self._due(now):
            self._update(now, round(100 * done), self._total, f"%{more}", refresh=True)

    def say(self, line: str) -> None:
        """Print a warning at once, above the bar."""
        if self._bar is not None and self._live:
            self._bar.console.print(f"warning: {line}", highlight=False, markup=False, soft_wrap=True)
        else:
            print(f"warning: {line}", file=sys.stderr, flush=True)

    def _due(self, now: float) -> bool:
        """Whether it is time to update the bar."""
        return now - self._shown >= (_EVERY_S if self._live else _AFTER_S)


class SweepBar(_Progress):
    """Shows the runs finished and failed, and on a terminal the time left.

    Pass the object itself as a sweep's ``progress``.
    """

    def __init__(self, title: str):
        counts = "{task.completed:,.0f}/{task.total:,.0f} runs{task.fields[detail]}, left:"
        super().__init__(title, counts, "remaining")
        self.done = self.total = 0

    def __call__(self, done: int, total: int, failed: int) -> None:
        """Show how many of the ``total`` runs planned so far are done, and how many of those failed."""
        self.done, self.total = done, total
        said, now = f", {failed:,} failed" if failed else "", time.perf_counter()
        if self._bar is not None:
            if self._task is None:
                # Runs of an earlier call do not count for the time that the rest takes.
                self._task = self._bar.add_task(self.title, total=total, completed=done, detail="")
            self._update(now, done, total, said, refresh=not self._live or now - self._shown >= _EVERY_S)
        elif self._line_due(now):
            self._print(now, f"{done:,} of {total:,} runs{said}")
