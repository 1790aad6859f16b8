"""Recorded servers: what a recording may look like, and replays of runs of our own, which must agree exactly."""

import gzip
import json

import numpy as np
import pandas as pd
import pytest

import kvsim
from kvsim.costs.load_profile import load_profile
from kvsim.costs.under_load import Host, host_share
from kvsim.engines.recordings.latencies import fitted_network_s
from kvsim.engines.recordings.recorded_server import read_recorded_server
from kvsim.engines.recordings.validation import validate_recorded
from kvsim.engines.recordings.vllm_scenario import replay_scenario, vllm_behaviour
from kvsim.errors import UserError
from kvsim.model.recorded_names import recorded_model
from kvsim.simulation.run import run
from tests.kvsim.engines.recordings import changed
from tests.kvsim.engines.recordings.servers import BLOCK_SIZE, BLOCKS, PROFILE, recorded, recording, text, world
from tests.paths import REFERENCE
from tests.worlds import command
from workloads import WorkloadError

RUNS = sorted((REFERENCE / "vllm-gpu" / "runs").glob("*.jsonl.gz"))
TWO_RANKS = REFERENCE / "vllm-gpu" / "more-runs" / "rtxpro6000-qwen3-30b-a3b-dp2.jsonl.gz"
OF_H100 = sorted((REFERENCE / "vllm-gpu" / "more-runs").glob("h100-*.jsonl.gz"))
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")


@pytest.fixture(scope="module")
def lines():
    return recorded()


def close(run_):
    """Whether every figure of a run is as measured."""
    return (run_.table["error"].abs() < 1e-9).all()


# Replays


def test_a_replay_of_a_run_of_our_own_agrees(write, lines):
    done = validate_recorded(write(lines), PROFILE)
    (server,) = done.runs
    assert close(server)
    assert done.worst < 1e-9
    assert server.network_s == pytest.approx(0, abs=1e-9)
    for measure in LATENCIES:
        assert server.requests[f"predicted_{measure}"].to_numpy() == pytest.approx(
            server.requests[f"measured_{measure}"].to_numpy(), nan_ok=True, abs=1e-9
        )
    assert server.preemptions == server.recording.preemptions > 0
    assert [load["difference"] for load in server.loads.values()] == [0, 0]


def test_another_number_of_blocks_is_seen(write, lines):
    """The control."""
    more = changed(lines, 0, lambda meta: meta.update(num_gpu_blocks=4 * BLOCKS))
    (server,) = validate_recorded(write(more), PROFILE).runs
    assert server.worst > 0.05
    assert server.preemptions < server.recording.preemptions


def test_shared_beginnings_of_prompts_are_found_again(write):
    chats = {"kind": "sessions", "sessions": 8, "rate": 4.0, "turns": {"kind": "fixed", "value": 1}}
    scenario = world({**chats, "system_prompts": 1, "system_tokens": {"kind": "fixed", "value": 96}})
    result = run(scenario, detail="tables")
    assert result.summary["prefix"]["found"] > 0
    (server,) = validate_recorded(write(recording(scenario, result)), PROFILE).runs
    assert close(server)
    apart = recording(scenario, result)
    for number, row in enumerate(apart):
        if row["kind"] == "request":
            row["prompt"] = [[f"own {number}", 0, sum(n for _, _, n in row["prompt"])]]
    (server,) = validate_recorded(write(apart), PROFILE).runs
    assert not close(server)


def test_what_is_not_the_engines_is_one_constant_by_a_clients_clock(write):
    path = write(recorded(later_s=0.05))
    (server,) = validate_recorded(path, PROFILE).runs
    assert server.network_s == pytest.approx(0.05)
    assert server.worst < 1e-9
    table = server.table.set_index(["measure", "statistic"])
    assert (table.loc["ttft_s", "unfitted"] < -0.01).all()
    assert (table.loc["tpot_s", "unfitted"] == table.loc["tpot_s", "error"]).all()


