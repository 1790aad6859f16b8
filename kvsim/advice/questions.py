"""Common questions with a command and an answer each, read from the page that ships with the package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

from kvsim.errors import UserError

_FILE = "questions.md"


@dataclass(frozen=True)
class CommonQuestion:
    """A question, in the words of those who ask it."""

    number: int
    """Its place on the page, from 1."""
    title: str
    command: str
    """The command that answers it."""
    text: str
    """Command, files, output and explanation, in Markdown."""

    @property
    def plain(self) -> str:
        """The text without marks of code; each file has its name above it."""
        named = re.sub(r'^```\w+ title="(.+)"$', r"\1:", self.text, flags=re.MULTILINE)
        return re.sub(r"^```\w*\n", "", named + "\n", flags=re.MULTILINE).strip("\n")

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return asdict(self)


@cache
def questions() -> tuple[CommonQuestion, ...]:
    """All questions, in the order of the page."""
    page = (resources.files("kvsim.advice") / _FILE).read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)\n", page, flags=re.MULTILINE)[1:]
    made = []
    for number, (title, text) in enumerate(zip(parts[::2], parts[1::2], strict=True), 1):
        command = re.search(r"^    (kvsim .+)$", text, flags=re.MULTILINE)
        assert command is not None, f"{title}: no command"
        made.append(CommonQuestion(number, title, command[1], text.strip("\n")))
    return tuple(made)


def find_questions(words: Sequence[str]) -> tuple[CommonQuestion, ...]:
    """Questions by number, or those that have all words: in the title or, if there are none, in the text.

    Raises ``UserError`` if there are none at all.
    """
    known = questions()
    if len(words) == 1 and words[0].isdecimal():
        found = tuple(question for question in known if question.number == int(words[0]))
        if not found:
            raise UserError(f"no question {words[0]}; 1 to {len(known)} are accepted")
        return found
    asked = [word.casefold() for word in words]
    for of in (lambda q: q.title, lambda q: f"{q.title}\n{q.text}"):
        if found := tuple(q for q in known if all(word in of(q).casefold() for word in asked)):
            return found
    raise UserError(f"no question has {' and '.join(map(repr, words))!s:.80}; kvsim questions lists all of them")
