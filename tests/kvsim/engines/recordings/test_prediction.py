"""Recordings with steps: those of servers of our own, whose costs and pace are known, must be predicted as they are."""

import functools
import json
from dataclasses import replace

import numpy as np
import pytest

from kvsim.costs.cost_model import CostModel
from kvsim.engines.recordings.run_pace import step_times
from kvsim.engines.recordings.steps import FrontEnd, SentAfter
from kvsim.engines.recordings.validation import read_recording, validate_recorded
from kvsim.errors import UserError
from tests.kvsim.engines.recordings import changed
from tests.kvsim.engines.recordings.stepped_servers import (
    FRONT_END,
    KNOWN,
    LLAMA,
    VLLM,
    Asked,
    asked,
    llama_recording,
    vllm_recording,
)
from workloads import Segment
from workloads.request import answer_of

MAKERS = {"llama-server": llama_recording, "vllm": vllm_recording}
both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")


@functools.cache
def usual(make):
    """A recording as it comes."""
    return make()


def error(run, measure, statistic="mean", column="error"):
    return float(run.table.set_index(["measure", "statistic"]).loc[(measure, statistic), column])


def step_error(run, column, kind="all"):
    return float(run.steps.set_index("kind").loc[kind, column])


@pytest.mark.slow
@both
def test_with_the_costs_of_the_server_everything_is_predicted(write, make):
    (run,) = validate_recorded(write(usual(make)), KNOWN).runs
    assert len(run.recording.steps) > 200
    assert run.recording.clients.front_end == pytest.approx(FRONT_END, abs=1e-9)
    assert run.table["error"].abs().max() < 1e-9
    assert step_error(run, "spread") < 1e-9
    assert run.pace == pytest.approx((1.0, 1.0))
    assert (run.within, run.spread, run.fitted_to, run.warnings) == (True, None, None, ())
    for measure in LATENCIES:
        assert run.requests[f"predicted_{measure}"].to_numpy() == pytest.approx(
            run.requests[f"measured_{measure}"].to_numpy(), nan_ok=True
        )


@pytest.mark.slow
@both
def test_other_costs_are_seen(write, make):
    """The control: what a server's own pace cannot explain."""
    dear = KNOWN.mixed.model_copy(update={"matmul_slopes_s": (KNOWN.matmul_slopes_s[0],)})
    other = KNOWN.model_copy(update={"mixed": dear})
    (run,) = validate_recorded(write(usual(make)), other).runs
    assert step_error(run, "error", "decode") == pytest.approx(0, abs=1e-9)
    assert step_error(run, "error", "mixed") > 0.3
    assert error(run, "ttft_s", column="unpaced") > 0.2


@pytest.mark.slow
@both
def test_a_profile_is_fitted_to_other_recordings_of_the_server(write, make):
    first = write(make(Asked(asked(45, seed=1))), "first.jsonl")
    second = write(make(Asked(asked(45, seed=2))), "second.jsonl")
    done = validate_recorded([first, second])
    assert [run.fitted_to for run in done.runs] == ["the steps of second", "the steps of first"]
    for run in done.runs:
        assert abs(step_error(run, "error")) < 0.02
        assert abs(error(run, "e2e_s")) < 0.02
        assert run.spread is None
    assert done.rankings == ()


@pytest.mark.slow
@both
def test_alone_it_is_fitted_to_the_steps_that_are_not_compared(write, make):
    path = write(usual(make))
    (run,) = validate_recorded(path).runs
    assert run.fitted_to == "every other of its own steps"
    assert run.profile.samples == len(run.recording.steps) - step_error(run, "steps")
    assert abs(step_error(run, "error")) < 0.02
    assert run.profile.front_end_s.value == pytest.approx(FRONT_END.both_s, abs=1e-6)


@pytest.mark.slow
@both
def test_settings_that_cost_otherwise_are_taken_where_there_is_nothing_else(write, make):
    header = {
        llama_recording: {
            **LLAMA,
            "flags": [*LLAMA["flags"], "-fa", "off"],
            "server": LLAMA["server"] | {"flash_attn": "off"},
        },
        vllm_recording: {**VLLM, "engine": VLLM["engine"] | {"async_scheduling": False}},
    }[make]
    done = validate_recorded([write(usual(make), "a.jsonl"), write(make(header=header), "b.jsonl")])
    assert [run.fitted_to for run in done.runs] == [
        f"the steps of {name}, whose attention or scheduling is set otherwise" for name in "ba"
    ]


