"""The RAGPulse trace: JSONL with ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``.

Wang et al., "RAGPulse: An open-source RAG workload trace to optimize RAG serving systems" (arXiv 2511.12979); public
at github.com/flashserve/RAGPulse under MIT. ``timestamp`` is a string of seconds. ``hash_ids`` lists the texts of
each component of a prompt; their lengths are in other files of the data set. The published file joins two weeks, and
its clock restarts with the second one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workloads.request import Prefixes, Segment, WorkloadError
from workloads.traces.bad_rows import BadRowLog, FlawError
from workloads.traces.clock import Clock, parse_seconds
from workloads.traces.files import open_text, shown_path
from workloads.traces.jsonl import check_keys, ids, json_lines, parse, shown, tokens, whole
from workloads.traces.trace import Row, RowBatch, Trace, in_batches

ClockReset = Literal["refuse", "continue"]
"""What to do where the clock goes back: refuse the row, or continue with whole weeks added from there on.

A row that goes back by half a week or less is always refused, since it is out of order rather than in a new week."""

_WEEK_S = 604_800
_CONTINUE = 'clock_reset = "continue" (--continue-clock)'

_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_COMPONENTS = {
    "sys_prompt": ("1_sys_prompt.jsonl", "sys_prompt_id"),
    "passages_ids": ("2_passages.jsonl", "passage_id"),
    "history": ("3_history.jsonl", "history_id"),
    "web_search": ("5_web_search.jsonl", "web_search_id"),
    "user_input": ("4_user_input.jsonl", "user_input_id"),
}
"""The components in the order of a prompt, each with the file of the lengths of its texts and the key of their ids."""
_TEXTS = len(_COMPONENTS) + 1
"""Source numbers are interleaved: one class for each component, and one for text that only one prompt has."""
_MAX_ID = 2**44
_MAX_IDS = 10**6
"""The most texts of a component; the published files have up to 8,302."""

Lengths = dict[str, dict[int, int]]


@dataclass(frozen=True, slots=True)
class RagPulseTrace(Trace):
    """The trace of RAGPulse; equal ids are equal texts.

    A prompt consists of its texts in order; the rest of its tokens (the chat template) are unique to it. The lengths of
    all texts are held in memory, about 100 bytes each. If the files with the lengths are not in the same folder,
    prompts have no content, and a note says so.
    """

    clock_reset: ClockReset = "refuse"

    @property
    def prefixes(self) -> Prefixes:
        """The texts of prompts, if the files are there that say how long each is."""
        return "unknown" if self._missing() else "tokens"

    def _batches(self, *, check_all: bool) -> Iterator[RowBatch]:
        return in_batches(self._rows())

    def _rows(self) -> Iterator[Row]:
        clock, weeks, alone = Clock("timestamp"), 0, 0
        lengths = None if self._missing() else {name: _lengths_of(self.path.parent, name) for name in _COMPONENTS}

        def read(numbered: tuple[int, str]) -> Row:
            nonlocal weeks, alone
            number, line = numbered
            row = parse(line, _KEYS)
            now, more = self._moment(row["timestamp"], clock, weeks)
            prompt, output = tokens(row, "input_length"), tokens(row, "output_length")
            texts = _texts(row["hash_ids"], lengths)
            if lengths is not None:
                rest = prompt - sum(text.n for text in texts)
                texts += (Segment(alone * _TEXTS, 0, rest),) if rest > 0 else ()
                alone += 1
            if more > weeks:
                self._bad_rows.clock_fell(number, (more - weeks) * _WEEK_S)
                weeks = more
            return Row(clock.move(now) / 1e9, prompt, output, texts)

        with open_text(self.path) as text:
            rows = ((number, (number, line)) for number, line in json_lines(self.path, text))
            yield from self._bad_rows.sift(rows, read)

    def _moment(self, value: Any, clock: Clock, weeks: int) -> tuple[int, int]:
        """The time of a row in nanoseconds, and the weeks that are added from there on. Raises ``FlawError``."""
        if not isinstance(value, str):
            raise FlawError(f'timestamp {shown(value)} is not text; expected seconds as a string, such as "82"')
        time = parse_seconds("timestamp", value)
        now = time + weeks * _WEEK_S * 10**9
        if clock.last is None or now >= clock.last:
            return now, weeks
        earlier = f"timestamp {shown(value)} is earlier than the row before"
        new_week = 2 * (clock.last - now) > _WEEK_S * 10**9
        if self.clock_reset == "refuse":
            advice = f"{_CONTINUE} would add whole weeks from there on"
            raise FlawError(f"{earlier}{self._bad_rows.hint(advice) if new_week else ''}")
        if not new_week:
            only = f"{_CONTINUE} goes on only where the clock jumps back by more than half a week"
            raise FlawError(f"{earlier}{self._bad_rows.hint(only)}")
        weeks = -(-(clock.last - time) // (_WEEK_S * 10**9))
        return time + weeks * _WEEK_S * 10**9, weeks

    def _missing(self) -> list[str]:
        files = (file for file, _ in _COMPONENTS.values())
        return sorted(file for file in files if _find_file(self.path.parent, file) is None)

    def _files(self) -> tuple[Path, ...]:
        found = (_find_file(self.path.parent, file) for file, _ in _COMPONENTS.values())
        return (self.path, *(path for path in found if path is not None))

    def _remarks(self) -> tuple[str, ...]:
        missing = ", ".join(self._missing())
        if not missing:
            return ()
        return (
            f"{shown_path(self.path)}: prompts have no content; "
            f"the files that say how long each text is are missing: {missing}",
        )


def _find_file(folder: Path, file: str) -> Path | None:
    """The path of a file, plain or compressed; None if there is none."""
    for suffix in ("", ".gz", ".bz2", ".xz"):
        try:
            if (path := folder / f"{file}{suffix}").is_file():
                return path
        except (OSError, ValueError):
            return None
    return None


def _lengths_of(folder: Path, component: str) -> dict[int, int]:
    """Tokens of each text of a component, by id. Raises ``WorkloadError``."""
    file, key = _COMPONENTS[component]
    path = _find_file(folder, file) or folder / file
    found: dict[int, int] = {}

    def read(line: str) -> None:
        row = parse(line, (key, "token_length"))
        number, n = whole(row, key, 0, _MAX_ID), tokens(row, "token_length")
        if number in found:
            raise FlawError(f"{key} {number} occurred before")
        if len(found) == _MAX_IDS:
            raise WorkloadError(f"{shown_path(path)}: more than {_MAX_IDS:,} texts; RAGPulse has a few thousand")
        found[number] = n

    with open_text(path) as text:
        for _ in BadRowLog(path).sift(json_lines(path, text), read):
            pass
    return found


def _texts(value: Any, lengths: Lengths | None) -> tuple[Segment, ...]:
    """The texts of a prompt; empty if their lengths are not known. Raises ``FlawError``."""
    listed = check_keys("hash_ids: ", value, tuple(_COMPONENTS))
    for name in listed:
        if name not in _COMPONENTS:
            raise FlawError(f"hash_ids: unknown component {shown(name)}; expected {', '.join(_COMPONENTS)}")
    texts = []
    for place, name in enumerate(_COMPONENTS, 1):
        for number in ids(f"hash_ids: {name}", listed[name], _MAX_ID):
            if lengths is None:
                continue
            if number not in lengths[name]:
                raise FlawError(f"hash_ids: {name}: {number} is not in {_COMPONENTS[name][0]}")
            texts.append(Segment(number * _TEXTS + place, 0, lengths[name][number]))
    return tuple(texts)
