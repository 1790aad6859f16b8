"""The RAGPulse trace: JSONL with ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``.

Wang et al., "RAGPulse: An open-source RAG workload trace to optimize RAG serving systems" (arXiv 2511.12979); public
at github.com/flashserve/RAGPulse under MIT. ``timestamp`` is a string of seconds. ``hash_ids`` lists the texts of
each component of a prompt; their lengths are in other files of the data set. The published file joins two weeks, and
its clock restarts with the second one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from workloads.request import Prefixes, Segment, WorkloadError
from workloads.traces.bad_rows import BadRowLog, FlawError
from workloads.traces.clock import parse_seconds
from workloads.traces.columns import ANY, TOKENS, Column, Schema, read_jsonl, time_in, whole
from workloads.traces.files import shown_path
from workloads.traces.jsonl import Object, check_keys, ids, shown
from workloads.traces.row_trace import Make, RowTrace

_WEEK = 604_800 * 10**9
"""Nanoseconds."""
_CONTINUE = 'clock_reset = "continue" (--continue-clock)'
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


def _seconds_in_text(row: Object, name: str) -> int:
    value = row[name]
    if not isinstance(value, str):
        raise FlawError(f'{name} {shown(value)} is not text; expected seconds as a string, such as "82"')
    return parse_seconds(name, value)


@dataclass(frozen=True, slots=True)
class RagPulseTrace(RowTrace):
    """The trace of RAGPulse; equal ids are equal texts.

    A prompt consists of its texts in order; the rest of its tokens (the chat template) are unique to it. The lengths of
    all texts are held in memory, about 100 bytes each. If the files with the lengths are not in the same folder,
    prompts have no content, and a note says so.
    """

    format = "jsonl"
    columns: ClassVar[Schema] = {
        "timestamp": Column(time_in("s").of_text, _seconds_in_text),
        "input_length": TOKENS,
        "output_length": TOKENS,
        "hash_ids": ANY,
    }

    clock_reset: Literal["refuse", "continue"] = "refuse"
    """What to do where the clock goes back: refuse the row, or continue with whole weeks added from there on.

    A row that goes back by half a week or less is always refused: it is out of order rather than in a new week."""

    @property
    def prefixes(self) -> Prefixes:
        """The texts of prompts, if the files are there that say how long each is."""
        return "unknown" if self._missing() else "tokens"

    def start(self, *, check_all: bool) -> Make:
        """Read the lengths of all texts, and make prompts of texts."""
        if self._missing():
            return lambda number, values: (*values[:2], _texts(values[2], None))
        alone, lengths = 0, {name: _lengths_of(self.path.parent, name) for name in _COMPONENTS}

        def make(number: int, values: list[Any]) -> tuple[Any, ...]:
            nonlocal alone
            prompt, output, listed = values
            texts = _texts(listed, lengths)
            rest = prompt - sum(text.n for text in texts)
            texts += (Segment(alone * _TEXTS, 0, rest),) if rest > 0 else ()
            alone += 1
            return prompt, output, texts

        return make

    def went_back(self, written: str, behind: int) -> int:
        """Whole weeks, if they are to be added and the clock went back by more than half a week."""
        earlier, is_new_week = f"{written} is earlier than the row before", 2 * behind > _WEEK
        if self.clock_reset == "refuse":
            advice = f"{_CONTINUE} would add whole weeks from there on"
            raise FlawError(f"{earlier}{self._bad_rows.hint(advice) if is_new_week else ''}")
        if not is_new_week:
            only = f"{_CONTINUE} goes on only where the clock jumps back by more than half a week"
            raise FlawError(f"{earlier}{self._bad_rows.hint(only)}")
        return -(-behind // _WEEK) * _WEEK

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

    def read(number: int, values: list[int]) -> None:
        text, tokens = values
        if text in found:
            raise FlawError(f"{key} {text} occurred before")
        if len(found) == _MAX_IDS:
            raise WorkloadError(f"{shown_path(path)}: more than {_MAX_IDS:,} texts; RAGPulse has a few thousand")
        found[text] = tokens

    for _ in read_jsonl(path, {key: whole(0, _MAX_ID), "token_length": TOKENS}, BadRowLog(path), read):
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
