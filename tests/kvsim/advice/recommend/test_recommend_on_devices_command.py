"""``kvsim recommend --device``: what it prints and saves, and what it refuses."""

import json
import shlex

import pytest

from kvsim import UserError, load_scenario, recommend
from kvsim.advice.recommend.places import read_prices
from tests.kvsim.advice.recommend.device_worlds import MODEL, SLO, SMALL, TRAFFIC
from tests.kvsim.cli.answers import complaint
from tests.worlds import command

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"device": ["rtx4090", "rtx4090"]}, "--device: rtx4090 is given twice"),
        ({"device": "rtx409"}, "no device called 'rtx409'; did you mean 'rtx4090'"),
        ({"price": "rtx4090=1"}, "--price: prices are of devices; name them with --device"),
        ({"tp": 2}, "--tp: GPUs that share a model; name them with --device"),
        ({"device": "rtx4090", "tp": 0}, "--tp is 0"),
        ({"device": "rtx4090", "tp": 3}, "3 does not divide the 32 heads"),
        ({"device": "rtx4090", "price": "rtx409=1"}, "--price: no device called 'rtx409'; did you mean 'rtx4090'"),
        ({"device": "rtx4090", "price": "l40s=1"}, "--price: l40s is not among the devices asked about"),
        ({"device": "rtx4090", "memory": "24GB"}, "--memory and --device: both say"),
        ({"device": "rtx4090", "profile": "default"}, "--profile and --device: both say"),
        ({"device": "rtx4090", "weights": "banana"}, "--weights: no type called 'banana'"),
        ({"device": "rtx4090", "model": None}, "--device: name the model that is served"),
    ],
)
def test_a_question_that_cannot_be_asked_ends_in_one_line(asked, message):
    with pytest.raises(UserError, match=message) as raised:
        recommend(load_scenario(TRAFFIC), **{"slo": SLO, "model": MODEL, "requests": 80, **asked})
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["", "rtx4090", "rtx4090=", "=1", "rtx4090=x", "rtx4090=0", "rtx4090=-1", "rtx4090=inf"]
)
def test_a_price_is_a_number_above_0(text):
    with pytest.raises(UserError, match=r"--price: .* the price of an hour above 0"):
        read_prices(text, ["rtx4090"])


def test_prices_are_read():
    assert read_prices("rtx4090=0.4, l40s=.75", ["l40s", "rtx4090"]) == {"rtx4090": 0.4, "l40s": 0.75}
    assert read_prices({"l40s": 2}, ["l40s"]) == {"l40s": 2.0}
    with pytest.raises(UserError, match="--price: l40s is given twice"):
        read_prices("l40s=1,l40s=1", ["l40s"])


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder with a scenario, where a search is short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(recommend.__kwdefaults__, "budget", SMALL)
    (tmp_path / "busy.toml").write_text(load_scenario(TRAFFIC).to_toml())
    return ["recommend", "--scenario", "busy.toml", "--slo", SLO, "--requests", "80", "--workers", "1"]


def test_the_command_compares_devices_and_says_what_it_rests_on_first(small, tmp_path):
    devices = ["--device", "rtx4090", "--device", "h100_sxm", "--device", "a6000", "--price", "h100_sxm=2.5"]
    asked = [*small, "--model", "qwen3-14b", *devices]
    shown = command(*asked).stdout
    lines = shown.splitlines()
    assert lines[0].startswith("Times are those of profile h100_sxm-qwen3-14b: ")
    assert lines[1].startswith("Times are estimated: qwen3-14b on a6000 under vLLM")
    begins = [
        "h100_sxm ",
        "rtx4090: qwen3-14b does not fit on rtx4090: ",
        "a6000 ",
    ]
    assert all(any(line.startswith(begin) for line in lines) for begin in begins), shown
    assert "\nh100_sxm\n   vllm serve Qwen/Qwen3-14B --max-model-len " in shown
    assert "kvsim run results/recommend-busy/best-h100_sxm.toml" in shown
    saved = json.loads((tmp_path / "results/recommend-busy/recommendation.json").read_text())
    found = json.loads(command(*asked, "--json").stdout)
    assert found == saved
    other = command(*small, "--slo", "e2e_p95<60s", "--model", MODEL, "--device", "rtx4090")
    assert "in results/recommend-busy-2/" in other.stdout
    assert json.loads((tmp_path / "results/recommend-busy/recommendation.json").read_text()) == saved
    again = command(*small, "--model", MODEL, "--device", "rtx4090", "--out", "results/recommend-busy-2")
    assert "results/recommend-busy-2: the answer to another question that was there is replaced" in again.stderr
    again = json.loads(command(*shlex.split(found["command"])[1:], "--workers", "1", "--json").stdout)
    assert again == found
    assert command("report", "results/recommend-busy").returncode == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--device", "rtx4090", "--device", "rtx4090"],
        ["--device", "rtx4090", "--model", MODEL],
        ["--device", "rtx4090", "--tp", "2", "--tp", "2"],
        ["--model", "falcon3-7b"],
    ],
)
def test_the_command_refuses_in_one_line(small, tmp_path, options):
    complaint(command(*small, "--model", MODEL, *options))
    assert not (tmp_path / "results").exists()
