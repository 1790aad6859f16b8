"""From what the relay hands over to lines of the file, in a process beside it that is nice to all others.

The relay may be killed at any time: what it had handed over by then is still written, and then this ends by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

from kvsim import __version__
from kvsim.engines.live.address import Address
from kvsim.engines.observing.answers import Answer, Api
from kvsim.engines.observing.fingerprints import BLOCK_BYTES, BLOCK_TOKENS
from kvsim.engines.observing.handover import Frame, Kind, Spool, frames_of, received
from kvsim.engines.observing.observations import ObservationFile
from kvsim.engines.observing.prompts import Prompt, read_prompt
from kvsim.engines.observing.records import Hashes, amendment_of, count_tokens, hash_texts, record_of
from kvsim.engines.observing.token_counts import COUNTED, LONGEST_TEXT, Tokenizer
from kvsim.engines.observing.watch import End, Room, Watch
from kvsim.errors import UserError

T = TypeVar("T")

DRAIN_S = 10.0
"""How long writing what was handed over may take at the end."""
_LAST_COUNTS_S = 5.0
"""For how long the server's tokenizer is still asked then."""
_UNCOUNTED_BYTES = 16 << 20
"""Bytes of texts that wait for the server's tokenizer; further ones keep their estimates."""
_NICE = 5
GRACE_S = 0.1
"""How long texts may take to be looked at before a request that has ended gets a line without them."""


@dataclass(frozen=True)
class Settings:
    """What an observer is told at its start."""

    upstream: str
    out: str
    salt: str
    """In hexadecimal digits."""
    rotate_bytes: int
    requests: int | None
    """After how many requests, without failed ones, there are enough."""


@dataclass
class Summary:
    """What was observed."""

    requests: int = 0
    """Requests that were recorded, those without a line among them, but for failed ones."""
    ends: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    """Failed requests by cause."""
    counted: Counter[str] = field(default_factory=Counter)
    without_blocks: int = 0
    """Recorded without hashes: too long, or not understood."""
    distorted: int = 0
    """Recorded with times that are not the server's alone, since the proxy was late."""
    lag_s: float = 0.0
    """The most that it was late."""
    missed: int = 0
    """Recorded without having been looked at in full, since observing was far behind."""
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
        said |= {"failures": dict(self.failures), "counted": {way: self.counted[way] for way in COUNTED}}
        counts = ("without_blocks", "distorted", "lag_s", "missed", "lost", "faults", "passed_on")
        said |= {name: getattr(self, name) for name in counts}
        return {**said, "files": [str(path) for path in self.files], "seconds": round(self.seconds, 3)}