@pytest.mark.slow
def test_recordings_of_different_servers_tell_nothing_of_each_other(write):
    done = validate_recorded([write(usual(llama_recording), "a.jsonl"), write(usual(vllm_recording), "b.jsonl")])
    assert {run.fitted_to for run in done.runs} == {"every other of its own steps"}


def slow_in_the_middle(at_s):
    return 1.3 if 8 <= at_s < 16 else 1.0


@pytest.mark.slow
@both
def test_the_pace_of_the_machine_is_found(write, make):
    ask = Asked(asked(70), pace=slow_in_the_middle)
    (run,) = validate_recorded(write(make(ask)), KNOWN).runs
    assert run.pace == pytest.approx((1.0, 1.3), abs=0.03)
    times = step_times(run.recording.steps, run.recording.kernel, CostModel(KNOWN))
    off = times.measured_s / times.predicted_s
    slow = (times.start_s >= 8) & (times.start_s < 16)
    assert off[slow] == pytest.approx(1.3)
    assert off[~slow] == pytest.approx(1.0)
    assert abs(step_error(run, "at_pace")) < 0.01
    assert abs(error(run, "e2e_s")) < 0.02
    assert error(run, "e2e_s", column="unpaced") < -0.04


@pytest.mark.slow
@both
def test_a_machine_that_is_slow_all_the_time_shows_at_the_profiles_own_pace(write, make):
    (run,) = validate_recorded(write(make(Asked(pace=lambda _: 1.3))), KNOWN).runs
    assert step_error(run, "error") == pytest.approx(1 / 1.3 - 1)
    assert step_error(run, "at_pace") == pytest.approx(0, abs=1e-9)
    assert run.pace == pytest.approx((1.3, 1.3))
    assert run.table["error"].abs().max() < 1e-6


@pytest.mark.slow
@both
def test_runs_of_the_same_requests_tell_the_spread(write, make):
    paces = {"a.jsonl": 1.0, "b.jsonl": 1.2}
    paths = [write(make(Asked(asked(20), pace=lambda _, pace=pace: pace)), name) for name, pace in paces.items()]
    paths.append(write(make(Asked(asked(20, seed=5))), "other.jsonl"))
    first, second, other = validate_recorded(paths, KNOWN).runs
    assert set(first.spread.runs) == set(second.spread.runs) == {"a", "b"}
    means = [run.requests["measured_e2e_s"].mean() for run in (first, second)]
    assert error(first, "e2e_s", column="spread") == pytest.approx(means[1] / means[0] - 1)
    assert error(first, "e2e_s", column="spread") > 0.15
    # One whose requests were not sent again has the spread of those that were.
    assert other.spread.of == first.spread.of


@pytest.mark.slow
def test_settings_are_ranked_where_the_same_requests_were_sent(write):
    narrow = {**LLAMA, "flags": ["-np", "1", "-c", "2048", "-b", "128", "-ub", "64", "--cache-ram", "0", "-t", "1"]}
    ask = Asked(asked(40))
    paths = [write(llama_recording(ask, header), name) for header, name in ((LLAMA, "a.jsonl"), (narrow, "b.jsonl"))]
    done = validate_recorded(paths, KNOWN)
    assert [ranking.measure for ranking in done.rankings] == ["ttft_s", "e2e_s"]
    for ranking in done.rankings:
        assert ranking.table["settings"].tolist() == [" ".join(LLAMA["flags"]), " ".join(narrow["flags"])]
        assert (ranking.tau, ranking.wrong) == (1.0, 0)
    assert done.to_dict()["rankings"][0]["kendall_tau"] == 1.0


def closed_loop(users=4, turns=6):
    """Chats: each turn goes on from the answer of the last, and comes some time after it."""
    requests, after = [], {}
    for number in range(users * turns):
        turn, user = divmod(number, users)
        earlier = [*range(user, number, users)]
        content = (Segment(user, 0, 20 + 8 * turn),)
        if earlier:
            before = requests[earlier[-1]]
            answer = Segment(answer_of(before.id, before.output_tokens).source, 0, before.output_tokens)
            content = (*before.content, answer, Segment(100 + number, 0, 9))
            after[number] = SentAfter((earlier[-1],), 0.05 * (1 + number % 3))
        one = asked(1)[0]
        requests.append(
            one._replace(
                id=number,
                arrival_s=0.1 + 0.07 * number,
                prompt_tokens=sum(segment.n for segment in content),
                output_tokens=5 + number % 4,
                content=content,
            )
        )
    return Asked(requests, after=after)


