"""Servers that divide the experts of a model: they step together, and each has its share of the experts."""

import json
from itertools import pairwise

import numpy as np
import pytest

from kvsim.costs.device_profiles import find_profile
from kvsim.costs.devices import device_named
from kvsim.costs.load_profile import load_profile
from kvsim.costs.memory_plan import default_cells
from kvsim.costs.physics import PassPhysics
from kvsim.errors import UserError
from kvsim.model.memory_shapes import memory_shape
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.run import run
from tests.worlds import command

MODEL, DEVICE = "qwen3-30b-a3b", "rtxpro6000"
SERVERS = ("--model", MODEL, "--device", DEVICE, "--replicas", "2")


def ran(requests, **workload):
    lengths = {name: {"kind": "fixed", "value": 50} for name in ("prompt_tokens", "output_tokens")}
    named = {
        "name": "two",
        "workload": {"requests": requests, **lengths, **workload},
        "model": {"name": MODEL},
        "machine": {"device": DEVICE, "expert_parallel": 2},
        "cluster": {"replicas": 2},
    }
    result = run(load_scenario(named), detail="tables")
    assert (result.requests["status"] == "completed").all()
    return result


def test_steps_begin_together_and_wait_for_the_slowest():
    passes = ran(60, kind="poisson", rate=20.0).passes
    assert passes["server"].nunique() == 2
    ends = (passes["start_s"] + passes["seconds"]).groupby(passes["start_s"]).max()
    assert len(ends) < len(passes)
    assert all(following >= end - 1e-12 for (_, end), (following, _) in pairwise(ends.items()))


def test_a_server_without_requests_holds_up_no_one():
    passes = ran(1, kind="batch").passes
    assert len(passes) >= 50
    assert passes["start_s"].iloc[1:].tolist() == pytest.approx((passes["start_s"] + passes["seconds"]).iloc[:-1])


def test_each_server_has_its_share_of_the_experts_and_the_room_that_this_leaves():
    shape = memory_shape(MODEL)
    more = default_cells(MODEL, DEVICE, ep=2) - default_cells(MODEL, DEVICE)
    assert more * shape.cell_bytes("f16", "f16") == pytest.approx(shape.experts.bytes("bf16") / 2, rel=1e-3)
    one, divided = (PassPhysics(device_named(DEVICE), shape, "bf16", ep=ep) for ep in (1, 2))
    tokens = np.array([1.0, 64.0, 4096.0])
    assert divided.experts(tokens).reading_s == pytest.approx(one.experts(2 * tokens).reading_s / 2)
    assert divided.experts(tokens).computing_s == pytest.approx(one.experts(tokens).computing_s)
    # Each sends its tokens to the other and has their sums back, in 2 bytes.
    sent = shape.n_layers * 2 * 2 * tokens * shape.d_model
    assert divided.exchange(tokens).reading_s == pytest.approx(sent / (divided.device.link_gb_s * 1e9))


def test_times_are_those_of_a_server_that_divides_the_experts():
    shipped = load_profile(find_profile(MODEL, DEVICE, ep=2))
    assert (shipped.name, shipped.expert_parallel) == ("rtxpro6000-qwen3-30b-a3b-ep2", 2)
    of_all = load_profile(find_profile(MODEL, DEVICE))
    steps = slice(64, 257)
    assert (shipped.tables.work.each(257)[steps] < of_all.tables.work.each(257)[steps]).all()
    name = find_profile(MODEL, "h100_sxm", ep=4)
    assert (name.startswith("estimate:"), load_profile(name).expert_parallel) == (True, 4)


def test_the_command_asks_for_it():
    shown = command("run", "chat", *SERVERS, "--ep", "2", "--router", "vllm/data-parallel").stdout
    assert "rtxpro6000-qwen3-30b-a3b-ep2" in shown
    assert "2 servers behind vllm/data-parallel" in shown


def test_the_plan_gives_what_a_server_of_the_cluster_gets():
    options = ("--model", MODEL, "--device", DEVICE, "--ep", "2", "--parallel", "1024", "--ctx", "16")
    plan = json.loads(command("plan", *options, "--engine", "vllm", "--json").stdout)
    assert plan["engines"]["vllm"]["blocks"] * 16 == ran(1, kind="poisson", rate=1.0).scenario.context_cells


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ep", "3"), "3 does not divide its 128 experts"),
        (("--ep", "4"), "machine.expert_parallel is 4, and cluster.replicas 2; all servers of a cluster divide"),
        (("--ep", "2", "--tp", "2"), "--tp, --ep: experts that are divided beside layers are not simulated"),
        (("--ep", "2", "--engine", "llamacpp"), "--ep: vLLM has it and llama.cpp has not"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    done = command("run", "chat", *SERVERS, *options)
    assert (done.returncode, said in done.stderr) == (2, True)


def test_a_model_without_experts_is_refused():
    named = {"machine": {"device": "h100_sxm", "expert_parallel": 2}, "model": {"name": "qwen3-14b"}}
    with pytest.raises(UserError, match="qwen3-14b: no experts"):
        load_scenario({"name": "two", "workload": {"kind": "batch", "requests": 1}, **named})