class Observer:
    """Takes frames of the relay and writes a line for each request when it has ended; lines are in the order of ends.

    Where looking at texts takes longer than ``GRACE_S``, there is a line first of what the relay itself knows, which
    says that all texts were missed, and a whole one of the same number later. Counts that only the server's tokenizer
    knows are asked for in a thread beside, and come as lines of their own.
    ``tell`` is called with what the relay should know, from any thread. Raises ``UserError`` if the file cannot be
    written at the start.
    """

    def __init__(self, settings: Settings, tell: Callable[..., None]):
        self.summary = Summary()
        self.room = Room()
        self._began, self._started = time.monotonic(), datetime.now(UTC)
        self._salt, self._enough = bytes.fromhex(settings.salt), settings.requests
        self._tell, self._complained = tell, set[str]()
        self._api: Api | None = None
        self._model: str | None = None
        self._open: dict[int, Watch] = {}
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._whole: set[int] = set()
        """Requests that have their whole line, of which ``take_end`` does not know yet."""
        self._early: dict[int, Watch] = {}
        """Requests that have a line without texts only."""
        self._file = ObservationFile(Path(settings.out), self._header, rotate_bytes=settings.rotate_bytes)
        self._tokenizer = Tokenizer(Address(settings.upstream))
        self._uncounted: queue.SimpleQueue[tuple[Watch, Prompt | None, Answer, int] | None] = queue.SimpleQueue()
        self._room_to_count = Room(_UNCOUNTED_BYTES)
        self._counting = threading.Thread(target=self._count_later, name="counts", daemon=True)
        self._counting.start()

    def take(self, frame: Frame) -> None:
        """Note what a frame says; at the end of a request, write its line before anything else is looked at."""
        if (watch := self._open.get(frame.request)) is None:
            watch = self._open[frame.request] = Watch(frame.request, self.room)
        watch.take(frame)
        if frame.kind is Kind.ENDED:
            del self._open[frame.request]
            self._done(watch)

    def take_ends(self, past_texts: socket.socket) -> None:
        """Take ends of requests that come past their texts, in a thread beside the one that takes all else."""
        until = 0.0

        def pieces() -> Iterator[bytes]:
            nonlocal until
            for piece in received(past_texts):
                until = time.monotonic() + GRACE_S  # This process may have waited for a processor itself.
                yield piece

        for frame in frames_of(pieces()):
            try:
                self._take_end(frame, until)
            except Exception as e:  # Whatever it is: further ends come, and this thread must take them.
                self.fault(f"the end of a request could not be noted ({type(e).__name__})")

    def _take_end(self, frame: Frame, until: float) -> None:
        """Write what is known at an end, unless there is a whole line by then."""
        with self._written:
            if self._written.wait_for(lambda: frame.request in self._whole, until - time.monotonic()):
                self._whole.remove(frame.request)
                return
            watch = Watch(frame.request, Room(0))
            watch.take(frame)
            watch.noted.missed = max(watch.noted.body_bytes + watch.noted.answer_bytes, 1)
            counts = count_tokens(watch, None, Answer(), None)
            with contextlib.suppress(OSError):  # The whole line may find room again, or tells of it.
                self._file.write(record_of(watch, self._began, Hashes(), counts, None))
                self._early[frame.request] = watch

    def fault(self, what: str, *, lost: int = 0) -> None:
        """Count a fault of observing, by which lines may be lost, and tell it if it is the first of its kind."""
        with self._lock:
            self.summary.faults += 1
            self.summary.lost += lost
            new = what not in self._complained
            self._complained.add(what)
        if new:
            self._tell(fault=what)

    def close(self) -> Summary:
        """Wait for counts that are asked for, but not long, and close the file."""
        self._uncounted.put(None)
        self._counting.join(_LAST_COUNTS_S)
        with self._lock:
            self._file.close()
        for watch in self._early.values():
            self._count(watch)
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

    def _done(self, watch: Watch) -> None:
        counted_later = False
        try:
            counted_later = self._write_line(watch)
        except Exception as e:  # Whatever it is: lines of other requests must still be written.
            # What an OSError says is of the file; what others say may be of the text.
            why = (e.strerror or str(e)) if isinstance(e, OSError) else type(e).__name__
            self.fault(f"a line could not be written: {why}", lost=1)
        finally:
            if not counted_later:
                watch.forget()
        self._count(watch)

    def _count(self, watch: Watch) -> None:
        noted, summary = watch.noted, self.summary
        summary.ends[noted.end] += 1
        summary.lag_s = max(summary.lag_s, noted.lag)
        if noted.end == "failed":
            summary.failures[noted.cause or "other"] += 1
            return
        summary.requests += 1
        summary.distorted += noted.lag > 0
        summary.missed += noted.missed > 0
        if summary.requests == self._enough:
            self._tell(enough=True)

    def _write_line(self, watch: Watch) -> bool:
        """Write what is known, and say whether more is asked for."""
        if watch.fault is not None:
            self.fault(f"a request could not be looked at ({type(watch.fault).__name__})")
        # Of others, the client may have sent half, or no JSON at all; and of missed ones, the proxy knows half.
        noted, body, reader = watch.noted, watch.body, watch.reader
        whole = noted.end == "completed" and not noted.missed
        prompt, hashes, answer = None, Hashes(), Answer() if reader is None else reader.answer
        if body is not None:
            prompt = self._tried("a prompt could not be read", lambda: read_prompt(noted.path, body), tell=whole)
        if reader is not None and self._tried("an answer could not be read", reader.finish, tell=whole) is None:
            answer.whole = False
        answer.whole = answer.whole and not noted.missed
        if prompt is not None:
            hash_both = partial(hash_texts, self._salt, prompt, answer)
            hashes = self._tried("a prompt could not be hashed", hash_both) or hashes
        self._api, self._model = self._api or answer.api, self._model or answer.model
        counts = count_tokens(watch, prompt, answer, None)
        self._write(record_of(watch, self._began, hashes, counts, prompt), ended=watch.id)
        if noted.end == "failed":
            return False
        self.summary.counted[counts.counted] += 1
        self.summary.without_blocks += hashes.prompt_units == 0
        size = len(answer.text) + (0 if prompt is None else len(prompt.text))
        later = counts.counted == "estimate" and 0 < size <= 2 * LONGEST_TEXT
        if not later or not self._room_to_count.take(size):
            return False
        watch.body = None
        self._uncounted.put((watch, prompt, answer, size))
        return True

    def _write(self, line: dict[str, Any], *, ended: int | None = None) -> None:
        """Write a line, with which all is said of the request ``ended``."""
        with self._written:
            try:
                trouble = self._file.write(line)
            finally:
                if ended is not None and self._early.pop(ended, None) is None:
                    self._whole.add(ended)
                    self._written.notify()
        if trouble is not None:
            self.fault(f"{self._file.path}: {trouble}")

    def _count_later(self) -> None:
        while (asked := self._uncounted.get()) is not None:
            watch, prompt, answer, size = asked
            try:
                before = count_tokens(watch, prompt, answer, None)
                counts = count_tokens(watch, prompt, answer, self._tokenizer)
                if counts != before:
                    self._write(amendment_of(watch, counts))
                    self.summary.counted[before.counted] -= 1
                    self.summary.counted[counts.counted] += 1
            except Exception as e:  # Whatever it is: other counts wait for this thread.
                self.fault(f"counts could not be written ({type(e).__name__})")
            finally:
                watch.forget()
                self._room_to_count.give(size)
        self._tokenizer.close()

    def _tried(self, failed: str, work: Callable[[], T], *, tell: bool = True) -> T | None:
        """What the work gives; None if it fails, which is told as ``failed``."""
        try:
            return work()
        except Exception as e:  # Whatever it is: the texts are others', and the line has room for what else is known.
            if tell:
                self.fault(f"{failed} ({type(e).__name__})")
            return None