@pytest.mark.slow
def test_who_waits_for_an_answer_comes_when_it_has_ended(write):
    """Also at another pace: whoever waited longer comes later, in the prediction as in the recording."""
    cached = {**VLLM, "engine": VLLM["engine"] | {"prefix_caching": True}}
    lines = vllm_recording(replace(closed_loop(), pace=lambda _: 1.3), cached)
    for line in lines:  # As recordings name texts that are answers.
        for segment in line.get("prompt", ()):
            for number in range(24):
                if segment[0] == answer_of(number, 1).source:
                    segment[0] = f"out:{number}"
    (run,) = validate_recorded(write(lines), KNOWN).runs
    assert len(run.recording.clients.after) == 20
    assert sum(line.get("hit", 0) for line in lines) > 100
    assert run.table["error"].abs().max() < 1e-6
    assert error(run, "e2e_s", column="unpaced") == pytest.approx(1 / 1.3 - 1, abs=0.03)
    alone = validate_recorded(write([{k: v for k, v in line.items() if k != "after"} for line in lines]), KNOWN)
    assert len(alone.runs[0].recording.clients.after) == 0
    assert error(alone.runs[0], "e2e_s", column="unpaced") == pytest.approx(1 / 1.3 - 1, abs=0.2)


def test_a_burst_comes_after_all_of_the_burst_before_it(write):
    ask = Asked([request._replace(arrival_s=0.2) for request in asked(8)])
    first = llama_recording(ask)
    ends = {line["id"]: line["done_s"] for line in first if line["type"] == "request"}
    after = {number: SentAfter(tuple(range(8)), 0.3) for number in range(8, 16)}
    requests = [
        *ask.requests,
        *(r._replace(arrival_s=0.0, id=r.id + 8, content=(Segment(r.id + 50, 0, r.prompt_tokens),)) for r in asked(8)),
    ]
    lines = llama_recording(Asked(requests, after=after))
    for line in lines:
        if line["type"] == "request":
            line["group"] = f"burst{line['id'] // 8}"
            if "after" in line:
                line["after"] = -1
    (run,) = validate_recorded(write(lines), KNOWN).runs
    assert run.recording.clients.after[9] == SentAfter(tuple(range(8)), 0.3)
    assert run.requests["arrival_s"].iloc[-1] == pytest.approx(max(ends.values()) + 0.3)
    assert run.table["error"].abs().max() < 1e-6


@pytest.mark.slow
def test_requests_that_failed_or_were_empty_are_not_compared(write):
    ask = asked(40)
    long = ask[7]._replace(prompt_tokens=600, content=(Segment(77, 0, 600),))
    lines = llama_recording(Asked([*ask[:7], long, *ask[8:]]))
    (failed,) = [line for line in lines if line.get("error")]
    empty = {**failed, "id": 90, "prompt": [], "raw_prompt": "", "task": 90, "status": 200}
    at = lines.index(failed)
    (run,) = validate_recorded(write([*lines[:at], failed, empty, *lines[at + 1 :]]), KNOWN).runs
    assert failed["id"] == 7
    assert len(run.requests) == 39
    assert run.warnings == ()
    assert run.table.query("measure in @LATENCIES")["error"].abs().max() < 1e-6


def test_more_requests_that_fail_in_the_simulation_are_named(write):
    """The recording says that a prompt was answered which is longer than a slot."""
    lines = llama_recording(Asked(asked(30)))
    at = next(at for at, line in enumerate(lines) if line.get("id") == 3)
    lines[at]["prompt"] = [["#7", 0, 600]]
    lines = [line for line in lines if line["type"] != "step"]
    (run,) = validate_recorded(write(lines), KNOWN).runs
    assert run.warnings[0] == "server: 1 more request failed in the simulation"


def test_no_verdict_on_steps_much_larger_than_those_of_the_profile(write):
    small = KNOWN.model_copy(update={"tokens": KNOWN.tokens.model_copy(update={"high": 4})})
    (run,) = validate_recorded(write(usual(vllm_recording)), small).runs
    assert run.within is None


def test_too_few_steps_to_fit_to(write):
    with pytest.raises(UserError, match="shows too few steps to tell what its server's cost; name other recordings"):
        validate_recorded(write(llama_recording(Asked(asked(3)))))
    (run,) = validate_recorded(write(llama_recording(Asked(asked(3)))), KNOWN).runs
    assert run.table["error"].abs().max() < 1e-6


def named(file):
    return {**LLAMA, "model": {"file": file}}


