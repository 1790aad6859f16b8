"""The questions: each command is typed, and what the page shows of its output is there."""

import re
import shlex

import pytest

from kvsim.advice.questions import find_questions, questions
from kvsim.errors import UserError
from tests.docs.pages import DOCS
from tests.gguf_files import SMOLLM2_MISSING
from tests.kvsim.cli.answers import complaint
from tests.paths import ROOT
from tests.worlds import command

ALL = questions()
TOO_SLOW = {"calibrate"}
"""Commands that measure for a minute; ``tests/test_docs.py`` checks their options."""


def fenced(question, language):
    """The blocks of code of a question in one language: pairs of a title, or an empty text, and what is in them."""
    pattern = rf'^```{language}(?: title="(.+?)")?\n(.*?)^```'
    return re.findall(pattern, question.text, re.MULTILINE | re.DOTALL)


def words(text):
    """A text with single spaces, so that the widths of columns do not count."""
    return " ".join(text.split())


def without_numbers(text):
    """A text without its numbers and units of time, which depend on the machine profile."""
    return words(re.sub(r"-?\d[\d.,]*(?: (?:s|ms|µs)\b)?", "#", text))


def test_there_are_enough_of_them():
    assert 12 <= len(ALL) <= 24
    assert len({question.title for question in ALL}) == len(ALL)
    assert [question.number for question in ALL] == [*range(1, len(ALL) + 1)]


def test_the_page_of_the_site_is_the_shipped_one():
    assert (DOCS / "questions.md").read_text(encoding="utf-8") == '--8<-- "kvsim/advice/questions.md"\n'
    packaged = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"advice/questions.md"' in packaged


@pytest.mark.parametrize("question", ALL, ids=lambda question: str(question.number))
def test_every_question_has_a_command_and_an_answer(question):
    shown = [*fenced(question, "text"), *fenced(question, "console")]
    assert shown, "what the command prints"
    assert question.text.rstrip().rpartition("\n\n")[2][-1] in ".:", "an explanation at the end"
    assert question.command in question.text


@pytest.mark.slow
@pytest.mark.parametrize("question", ALL, ids=lambda question: str(question.number))
def test_the_command_prints_what_the_page_shows(question, tmp_path, monkeypatch):
    program, *arguments = shlex.split(question.command)
    assert program == "kvsim"
    if arguments[0] in TOO_SLOW:
        pytest.skip("measures for a minute")
    if "smollm2" in arguments and SMOLLM2_MISSING:
        pytest.skip(SMOLLM2_MISSING)
    monkeypatch.chdir(tmp_path)
    for language in ("toml", "csv"):
        for name, text in fenced(question, language):
            (tmp_path / name).write_text(text)
    done = command(*arguments)
    assert done.returncode == 0, done.stderr
    for _, block in fenced(question, "text"):
        for line in block.splitlines():
            assert words(line) in words(done.stdout)
    for _, block in fenced(question, "console"):
        for line in block.splitlines():
            assert without_numbers(line) in without_numbers(done.stdout)


def test_a_line_that_is_not_printed_is_found():
    """The control."""
    assert without_numbers("cache: 1.5% used") not in without_numbers("cache: 1.5% free")
    assert without_numbers("TTFT 19.5 ms 8.49 ms") in without_numbers("a\nTTFT  1.2 s   900 µs")


# The command


def test_the_list_and_an_answer():
    done = command("questions")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"{question.number:>2}  {question.title}\n" in done.stdout for question in ALL)
    shown = command("questions", "--cache-ram").stdout
    assert shown.startswith("What does --cache-ram do?\n\n    kvsim run host.toml\n\nhost.toml:\n[workload]\n")
    assert "```" not in shown
    assert command("questions", "7").stdout == shown


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (["slow"], ["Why is my tenth request slow?"]),
        (["requests", "FAIL"], ["Why did requests fail?"]),
        (["preempted"], ["Why were requests preempted?"]),
        (["ollama"], ["Ollama: which variables for four users?"]),
        (["-np", "four"], ["Which -c and -np for four users on 16 GB?"]),
        (["zebra"], []),
        (["perplexity"], ["Will K and V in q8_0 hurt?"]),
    ],
)
def test_questions_are_found_by_their_words(asked, found):
    if not found:
        with pytest.raises(UserError, match="kvsim questions lists all"):
            find_questions(asked)
    else:
        assert [question.title for question in find_questions(asked)] == found


@pytest.mark.parametrize("asked", [["0"], ["99"], ["9" * 50], ["x" * 1000], ["²"]])
def test_no_question_ends_in_one_line(asked):
    complaint(command("questions", *asked))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "pointer"),
    [
        ("why batch -p paged", "slow"),
        ("run chat -p streams", "requests fail"),
        ("run hot.toml", "slow"),
        ("run chat -p paged", None),
        ("compare chat -p streams -p paged", "requests fail"),
        ("compare chat -p paged --requests 20", None),
    ],
)
def test_commands_point_to_the_question(line, pointer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hot.toml").write_text('[workload]\nrate = 100.0\n[cache]\npolicy = "paged"\n')
    shown = command(*line.split()).stdout
    pointed = re.findall(r"^See also: kvsim questions (.+)$", shown, re.MULTILINE)
    assert pointed == ([] if pointer is None else [pointer])
    assert all(find_questions(words.split()) for words in pointed)


def test_the_help_points_to_the_questions():
    assert "kvsim questions" in words(command("--help").stdout)
