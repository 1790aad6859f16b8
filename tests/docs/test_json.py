"""The keys on the page about JSON are those of real output: none is missing, and none is only on the page."""

import json
import re
import shlex
import socket
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kvsim import Recording, load_profile, recommend
from kvsim.advice.recommend.search import SearchBudget
from kvsim.advice.recommend.slo import read_slo
from kvsim.advice.why.contrast import CAUSES
from kvsim.costs.device_profiles import find_device_profile
from kvsim.costs.profile import Coefficient, Corrected, HostCopyCost, PassCosts
from kvsim.engines.live.processor_share import ProcessorShare
from kvsim.engines.live.server_recording import LiveRecording
from kvsim.engines.live.server_validation import LiveValidation, ServerHeld, held_in
from kvsim.engines.observing.observer import Summary as ObservedSummary
from kvsim.engines.recordings.validation import validate_recorded
from kvsim.experiments.measures import MEASURES
from policies import plugins
from tests.docs.pages import blocks, rows, sections
from tests.gguf_files import SMOLLM2_MISSING
from tests.kvsim.advice.recommend.device_worlds import ask_of_many
from tests.kvsim.calibration.published.layer_table_files import write_tables
from tests.kvsim.cli.test_bench_calibration import TABLE
from tests.kvsim.engines.live.test_started_server import PROGRAM
from tests.kvsim.engines.live.test_tuning import tuned
from tests.kvsim.engines.published import write_points
from tests.kvsim.engines.recordings import changed, write
from tests.kvsim.engines.recordings.servers import recorded
from tests.kvsim.engines.recordings.servers import text as text_of
from tests.kvsim.engines.recordings.stepped_servers import LLAMA, llama_recording
from tests.kvsim.engines.recordings.test_llama_server_replay import late
from tests.kvsim.engines.recordings.test_llamacpp_replay import ERA_A
from tests.worlds import command

SMALL = """
[workload]
kind = "poisson"
rate = 8.0
requests = 60
[cache]
cells = 2048
"""
DEVICE = """
[workload]
rate = 20.0
[cache]
cells = 1024
[model]
name = "llama-3.1-8b"
[machine]
device = "rtx4090"
"""
APART = """
[server]
scheduler = "vllm"
[cache]
policy = "vllm"
[cluster]
link_gb_s = 1.0
servers = [{ role = "prefill" }, { role = "decode" }]
"""
COPIES = """
[workload]
kind = "closed-loop"
users = 8
requests = 20
[model]
name = "smollm2"
[server]
slots = 2
[cache]
policy = "streams"
cells = 4096
type_k = "f16"
type_v = "f16"
[machine]
profile = "llamacpp-smollm2"
"""
SESSIONS = """
[workload]
kind = "sessions"
sessions = 12
"""
DRAFTS = """
[workload]
requests = 5
[speculation]
method = "ngram"
acceptance = 0.5
"""
FEW = """
[workload]
rate = 400.0
requests = 12
prompt_tokens = { kind = "fixed", value = 20 }
output_tokens = { kind = "fixed", value = 3 }
"""
SWEEP = """
scenario = "chat"
policies = ["paged", "ring", "streams", "lowest-cell"]
replications = 2
[axes]
"cache.cells" = [400, 2048]
"""

ANSWER = '{"created": 1, "usage": {"prompt_tokens": 9, "completion_tokens": 4, "cached_tokens": 8}}\n'
"""One of a server that counts its hits."""