@pytest.mark.parametrize(
    ("file", "model"),
    [
        ("tiny", "other"),
        # A model that we do not know is simulated as any other; that does not make it one of ours.
        ("a-model-of-nobody.gguf", "tiny"),
        ("a-model-of-nobody.gguf", "another.gguf"),
    ],
)
def test_a_profile_of_another_model_is_refused(write, file, model):
    with pytest.raises(UserError, match=f"no times for {file}: profile known is of {model}"):
        validate_recorded(
            write(llama_recording(Asked(asked(3)), named(file))), KNOWN.model_copy(update={"model": model})
        )


@pytest.mark.parametrize(
    ("file", "model", "name"),
    [
        ("a-model-of-nobody.gguf", "/models/a-model-of-nobody.gguf", "a-model-of-nobody.gguf"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2", "smollm2-135m"),
    ],
)
def test_a_profile_of_the_same_file_or_name_is_taken(write, file, model, name):
    profile = KNOWN.model_copy(update={"model": model})
    (run,) = validate_recorded(write(llama_recording(Asked(asked(3)), named(file))), profile).runs
    assert run.table["error"].abs().max() < 1e-6
    assert run.to_dict()["model"] == name


@pytest.mark.slow
@both
def test_without_steps_those_are_compared_that_clients_saw(write, make):
    """The front end is known no longer: it is taken for part of the prompts' steps, which clients time."""
    lines = make(Asked(front_end=FrontEnd(0.0, 0.0)))
    seen = [line for line in lines if line["type"] in ("meta", "source", "request")]
    whole, part = (validate_recorded(write(each), KNOWN).runs[0] for each in (lines, seen))
    assert part.recording.seen
    assert 50 < len(part.recording.steps) < len(whole.recording.steps)
    assert step_error(part, "spread") < 1e-9
    assert part.table["error"].abs().max() < 1e-6
    known = {round(step.output_s, 6): step for step in whole.recording.steps}
    for step in part.recording.steps:
        own = known[round(step.output_s, 6)]
        assert step.seconds == pytest.approx(own.seconds)
        for a, b in zip(step.works, own.works, strict=True):
            assert (a.tokens, a.chunks, sorted(a.scans)) == (b.tokens, b.chunks, sorted(b.scans))


@pytest.mark.slow
def test_the_front_end_of_a_profile_is_used_where_clients_alone_say_when(write):
    slow = FrontEnd(0.05, 0.05)
    lines = [line for line in llama_recording(Asked(front_end=slow)) if line["type"] in ("meta", "source", "request")]
    known = KNOWN.model_copy(update={"front_end_s": KNOWN.kernels["gather"].base_s.model_copy(update={"value": 0.1})})
    path = write(lines)
    (run,) = validate_recorded(path, known).runs
    assert run.table["error"].abs().max() < 1e-6
    assert run.recording.clients.front_end == (0.0, 0.0)


@pytest.mark.slow
def test_times_that_mean_nothing_are_left_out_with_a_line(write):
    timed = write(usual(vllm_recording), "timed.jsonl")
    untimed = write(changed(usual(vllm_recording), 0, lambda meta: meta.update(timed=False)), "untimed.jsonl")
    done = validate_recorded([untimed, timed], KNOWN)
    assert [run.name for run in done.runs] == ["timed"]
    assert done.left_out == (
        f"{untimed}: its times mean nothing (timed is false); kvsim conform compares its decisions",
    )
    assert done.to_dict()["left_out"] == list(done.left_out)
    with pytest.raises(UserError, match="its times mean nothing"):
        validate_recorded(untimed, KNOWN)


@pytest.mark.slow
def test_what_is_printed_as_json_is_json(write):
    told = json.loads(json.dumps(validate_recorded(write(usual(llama_recording)), KNOWN).to_dict(), allow_nan=False))
    (run,) = told["runs"]
    assert run["pace"] == pytest.approx([1, 1])
    assert (run["within"], run["network_s"], run["spread_of"]) == (True, None, None)
    assert {row["kind"] for row in run["steps"]} == {"all", "decode", "mixed"}
    assert {row["unfitted"] for row in run["measures"]} == {None}


@both
def test_the_samples_of_a_fit_are_the_steps(write, make):
    recording = read_recording(write(usual(make)))
    samples = recording.samples
    assert [sample.seconds for sample in samples] == [step.seconds for step in recording.steps]
    origins = np.array([sample.origin for sample in samples])
    assert origins[0] == 0
    assert (np.diff(origins) >= 0).all()
    assert np.bincount(origins)[:-1].tolist() == [20] * (len(samples) // 20)
