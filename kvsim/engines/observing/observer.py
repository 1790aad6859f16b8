"""From watched requests to lines of the file, in a thread beside the traffic."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

from kvsim import __version__
from kvsim.engines.live.address import Address
from kvsim.engines.observing.answers import Answer, Api
from kvsim.engines.observing.fingerprints import BLOCK_BYTES, BLOCK_TOKENS
from kvsim.engines.observing.observations import ObservationFile
from kvsim.engines.observing.prompts import read_prompt
from kvsim.engines.observing.records import Hashes, count_tokens, hash_texts, record_of
from kvsim.engines.observing.token_counts import COUNTED, Tokenizer
from kvsim.engines.observing.watch import End, Room, Watch

T = TypeVar("T")

_MOST_WAITING = 8192
"""Requests that have ended and wait for their line; of further ones none is written."""
_FEW_WAITING = 64
"""With more waiting, the server's tokenizer is not asked."""
_DRAIN_S = 10.0
"""For how long lines are still written after the last request."""


@dataclass
class Summary:
    """What was observed."""

    requests: int = 0
    """Requests that were recorded, those without a line among them."""
    ends: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)
    without_blocks: int = 0
    """Recorded without hashes: too long, or not understood."""
    lost: int = 0
    """Requests that have no line, since it could not be written."""
    faults: int = 0
    """Times that observing failed in any way; the traffic passed all the same."""
    passed_on: int = 0
    """Requests of other kinds, which are not recorded."""
    files: list[Path] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as one JSON object."""
        said: dict[str, Any] = {"requests": self.requests, **{end: self.ends[end] for end in get_args(End)}}
        said["counted"] = {way: self.counted[way] for way in COUNTED}
        said |= {name: getattr(self, name) for name in ("without_blocks", "lost", "faults", "passed_on")}
        return {**said, "files": [str(path) for path in self.files], "seconds": round(self.seconds, 3)}


class Observer:
    """Watches requests and writes a line for each when it has ended; lines are in the order of ends.

    ``complain`` is called with a line of text when something fails for the first time, from any thread. ``wrote`` is
    called after each request that was dealt with, from the thread that writes. Raises ``UserError`` if the file cannot
    be written at the start.
    """

    def __init__(
        self,
        out: Path,
        upstream: Address,
        salt: bytes,
        *,
        rotate_bytes: int,
        complain: Callable[[str], None],
        wrote: Callable[[int], None] = lambda n: None,
    ):
        self.summary = Summary()
        self.room = Room()
        self._began, self._started = time.monotonic(), datetime.now(UTC)
        self._salt = salt
        self._complain, self._complained = complain, set[str]()
        self._wrote = wrote
        self._api: Api | None = None
        self._model: str | None = None
        self._lock = threading.Lock()
        self._file = ObservationFile(out, self._header, rotate_bytes=rotate_bytes)
        self._tokenizer = Tokenizer(upstream)
        self._queue: queue.Queue[Watch | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._write_lines, name="observer", daemon=True)
        self._thread.start()

    def watch(self, path: str) -> Watch:
        """Begin to watch a request that has come."""
        watch = Watch(self.summary.requests, path, self.room)
        self.summary.requests += 1
        return watch

    def done(self, watch: Watch) -> None:
        """Have the line of a request written that has ended."""
        self.summary.ends[watch.end] += 1
        try:
            self._queue.put_nowait(watch)
        except queue.Full:
            watch.forget()
            self.fault("writing cannot keep up: some requests have no line", lost=1)

    def fault(self, what: str, *, lost: int = 0) -> None:
        """Count a fault of observing, by which lines may be lost, and tell it if it is the first of its kind."""
        with self._lock:
            self.summary.faults += 1
            self.summary.lost += lost
            new = what not in self._complained
            self._complained.add(what)
        if new:
            with contextlib.suppress(Exception):  # Whoever should read it may be gone.
                self._complain(f"{what}; traffic is passed on all the same, and this is said only once")

    def close(self) -> Summary:
        """Write what waits and close the file; it can be called again."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=_DRAIN_S)
            self._thread.join(_DRAIN_S)
        if self._thread.is_alive():
            self.summary.lost += self._queue.qsize()
        else:
            self._file.close()
            self._tokenizer.close()
        self.summary.seconds = time.monotonic() - self._began
        self.summary.files = [*self._file.files, self._file.path]
        return self.summary

    def _header(self) -> dict[str, Any]:
        return {
            "kind": "observed",
            "version": 1,
            "started": self._started.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z",
            "api": self._api,
            "model": self._model,
            "block_bytes": BLOCK_BYTES,
            "block_tokens": BLOCK_TOKENS,
            "kvsim": __version__,
        }

    def _write_lines(self) -> None:
        done = 0
        while (watch := self._queue.get()) is not None:
            try:
                self._write_line(watch)
            except Exception as e:
                # What an OSError says is of the file; what others say may be of the text.
                why = (e.strerror or str(e)) if isinstance(e, OSError) else type(e).__name__
                self.fault(f"a line could not be written: {why}", lost=1)
            finally:
                watch.forget()
            done += 1
            self._wrote(done)

    def _write_line(self, watch: Watch) -> None:
        if watch.fault is not None:
            self.fault(f"a request could not be looked at ({type(watch.fault).__name__})")
        # Of others, the client may have sent half, or no JSON at all.
        completed, body, reader = watch.end == "completed", watch.body, watch.reader
        prompt, hashes, answer = None, Hashes(), Answer() if reader is None else reader.answer
        if body is not None:
            prompt = self._tried("a prompt could not be read", lambda: read_prompt(watch.path, body), tell=completed)
        if reader is not None and self._tried("an answer could not be read", reader.finish, tell=completed) is None:
            answer.whole = False
        if prompt is not None:
            hash_both = partial(hash_texts, self._salt, prompt, answer)
            hashes = self._tried("a prompt could not be hashed", hash_both) or hashes
        self._api, self._model = self._api or answer.api, self._model or answer.model
        ask = watch.end != "failed" and self._queue.qsize() <= _FEW_WAITING
        counts = count_tokens(watch, prompt, answer, self._tokenizer if ask else None)
        trouble = self._file.write(record_of(watch, self._began, hashes, counts, prompt))
        self.summary.counted[counts.counted] += 1
        self.summary.without_blocks += hashes.prompt_units == 0
        if trouble is not None:
            self.fault(f"{self._file.path}: {trouble}")

    def _tried(self, failed: str, work: Callable[[], T], *, tell: bool = True) -> T | None:
        """What the work gives; None if it fails, which is told as ``failed``."""
        try:
            return work()
        except Exception as e:
            if tell:
                self.fault(f"{failed} ({type(e).__name__})")
            return None
