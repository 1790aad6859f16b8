"""Recordings with steps as they are read: the forms, what is assumed, and files that are none."""

import functools
import gzip
import json
import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsim.engines.recordings.from_vllm import completed, read_vllm
from kvsim.engines.recordings.recorded_server import RecordedServer
from kvsim.engines.recordings.steps import FrontEnd, SentAfter, SteppedServer
from kvsim.engines.recordings.validation import UntimedError, read_recording, validate_recorded
from kvsim.errors import UserError
from tests.kvsim.engines.recordings import changed
from tests.kvsim.engines.recordings.servers import recorded
from tests.kvsim.engines.recordings.stepped_servers import (
    KNOWN,
    LLAMA,
    VLLM,
    Asked,
    asked,
    llama_recording,
    vllm_recording,
)
from tests.vllm_async_model import record_server
from workloads import Segment, WorkloadError
from workloads.request import answer_of

MAKERS = {"llama-server": llama_recording, "vllm": vllm_recording}
both = pytest.mark.parametrize("name", MAKERS)


@functools.cache
def small(name, requests=12, longest=150):
    return MAKERS[name](Asked(asked(requests, longest=longest)))


def at(lines, kind):
    """The number of the third line of a type."""
    return [number for number, line in enumerate(lines) if line["type"] == kind][2]


@pytest.mark.slow
def test_each_form_is_known_by_its_first_line(write):
    plain = read_recording(write(recorded()))
    assert type(plain) is RecordedServer
    for name in MAKERS:
        found = read_recording(write(gzip.compress("".join(json.dumps(line) + "\n" for line in small(name)).encode())))
        assert isinstance(found, SteppedServer)
        assert found.meta.engine == name
        assert len(found.requests) == found.workload.n_requests == 12
        assert [request.asked.arrival_s for request in found.requests] == sorted(r.arrival_s for r in found.workload)


def test_the_steps_of_llama_server_have_the_passes_of_its_batches(write):
    lines = small("llama-server")
    found = read_recording(write(lines))
    steps = [line for line in lines if line["type"] == "step"]
    assert [step.start_s for step in found.steps] == [line["t"] for line in steps]
    assert found.kernel == "tiled"
    assert found.skips
    assert not found.seen
    assert max(work.tokens for step in found.steps for work in step.works) <= 64
    assert max(len(step.works) for step in found.steps) > 1


def test_the_steps_of_vllm_are_those_that_were_recorded(write):
    lines = small("vllm")
    found = read_recording(write(lines))
    steps = [line for line in lines if line["type"] == "step"]
    assert [step.works[0].tokens for step in found.steps] == [sum(n for _, n, _ in line["n"]) for line in steps]
    assert [[cells for _, cells in step.works[0].scans] for step in found.steps] == [
        [start + n for _, n, start in line["n"]] for line in steps
    ]


def test_steps_that_overlap_last_from_output_to_output(write):
    lines = record_server(3, 12, asynchronous=True)
    lines[0] |= {"vllm": "0.32.0", "engine": lines[0]["engine"] | {"model": "tiny"}}
    for line in lines:
        if line["type"] == "request":
            line |= {
                "due": line["engine"],
                "sent": line["engine"],
                "first": line["engine"] + 1,
                "end": line["engine"] + 2,
            }
            line |= {"sched": line["engine"]}
        elif line["type"] == "step":
            line |= {"sched": 0.25, "exec": 1.5, "upd": 0.0}
    found = read_vllm(write(lines), lines[0], lines[1:])
    records = [line for line in lines if line["type"] == "step" and line["n"]]
    assert [step.output_s * 1e3 for step in found.steps] == pytest.approx([line["t"] + 1.75 for line in records])
    before_s, waited = 0.0, 0
    for step, line in zip(found.steps, records, strict=True):
        assert step.start_s == pytest.approx(max(before_s, line["t"] / 1e3))
        assert step.start_s + step.seconds == pytest.approx(step.output_s)
        waited += before_s > line["t"] / 1e3
        before_s = step.output_s
    assert waited > 10