COMMANDS = {
    "run": [
        "run chat --requests 20",
        "run chat --requests 60 -p streams",
        "run device.toml --requests 20 -p adaptive",
        "run copies.toml --requests 20",
        "run assistant -p vllm --replicas 2 --router least-load",
        "run apart.toml --requests 20",
    ],
    "compare": [
        "compare chat --requests 20 -p paged -p vllm -p streams -p oracle --replications 2 --scheduler llama-server "
        "-p lowest-cell --plugin mine.py",
        "compare chat --requests 5 -p ring --model llama-3.1-8b --device rtx4090",
        "compare drafts.toml --draft-tokens 0,2",
    ],
    "sweep": ["sweep sweep.toml --requests 20 --out sweep.sqlite --workers 1 --plugin mine.py"],
    "why": ["why chat -p streams"],
    "recommend": [
        "recommend --scenario chat --slo ttft_p95<200ms --model llama-3.1-8b --requests 20 --workers 1",
        "recommend --scenario few.toml --slo ttft_p95<15ms --engine llamacpp --workers 1 --verify ./serve "
        "--verify-url http://127.0.0.1:PORT --verify-requests 2 --now 'llama-server -c 2048 -np 2'",
        "recommend --scenario chat --slo ttft_p95<1s --model qwen3-14b --requests 20 --workers 1 --device h100_sxm "
        "--device rtx4090 --price h100_sxm=2",
    ],
    "plan": [
        "plan --model gemma-3-1b --memory 24GB",
        "plan --model gemma-3-1b",
        "plan --model gemma-3-1b --device l40s",
        "plan --model lfm2-1.2b",
    ],
    "check": [
        "check OLLAMA_NUM_PARALLEL=4 --model llama-3.1-8b --weights q4_k_m --memory 12GiB",
        "check 'llama-server -c 8192 -np 4 -ctk q8_0' --model qwen3-8b --device rtx4090 --users 9",
        "check 'vllm serve --max-model-len 9000' --model qwen3-8b --device rtx4090",
    ],
    "prefix-cache": ["prefix-cache sessions.toml"],
    "questions": ["questions slow"],
    "policies": ["policies paged"],
    "scenario show": ["scenario show chat"],
    "workload describe": [
        "workload describe sessions.toml",
        "workload describe small.toml",
        "workload describe answers.jsonl",
    ],
    "workload fit": ["workload fit small.toml"],
    "calibrate --from": ["calibrate --from table.md --model llama-3.1-8b --out corrected.json"],
    "profile list": ["profile list"],
    "profile import": ["profile import tables --out mine.json"],
    "validate": ["validate small.toml --profile default --requests 4 -p paged -p contiguous"],
    "validate --recorded": [
        "validate --recorded server.jsonl --profile default",
        "validate --recorded wide.jsonl narrow.jsonl again.jsonl untimed.jsonl",
    ],
    "validate --published": ["validate --published --points points.csv"],
    "conform": ["conform llamacpp other.jsonl", "conform llama-server late.jsonl"],
    "memory": ["memory --model tiny --slots 1 --context 64 --tokens 16 -r once"],
    "accuracy": [
        "accuracy --model tiny --tokens 40",
        "accuracy --model tiny --tokens 40 --passages 2 --policy h2o --budget 16",
    ],
}
"""Small runs whose output together has every key of a section."""

NAMES = {
    "axis": r"\w+\.\w+",
    "load": "running|waiting",
    "regime": "decode|mixed",
    "measure": "|".join((*MEASURES, "truncated_share")),
    "cause": "|".join(CAUSES),
}
"""What names in angle brackets stand for, as far as it is known."""
DOCUMENTED = {
    section: [(key, meaning) for cell, meaning in rows(text) for key in re.findall(r"`([^`]+)`", cell)]
    for section, text in sections("json.md").items()
}


def paths(value, at=()):
    """Where the leaves of an object are: paths of keys, with ``[]`` for any entry of a list."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from paths(inner, (*at, key))
    elif isinstance(value, list) and value:
        for inner in value:
            yield from paths(inner, (*at, "[]"))
    else:
        yield (*at, "[]") if isinstance(value, list) else at


def parts(key):
    """A key of the page as a pattern of a path."""
    return tuple(key.replace("[]", ".[]").split("."))


def fits(pattern, path):
    """Whether a path is the pattern's."""
    if pattern[-1:] == ("*",) and len(path) >= len(pattern):
        pattern, path = pattern[:-1], path[: len(pattern) - 1]
    return len(pattern) == len(path) and all(map(matches, pattern, path))


def matches(part, key):
    """Whether a key is that part of a pattern, in which a name in angle brackets stands for what it may be."""
    stands_for = re.sub(r"<(\w+)>", lambda name: f"(?:{NAMES.get(name[1], '.+')})", part.replace("[]", r"\[\]"))
    return re.fullmatch(stands_for, key) is not None


def compare(documented, found):
    """Keys of the output that are not on the page, and keys on the page that are not in the output."""
    patterns = [parts(key) for key in documented]
    unknown, met = set(), set()
    for path in found:
        fitting = {p for p in patterns if fits(p, path)}
        met |= fitting
        # What is null or empty has no keys of its own.
        if not fitting and not any(p[: len(path)] == path for p in patterns):
            unknown.add(".".join(path))
    return unknown, {".".join(p) for p in patterns if p not in met}