def observe_over(channel: socket.socket, past_texts: socket.socket) -> None:
    """Observe what comes over a socket, whose first line has the settings; what the relay should know goes back.

    Ends come over the second one too.
    """
    lock = threading.Lock()

    def tell(**said: Any) -> None:
        with lock, contextlib.suppress(OSError):  # The relay may be gone.
            channel.sendall(json.dumps(said).encode() + b"\n")

    line = b""
    with channel, past_texts:
        while not line.endswith(b"\n"):
            if not (byte := channel.recv(1)):
                return
            line += byte
        try:
            observer = Observer(Settings(**json.loads(line)), tell)
        except UserError as e:
            tell(error=str(e))
            return
        tell(ready=True)
        ends = threading.Thread(target=observer.take_ends, args=(past_texts,), name="ends", daemon=True)
        ends.start()
        for frame in frames_of(Spool(channel).pieces()):
            observer.take(frame)
        ends.join(DRAIN_S)
        summary = observer.close()
        tell(summary=vars(summary) | {"files": [str(path) for path in summary.files]})


def main() -> None:
    """Observe in a process of its own, over its standard input."""
    # The relay's end is this one's; a signal to both would come too early.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(_NICE)
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    observe_over(socket.socket(fileno=os.dup(0)), socket.socket(fileno=int(sys.argv[1])))


def _end_after(parent: int) -> None:
    """End this process, done or not, some time after the one that started it."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(3 * DRAIN_S)
    os._exit(1)


if __name__ == "__main__":
    main()