def test_what_requests_waited_for(write):
    lines = small("llama-server")
    first = at(lines, "request")
    chat = changed(lines, first, lambda line: line.update(after=0, think=0.5))
    assert read_recording(write(chat)).clients.after == {2: SentAfter((0,), 0.5)}
    gone = changed(lines, first, lambda line: line.update(after=77, think=0.5))
    assert read_recording(write(gone)).clients.after == {}


def test_in_a_vllm_run_without_a_rate_who_came_to_an_idle_server_waited_for_all_before(write):
    lines = [{k: v for k, v in line.items() if k != "rate_per_s"} for line in small("vllm")]
    for number, line in enumerate(line for line in lines if line["type"] == "request"):
        line["due"], line["end"] = 100.0 * number, 100.0 * number + (150.0 if number % 3 else 90.0)
        line["sent"] = line["due"] + 1
        line["first"] = line["due"] + 2
    after = read_recording(write(lines)).clients.after
    # 0 is alone and 1 begins a group; 1 and 2 overlap, 2 and 3 as well, 3 ends before 4 ...
    assert after[1] == SentAfter((0,), pytest.approx(0.011))
    assert after[2] == after[1]._replace(think_s=pytest.approx(0.111))
    assert set(after[4].requests) == {1, 2, 3}
    assert 0 not in after


@pytest.mark.slow
def test_the_front_end_is_what_lies_before_and_behind_the_steps(write):
    ask = Asked(asked(12), front_end=FrontEnd(0.003, 0.0012))
    for make in MAKERS.values():
        found = read_recording(write(make(ask)))
        assert found.clients.front_end == pytest.approx(ask.front_end, abs=1e-9)
    assert found.clients.there(5) == pytest.approx(0.003)


def test_an_answer_that_is_quoted_is_the_earlier_answer(write):
    lines = small("llama-server")
    first, second = [number for number, line in enumerate(lines) if line["type"] == "request"][:2]
    n = lines[first]["n_predict"]
    quoted = [*lines[first]["prompt"], ["#7", 0, n], ["text1001", 0, 4]]
    chat = changed(lines, second, lambda line: line.update(prompt=quoted, after=0, think=0.0))
    chat = [line for line in chat if line["type"] != "step"]
    contents = {request.id: request.content for request in read_recording(write(chat)).workload}
    assert contents[1][: len(contents[0])] == contents[0]
    assert contents[1][1] == Segment(answer_of(0, n).source, 0, n)


def test_what_a_vllm_server_does_not_say_is_in_its_flags_or_assumed():
    flags = ["--max-num-seqs", "9", "--block-size=32", "--no-enable-prefix-caching"]
    engine, assumed = completed(
        {"engine": {"max_model_len": None}, "flags": flags, "vllm": "0.19.0", "clock": "client"}
    )
    assert (engine["max_num_seqs"], engine["block_size"], engine["max_model_len"]) == (9, 32, 8192)
    assert engine["num_blocks"] == 8192 // 32 * 8
    assert (engine["prefix_caching"], engine["async_scheduling"]) == (False, True)
    assert [line.partition(" (")[0] for line in assumed] == [
        "8,192 tokens",
        f"{engine['max_num_batched_tokens']:,} tokens",
        "2,048 blocks",
    ]
    on_cpu, _ = completed({"engine": {}, "vllm": "0.32.0+cpu", "clock": "client"})
    assert (on_cpu["prefix_caching"], on_cpu["async_scheduling"]) == (True, False)
    whole = VLLM["engine"]
    assert completed({"engine": whole}) == (whole, ())


def test_threads_and_the_machine(write):
    recording = read_recording(write(small("llama-server")))
    assert recording.machine.threads == 1
    header = {
        **LLAMA,
        "flags": LLAMA["flags"][2:],
        "machine": {"cpu": "x", "cores": 3},
        "other_cpu_s": 1.0,
        "server_cpu_s": 3.0,
    }
    again = read_recording(write([header, *small("llama-server")[1:]]))
    assert (again.machine.threads, again.machine.cpu_share) == (3, 0.75)
    assert again.same_server != recording.same_server