def stepped_recordings():
    """Recordings with steps of one server under two settings, one of them twice; and one without times."""
    narrow = {**LLAMA, "flags": ["-np", "1", *LLAMA["flags"]]}
    wide = llama_recording()
    return {
        "wide": wide,
        "again": wide,
        "narrow": llama_recording(header=narrow),
        "untimed": changed(wide, 0, lambda meta: meta.update(timed=False)),
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with what the commands read."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "mine.py").write_text(next(block for block in blocks("add-a-policy.md", "python") if "(Policy)" in block))
    texts = {"small": SMALL, "device": DEVICE, "copies": COPIES, "sessions": SESSIONS, "sweep": SWEEP, "few": FEW}
    texts |= {"apart": APART, "drafts": DRAFTS}
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "port").write_text(str(port))
    (folder / "serve").write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAM} --port {port} "$@"\n')
    (folder / "serve").chmod(0o755)
    (folder / "server.jsonl").write_text(text_of(recorded()))
    for name, lines in stepped_recordings().items():
        write(folder / f"{name}.jsonl", lines)
    write_tables(folder / "tables")
    write_points(folder / "points.csv")
    (folder / "table.md").write_text(TABLE)
    (folder / "answers.jsonl").write_text(ANSWER)
    records = [*ERA_A[:2], ERA_A[2] | {"head": 11}]
    (folder / "other.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    write(folder / "late.jsonl", late(0.0098))
    return folder


@pytest.fixture
def files(made, monkeypatch):
    """That folder to be in, where searches are short; what was loaded from files is forgotten afterwards."""
    monkeypatch.chdir(made)
    monkeypatch.setattr(plugins, "_files", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(recommend.__kwdefaults__, "budget", SearchBudget(24, 8, 4, 2, 2, 1))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("section", COMMANDS)
def test_the_page_has_the_keys_of_the_output(section, files):
    port = (files / "port").read_text()
    found = set()
    for line in COMMANDS[section]:
        done = command(*shlex.split(line.replace("PORT", port)), "--json")
        assert done.stdout, done.stderr
        found |= set(paths(json.loads(done.stdout)))
    if section == "recommend":  # Whose command searches for minutes where one server does not suffice.
        found |= set(paths(ask_of_many("rtx4090").to_dict()))
    unknown, missing = compare([key for key, _ in DOCUMENTED[section]], found)
    assert (unknown, missing) == (set(), set())


def profiles():
    """What calibrating prints is the profile that it saves; the shipped ones were made so."""
    found = [load_profile(name) for name in ("default", "h100_sxm-llama-3.1-8b")]
    found[1] = found[1].model_copy(update={"host": found[1].host_share})  # As with --host-ms.
    a_second = Coefficient(value=1.0, low=1.0, high=1.0)
    copies = HostCopyCost(out_per_cell_s=a_second, in_per_cell_s=a_second)
    mixed = PassCosts(**{name: getattr(found[0], name) for name in PassCosts.model_fields})
    found.append(found[0].model_copy(update={"host_copies": copies, "front_end_s": a_second, "mixed": mixed}))
    by = Corrected(by="llama-bench", rows=2, error_median=0.1, error_p90=0.2)
    found.append(find_device_profile("qwen3-8b", "gb200").model_copy(update={"corrected": by, "served_as": ("a",)}))
    return [profile.model_dump(mode="json") for profile in found]


def live_recording():
    times = {name: {"p50": 1.0, "p90": 1.0, "mean": 1.0} for name in ("ttft_ms", "tpot_ms")}
    run = ("vllm", "vllm", 2, 1, 1, "0: no", "no (request 0)", None, False, times, ("a",), ("b",))
    return LiveRecording(Path("mine"), *run, stopped="gone", interrupted=False).to_dict()


def asked_servers():
    compared = validate_recorded(["wide.jsonl", "narrow.jsonl", "untimed.jsonl"])
    share = ProcessorShare(waited=0.1, others=0.1, idle=0.0, stolen=0.0, load=1.0, cores=2)
    held = held_in(compared.runs, [share], read_slo("ttft_p95<1s"))
    told = LiveValidation((), (ServerHeld("http://127.0.0.1:8080", compared.runs, held),), compared).to_dict()
    return {**told, "recordings": [{"file": "a"}]}


RESULTS = {
    "calibrate": profiles,
    "record": lambda: [Recording(Path("mine"), "llama.cpp", "streams", 1, 1, None).to_dict()],
    "observe": lambda: [ObservedSummary(files=[Path("mine.jsonl")], failures=Counter(unreachable=1)).to_dict()],
    "tune": lambda: [replace(tuned(measured=(0.3, 0.1)), assumed=("a",), seconds={"try": 1.0}).to_dict()],
    "record --url": lambda: [live_recording()],
    "validate --url": lambda: [asked_servers()],
}
"""What commands print that need a server, an engine or a minute; their results do not."""


@pytest.mark.slow
@pytest.mark.parametrize("section", RESULTS)
def test_a_result_has_the_keys_of_the_page(section, files):
    found = {path for told in RESULTS[section]() for path in paths(told)}
    assert compare([key for key, _ in DOCUMENTED[section]], found) == (set(), set())


@pytest.mark.slow
@pytest.mark.skipif(bool(SMOLLM2_MISSING), reason=SMOLLM2_MISSING)
def test_a_generated_text_has_the_keys_of_the_page():
    told = json.loads(command("generate", "Hello", "-n", "2", "--json").stdout)
    assert compare([key for key, _ in DOCUMENTED["generate"]], set(paths(told))) == (set(), set())


def test_every_section_is_compared():
    assert set(DOCUMENTED) == {*COMMANDS, *RESULTS, "generate"}


def test_what_is_missing_on_either_side_is_found():
    """The control."""
    output = set(paths({"a": 1, "b": [{"c": 1, "odd": 2}], "d": {"x_low": 1, "y": 2}, "e": []}))
    assert compare(["a", "b[].c", "d.<name>_low", "e[].f", "g"], output) == ({"b.[].odd", "d.y"}, {"e.[].f", "g"})
