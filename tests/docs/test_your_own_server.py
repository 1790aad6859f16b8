"""The page about one's own server says what the recordings beside its example say."""

from statistics import mean, median

import pytest

from kvsim.engines.recordings.recording_files import read_lines
from tests.docs.pages import sections
from tests.paths import ROOT

FOLDER = ROOT / "examples" / "own-server"


def _measured(path):
    """TTFT and end to end at P50 and mean, in seconds, and the tokens of prompts that were computed."""
    requests = [record for _, record in read_lines(path) if record["type"] == "request"]
    ttft, e2e = ([each["token_s"][at] - each["send_s"] for each in requests] for at in (0, -1))
    computed = sum(each["result"]["prompt_n"] for each in requests)
    return [median(ttft), mean(ttft), median(e2e), mean(e2e), computed]


@pytest.mark.parametrize("server", ["defaults", "recommended"])
def test_the_table_has_what_was_recorded(server):
    lines = sections("your-own-server.md")["Before and after"].splitlines()
    cells = next(line.strip("| ").split(" | ")[1:] for line in lines if line.startswith(f"| {server}, measured"))
    turns = [_measured(FOLDER / f"{server}.turn{turn}.jsonl.gz") for turn in (1, 2)]
    for cell, values in zip(cells, zip(*turns, strict=True), strict=True):
        said = [float(text.replace(",", "")) for text in cell.removesuffix(" s").split(", ")]
        assert said == pytest.approx(values, rel=0.005)
