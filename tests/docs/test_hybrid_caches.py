"""The page on the caches of hybrid models shows what its commands print."""

import re
import shlex

import pytest

from tests.docs.pages import blocks
from tests.paths import ROOT
from tests.worlds import command

SHOWN = [block.removeprefix("$ ").partition("\n") for block in blocks("hybrid-caches.md", "text")]


def of_spaces(text):
    """The text with each run of white space as one space."""
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(("typed", "lines"), [(typed, lines) for typed, _, lines in SHOWN], ids=lambda part: part[:60])
def test_each_line_on_the_page_is_printed(typed, lines, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(typed)]
    done = command(*words[1:])
    printed = of_spaces(done.stdout + done.stderr)
    for piece in filter(None, (of_spaces(piece).strip() for piece in lines.split("..."))):
        assert piece in printed, piece