def test_untimed_recordings_have_an_error_of_their_own(write):
    for name in MAKERS:
        path = write(changed(small(name), 0, lambda meta: meta.update(timed=False)))
        with pytest.raises(UntimedError, match="its times mean nothing"):
            read_recording(path)


FAULTS = {
    "neither": (lambda ls: [{"type": "meta"}, *ls[1:]], "not a recording of vLLM or llama-server"),
    "no slots": (lambda ls: changed(ls, 0, lambda m: m.update(flags=["-np", "x"], engine={"mode": "server"})), ""),
    "none answered": (
        lambda ls: [line for line in ls if line["type"] in ("meta", "source")],
        "no request was answered",
    ),
    "a step without time": (lambda ls: changed(ls, at(ls, "step"), lambda s: s.pop("t")), "KeyError: 't'"),
    "negative": (
        lambda ls: changed(ls, at(ls, "step"), lambda s: s.update(t=-9e3)),
        "takes",
    ),
    "twice": (
        lambda ls: [*ls[: at(ls, "request")], ls[at(ls, "request")], *ls[at(ls, "request") :]],
        "second request 2|r is 2;",
    ),
    "a list": (lambda ls: changed(ls, at(ls, "request"), lambda r: r.update(prompt=3)), "TypeError"),
    "a type": (lambda ls: [*ls, {"type": "odd"}], "type 'odd' is unknown"),
}


def test_a_step_at_no_possible_time_is_refused(write):
    late = changed(small("vllm"), at(small("vllm"), "step"), lambda step: step.update(t=1e300))
    with pytest.raises(UserError, match="a step at 1e\\+300 ms"):
        read_recording(write(late))


@pytest.mark.parametrize("fault", FAULTS)
@both
def test_a_file_that_is_none_is_refused_in_one_line(write, name, fault):
    spoil, what = FAULTS[fault]
    path = write(spoil(small(name)))
    with pytest.raises(UserError) as refused:
        read_recording(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert re.search(what, str(refused.value))
    assert len(str(refused.value).splitlines()) == 1


@both
def test_a_file_that_is_cut_is_refused_or_predicted(write, name):
    """In the middle of a line it is damaged; between two lines fewer requests, or fewer steps, are left."""
    whole = "".join(json.dumps(line) + "\n" for line in small(name)).encode()
    packed = gzip.compress(whole)
    for content, file, what in (
        (whole[: len(whole) // 2 + 7], "a.jsonl", "not JSON"),
        (packed[: len(packed) // 2], "b.jsonl.gz", "damaged gzip data"),
        (b"", "c.jsonl", "empty; a recorded server is expected"),
    ):
        with pytest.raises((UserError, WorkloadError)) as refused:
            read_recording(write(content, file))
        assert file in str(refused.value)
        assert what in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1
    lines = small(name)
    found = read_recording(write(lines[: -len(lines) // 4]))
    assert 0 < len(found.steps) < sum(line["type"] == "step" for line in lines)


@pytest.mark.slow
@both
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    seed=st.integers(0, 2**32),
    value=st.sampled_from([None, -1, 0, 1, 7.5, 1e300, "", "x", [], {}, [[1, 2, 3]], True, 2**70]),
)
def test_nonsense_is_predicted_or_refused_in_one_line(write, name, seed, value):
    """Any one value of a recording replaced."""
    rng = random.Random(seed)
    lines = small(name, 4, 40)
    kind = rng.choice(["meta", "request", "step", "event"])
    line = rng.choice([number for number, each in enumerate(lines) if each["type"] == kind] or [0])
    spot = lines[line]
    key = rng.choice(sorted(spot))
    inner = rng.choice(sorted(spot[key])) if isinstance(spot[key], dict) and spot[key] and rng.random() < 0.8 else None

    def change(record):
        target, last = (record, key) if inner is None else (record[key], inner)
        target[last] = value

    path = write(changed(lines, line, change))
    try:
        validate_recorded(path, KNOWN).to_dict()
    except (UserError, WorkloadError) as refused:
        said = str(refused)
    else:
        return
    assert len(said.splitlines()) == 1
    assert str(path) in said