def test_a_queue_is_not_taken_for_the_network(write, lines):
    """Where only requests that wait are slower than predicted, the constant stays 0."""
    slow = json.loads(json.dumps(lines))
    waits = validate_recorded(write(lines), PROFILE).runs[0].requests
    late = set(waits.sort_values("measured_ttft_s")["id"].iloc[len(waits) // 2 :])
    for row in slow:
        if row.get("id") in late:
            row["first_token_s"] += 1.0
            row["last_token_s"] += 1.0
    (server,) = validate_recorded(write(slow), PROFILE).runs
    assert server.network_s == pytest.approx(0, abs=1e-9)
    assert server.worst > 0.05


def test_by_the_engines_clock_a_request_arrives_when_it_is_taken_in(write):
    """Two requests that came during a step, noted at its end, as vLLM does; nothing is fitted."""
    scenario = world({"kind": "batch", "requests": 6, "output_tokens": {"kind": "fixed", "value": 9}})
    result = run(scenario, detail="tables")
    (server,) = validate_recorded(write(recording(scenario, result, {"clock": "engine"})), PROFILE).runs
    assert server.network_s is None
    assert close(server)
    rows = recording(scenario, result, {"clock": "engine"})
    step = result.passes["seconds"].iloc[0]
    rows[2]["arrival_s"] = step / 2
    (server,) = validate_recorded(write(rows), PROFILE).runs
    taken_in = server.requests["predicted_e2e_s"].iloc[-1]
    assert taken_in > 0
    late = server.requests[server.requests["arrival_s"] > 0]
    assert len(late) == 1


def test_without_blocks_they_are_those_of_the_memory_plan(write, lines):
    memory = 8 << 30

    def unknown(meta):
        meta.update(num_gpu_blocks=None, device_memory_bytes=memory, tensor_parallel_size=2)

    scenario, assumed = replay_scenario(read_recorded_server(write(changed(lines, 0, unknown))), PROFILE)
    plan = kvsim.plan(
        "tiny",
        ctx=400,
        parallel=8,
        engine="vllm",
        batch=128,
        block_size=BLOCK_SIZE,
        type_k="f32",
        type_v="f32",
        tensor_parallel=2,
        vllm_version="0.19.0",
        memory=memory,
    )
    assert scenario.cache.cells == plan.vllm_blocks(memory) * BLOCK_SIZE
    assert any("as the memory plan of 2 devices has it" in line for line in assumed)


def test_a_device_that_is_known_tells_its_memory(write, lines):
    def unknown(meta):
        meta.update(num_gpu_blocks=None, device="NVIDIA GeForce RTX 4090")

    scenario, _assumed = replay_scenario(read_recorded_server(write(changed(lines, 0, unknown))), PROFILE)
    assert scenario.cache.cells > 1_000_000


def test_limits_that_were_not_recorded_are_vllms_own_on_the_device(write, lines):
    def unknown(meta):
        meta.update(device="NVIDIA H100 80GB HBM3", max_num_seqs=None, max_num_batched_tokens=None)

    scenario, assumed = replay_scenario(read_recorded_server(write(changed(lines, 0, unknown))), PROFILE)
    assert (scenario.server.slots, scenario.server.n_batch) == (1024, 8192)
    assert any(line.startswith("8,192 tokens in a step, 1,024 sequences") for line in assumed)


def test_no_memory_for_any_block_is_one_line(write, lines):
    tight = changed(lines, 0, lambda meta: meta.update(num_gpu_blocks=None, device_memory_bytes=1 << 20))
    with pytest.raises(UserError, match="leaves no room for blocks"):
        replay_scenario(read_recorded_server(write(tight)), PROFILE)


@pytest.mark.parametrize(
    ("version", "behaviour"),
    [
        ("0.33.0", (True, True, True)),
        ("0.22.1", (True, True, False)),
        ("v0.19.0", (True, True, False)),
        ("0.18.1", (True, False, False)),
        ("0.13.0", (False, False, False)),
    ],
)
def test_what_versions_of_vllm_do_by_default(write, lines, version, behaviour):
    assert vllm_behaviour(version) == behaviour
    scenario, _assumed = replay_scenario(
        read_recorded_server(write(changed(lines, 0, lambda meta: meta.update(version=version)))), PROFILE
    )
    server, cache = scenario.server, scenario.cache
    assert (server.async_scheduling, server.reserve_full, cache.policy == "vllm") == behaviour
    assert cache.cells == BLOCKS * BLOCK_SIZE


@pytest.mark.parametrize("profile", ["default", "mine.json"])
def test_what_was_simulated_can_be_run_as_a_scenario(write, lines, tmp_path, monkeypatch, profile):
    monkeypatch.chdir(tmp_path)
    PROFILE.save("mine.json")
    (server,) = validate_recorded(write(lines), profile).runs
    toml = write(server.scenario.to_toml().encode(), "scenario.toml")
    monkeypatch.chdir("/")
    told = json.loads(command("run", str(toml), "--json", "--detail", "requests").stdout)
    assert told["e2e_s"]["mean"] == pytest.approx(server.requests["measured_e2e_s"].mean())


# Faults of a file

A = {"kind": "request", "id": "a", "arrival_s": 0.0, "prompt": [["p", 0, 9]], "output_tokens": 2}
A |= {"scheduled_s": 0.0, "first_token_s": 1.0, "last_token_s": 2.0}


def spoilt(**keys):
    return lambda row: row.update(keys)


def lost(key):
    return lambda row: row.pop(key)


FAULTS = {
    "no meta": (lambda ls: ls[1:], 1, "kind request; the first line must be meta"),
    "two metas": (lambda ls: [ls[0], *ls], 2, "a second line of kind meta"),
    "another kind": (lambda ls: changed(ls, 3, spoilt(kind="row")), 4, 'kind "row"; expected meta, request, second'),
    "no kind": (lambda ls: changed(ls, 3, lost("kind")), 4, "no key 'kind'"),
    "unknown clock": (lambda ls: changed(ls, 0, spoilt(clock="wall")), 1, "clock \"wall\": input should be 'engine'"),
    "no version": (lambda ls: changed(ls, 0, lost("version")), 1, "no key 'version'"),
    "no block": (lambda ls: changed(ls, 0, spoilt(num_gpu_blocks=0)), 1, "num_gpu_blocks 0: input should be greater"),
    "no arrival": (lambda ls: changed(ls, 2, lost("arrival_s")), 3, "no key 'arrival_s'"),
    "no first token": (lambda ls: changed(ls, 2, lost("first_token_s")), 3, "no key 'first_token_s'"),
    "negative": (lambda ls: changed(ls, 2, spoilt(arrival_s=-1.0)), 3, "arrival_s -1.0 is out of range"),
    "first before arrival": (
        lambda ls: changed(ls, 2, spoilt(arrival_s=2.0, first_token_s=1.0)),
        3,
        "first_token_s 1.0 is before arrival_s 2.0",
    ),
    "last before first": (
        lambda ls: changed(ls, 2, spoilt(first_token_s=9.0, last_token_s=8.0)),
        3,
        "last_token_s 8.0 is before first_token_s 9.0",
    ),
    "scheduled before arrival": (
        lambda ls: changed(ls, 2, spoilt(arrival_s=1.0, scheduled_s=0.5)),
        3,
        "scheduled_s 0.5 is before arrival_s 1.0",
    ),
    "no tokens": (lambda ls: changed(ls, 2, spoilt(output_tokens=0)), 3, "output_tokens 0 is out of range"),
    "a prompt as a number": (lambda ls: changed(ls, 2, spoilt(prompt=70)), 3, "prompt 70 is not a list of segments"),
    "an empty prompt": (lambda ls: changed(ls, 2, spoilt(prompt=[])), 3, "prompt [...] is not a list of segments"),
    "two of three": (
        lambda ls: changed(ls, 2, spoilt(prompt=[["p", 9]])),
        3,
        'prompt: ["p", 9] is not a segment [source, start, n]',
    ),
    "half a token": (
        lambda ls: changed(ls, 2, spoilt(prompt=[["p", 0, 1.5]])),
        3,
        'prompt: ["p", 0, 1.5] is not a segment',
    ),
    "no part of it": (lambda ls: changed(ls, 2, spoilt(prompt=[["p", -1, 5]])), 3, 'prompt: ["p", -1, 5] is not a'),
    "seconds go back": (
        lambda ls: [*ls, {**ls[-1], "t": 0.5}, {**ls[-1], "t": 0.25}],
        None,
        "is earlier than the second before",
    ),
    "more than full": (lambda ls: changed(ls, -1, spoilt(kv_percent=101.0)), None, "kv_percent 101.0 is out of range"),
}


@pytest.mark.parametrize(("spoil", "number", "what"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_one_line_with_the_file_and_the_line(write, lines, spoil, number, what):
    path = write(spoil(lines))
    done = command("validate", "--recorded", str(path), "--profile", "default")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvsim: {path}: line {number or ''}")
    assert what in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_is_cut_is_refused(write, lines):
    whole = text(lines).encode()
    packed = gzip.compress(whole)
    for content, name, what in (
        (whole[: len(whole) // 3], "a.jsonl", "not JSON"),
        (text(lines[:20]).encode(), "b.jsonl", "19 requests, and meta says 40; is the file cut?"),
        (text([*lines, lines[1]]).encode(), "c.jsonl", "a second request 'r-0'"),
        (packed[: len(packed) // 2], "d.jsonl.gz", "damaged gzip data"),
        (b"", "e.jsonl", "empty; a recorded server is expected"),
        (b"\xff\xfe\x00", "f.jsonl", "not UTF-8"),
    ):
        with pytest.raises((UserError, WorkloadError)) as fault:
            read_recorded_server(write(content, name))
        assert name in str(fault.value)
        assert what in str(fault.value)
        assert len(str(fault.value).splitlines()) == 1


def test_a_packed_recording_reads_the_same(write, lines):
    plain = read_recorded_server(write(lines))
    packed = read_recorded_server(write(gzip.compress(text(lines).encode()), "server.jsonl.gz"))
    assert packed.requests == plain.requests
    assert packed.name == plain.name == "server"


def test_requests_in_another_order_are_sorted_and_a_warning_says_so(write, lines):
    end = 1 + lines[0]["requests"]
    mixed = [lines[0], *reversed(lines[1:end]), *lines[end:]]
    (server,) = validate_recorded(write(mixed), PROFILE).runs
    assert close(server)
    assert any(line.endswith("sorted by arrival") for line in server.warnings)


def test_another_engine_is_refused(write, lines):
    other = write(changed(lines, 0, lambda meta: meta.update(engine="sglang")))
    with pytest.raises(UserError, match="engine 'sglang' cannot be simulated; accepted: vllm"):
        validate_recorded(other, PROFILE)


def test_a_profile_of_another_model_says_so(write, lines):
    with pytest.raises(UserError, match=r"no times for llama-3\.1-8b"):
        validate_recorded(
            write(changed(lines, 0, lambda meta: meta.update(model="meta-llama/Llama-3.1-8B"))), load_profile("default")
        )


def test_no_recording_is_refused():
    with pytest.raises(UserError, match="no recording was given"):
        validate_recorded([], PROFILE)


# The command


@pytest.mark.slow
def test_the_command_prints_a_table_for_each_recording_and_saves_a_picture(write, lines, tmp_path):
    first, second = write(lines, "first.jsonl"), write(recorded(later_s=0.05), "second.jsonl")
    out = tmp_path / "out"
    done = command(
        "validate", "--recorded", str(first), str(second), "--profile", "default", "--out", str(out), "--bound", "0.01"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.index("first: vllm 0.19.0") < done.stdout.index("second: vllm 0.19.0")
    assert "The network and the front end take 50 ms" in done.stdout
    assert "Largest error of a latency at mean, P50 or P99: 0.0%" in done.stdout
    assert load_profile("default").basis in done.stdout
    assert "steps are composed one ahead" in done.stdout
    folder = out / "recorded-servers"
    assert (folder / "recorded.png").read_bytes().startswith(b"\x89PNG")
    assert set(pd.read_csv(folder / "recorded.csv")["file"]) == {"first", "second"}


def test_errors_over_the_bound_end_with_1(write, lines):
    path = write(changed(lines, 0, lambda meta: meta.update(num_gpu_blocks=4 * BLOCKS)))
    done = command("validate", "--recorded", str(path), "--profile", "default", "--bound", "0.05", "--json")
    assert done.returncode == 1
    assert done.stderr.startswith("kvsim: the largest error, ")
    told = json.loads(done.stdout)
    assert told["worst_error"] == told["runs"][0]["worst_error"] > 0.05


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (
            ["--engine", "numpy"],
            "--engine means nothing beside --recorded; accepted: --profile, --bound, --out and --json",
        ),
        (["--requests", "5"], "--requests means nothing beside --recorded"),
        (["-p", "paged"], "--policy means nothing beside --recorded"),
    ],
)
def test_options_of_a_real_engine_are_refused(write, lines, arguments, what):
    done = command("validate", "--recorded", str(write(lines)), *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvsim: {what}")
    assert len(done.stderr.splitlines()) == 1


def test_without_recordings_there_is_one_scenario_and_no_picture():
    done = command("validate", "chat", "batch", "--profile", "default")
    assert (done.returncode, done.stderr) == (
        2,
        "kvsim: 2 scenarios; one is accepted, or recordings after --recorded\n",
    )
    done = command("validate", "chat", "--out", "x", "--profile", "none")
    told = "--out is for the pictures of recorded servers (--recorded) and of those asked (--url)"
    assert (done.returncode, done.stderr) == (2, f"kvsim: {told}\n")


def test_a_recording_without_seconds_is_drawn_too(write, lines):
    done = validate_recorded(write([line for line in lines if line["kind"] != "second"]), PROFILE)
    assert done.runs[0].loads == {}
    assert len(done.plot().axes) == 6


@pytest.mark.slow
@pytest.mark.skipif(not RUNS, reason=f"no recordings in {REFERENCE.name}/vllm-gpu/runs beside the project")
def test_recorded_servers_of_others_are_read(write):
    for path in RUNS:
        found = read_recorded_server(path)
        assert len(found.requests) == found.meta.requests == 300
        assert recorded_model(found.meta.model) in ("llama-3.1-8b", "qwen3-32b")
        scenario, _assumed = replay_scenario(found, PROFILE)
        assert scenario.build_workload().n_requests == 300
        if found.meta.num_gpu_blocks is not None:
            assert scenario.cache.cells == found.meta.num_gpu_blocks * found.meta.block_size


@pytest.mark.slow
@pytest.mark.skipif(not RUNS, reason=f"no recordings in {REFERENCE.name}/vllm-gpu/runs beside the project")
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name.split(".jsonl")[0])
def test_recorded_servers_of_others_are_predicted_within_five_percent(path):
    """With the shipped profiles and no setting of its own."""
    (server,) = validate_recorded(path).runs
    assert server.worst <= 0.05
    assert server.table["error"].abs().max() <= 0.05


@pytest.mark.slow
@pytest.mark.skipif(not OF_H100, reason=f"no recordings in {REFERENCE.name}/vllm-gpu/more-runs beside the project")
@pytest.mark.parametrize("path", OF_H100, ids=lambda path: path.name.split(".jsonl")[0])
def test_recorded_servers_from_idle_to_near_saturation_are_predicted_within_eight_percent(path):
    (server,) = validate_recorded(path).runs
    assert server.worst <= 0.08


@pytest.mark.slow
@pytest.mark.skipif(not TWO_RANKS.exists(), reason=f"no {TWO_RANKS.name} in {REFERENCE.name} beside the project")
def test_ranks_that_divide_experts_are_predicted_within_ten_percent():
    (server,) = validate_recorded(TWO_RANKS).runs
    assert server.worst <= 0.1
    assert server.loads["running"]["difference"] < 2


def ranks(lines, **more):
    return changed(lines, 0, lambda meta: meta.update(data_parallel_size=2, clock="engine", **more))


def test_data_parallel_ranks_are_servers_behind_the_engines_own_balancer(write):
    several = world(cluster__replicas=2, cluster__router="vllm/data-parallel")
    (server,) = validate_recorded(write(ranks(recording(several, run(several, detail="tables")))), PROFILE).runs
    assert server.table.query("measure in ['tpot_s', 'output_tokens_s']")["error"].abs().max() < 1e-9
    # The control: as one server.
    alone = changed(recording(several, run(several, detail="tables")), 0, lambda meta: None)
    (server,) = validate_recorded(write(alone), PROFILE).runs
    assert server.worst > 0.05


def test_ranks_that_divide_each_expert_are_refused(write, lines):
    of_experts = ranks(lines, model="Qwen/Qwen3-30B-A3B", device="RTXPRO6000")
    with pytest.raises(UserError, match="data_parallel_size 2 without enable_expert_parallel"):
        validate_recorded(write(of_experts))


def test_a_device_is_asked_with_the_host_of_the_recorded_version(write, lines):
    def on_an_h100(meta):
        meta.update(model="meta-llama/Llama-3.1-8B", device="NVIDIA H100 80GB HBM3", version="0.12.0")

    (server,) = validate_recorded(write(changed(lines, 0, on_an_h100))).runs
    assert server.profile.host == host_share("vllm 0.12.0")
    given = server.profile.model_copy(update={"host": Host(seconds=0.5, source="this test")})
    (server,) = validate_recorded(write(changed(lines, 0, on_an_h100)), given).runs
    assert server.profile.host == given.host


def test_the_constant_of_a_client_does_not_rest_on_which_requests_just_missed_a_step():
    waits = pd.DataFrame(
        {"measured_ttft_s": np.arange(100) / 100, "predicted_ttft_s": np.roll(np.arange(100), 50) / 100}
    )
    assert fitted_network_s(waits) == 0
    assert fitted_network_s(waits.assign(measured_ttft_s=waits["measured_ttft_s"] + 0.01)) == pytest.approx(0.01)
    assert fitted_network_s(waits.iloc[:0]) == 0


def test_a_profile_of_another_device_is_refused(write, lines):
    def on_a_4090(meta):
        meta.update(model="meta-llama/Llama-3.1-8B", device="NVIDIA GeForce RTX 4090", tensor_parallel_size=1)

    with pytest.raises(UserError, match="is of 1 x h100_sxm, not of 1 x rtx4090"):
        validate_recorded(write(changed(lines, 0, on_a_4090)), "h100_sxm-llama-3.1-8b")


def test_a_type_without_times_is_refused(write, lines):
    with pytest.raises(UserError, match="dtype 'fp8'; there are times of bfloat16"):
        validate_recorded(write(changed(lines, 0, lambda meta: meta.update(dtype="fp8"))))
