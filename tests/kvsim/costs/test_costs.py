"""The cost model: what is predicted, and what is refused."""

import json

import numpy as np
import pytest

from kvsim.costs.cost_model import CostModel
from kvsim.costs.load_profile import load_profile
from kvsim.costs.profile import Coefficient
from kvsim.errors import UserError
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import drive, run
from kvsim.simulation.set_up import build_policy, ledger_for
from kvsim.simulation.time_breakdown import SECONDS
from policies import NO_MOVES, Chunk, Group, MicroBatch, Moves, Place, Reads, Shift
from policies.cells.reads import reads_of
from policies.placement.rule import PassReads
from tests.kvsim.costs.passes import looked_up


@pytest.fixture
def shipped():
    return load_profile("default")


CHUNKS = (Chunk(0, 100, 1), Chunk(1, 0, 30))


@pytest.mark.parametrize(
    ("kernel", "cells", "scans"),
    [
        ("masked", lambda seq: np.arange(101), [(31, 512)]),  # All tokens scan the whole span together.
        ("sliced", {0: np.arange(101), 1: np.arange(200, 230)}.__getitem__, [(1, 101), (30, 30)]),
    ],
)
def test_prediction_is_the_sum_of_its_parts(shipped, kernel, cells, scans):
    reads, a = reads_of(kernel, CHUNKS, cells, 512), shipped.kernels[kernel]
    expected = (
        a.base_s.value
        + looked_up(shipped.matmul_slopes_s, shipped.matmul_knots, 31)
        + sum(
            seen * (a.per_cell_s.value + looked_up(a.further_token_s, shipped.attention_knots, n)) for n, seen in scans
        )
        + a.per_chunk_s.value * 2
        + a.per_run_s.value * 2
    )
    batch = MicroBatch(CHUNKS, (Place(np.arange(31), reads),))
    assert CostModel(shipped).pass_price(kernel).seconds(PassReads.of(batch)) == pytest.approx(expected, rel=1e-12)


def test_more_tokens_never_cost_less_even_beyond_the_table(shipped):
    costs = CostModel(shipped)

    def seconds(n):
        chunks = (Chunk(0, 0, n),)
        reads = reads_of("gather", chunks, lambda seq: np.arange(n), n)
        batch = MicroBatch(chunks, (Place(np.arange(n), reads),))
        return costs.pass_price("gather").seconds(PassReads.of(batch))

    times = [seconds(n) for n in (1, 2, 3, 7, 64, 511, 512, 513, 1024, 1025, 3000)]
    assert times == sorted(times)


def test_moves_cost_by_run_and_by_cell(shipped):
    costs = CostModel(shipped)
    one = costs.moves(Moves.from_runs([(10, 0, 8)]))
    eight = costs.moves(Moves.from_runs([(10 + i, i, 1) for i in range(8)]))
    assert eight - one == pytest.approx(7 * shipped.moves.per_run_s.value)
    assert costs.moves(NO_MOVES) == 0


def test_every_compaction_may_cost_something_whatever_it_moves(shipped):
    moves = shipped.moves.model_copy(update={"per_pass_s": Coefficient(value=0.5, low=0.4, high=0.6)})
    costs, plain = CostModel(shipped.model_copy(update={"moves": moves})), CostModel(shipped)
    one = Moves.from_runs([(10, 0, 8)])
    assert costs.moves(one) == pytest.approx(0.5 - shipped.moves.per_pass_s.value + plain.moves(one))
    assert costs.moves(NO_MOVES) == 0
    assert costs.transfers(()) == 0


def test_an_engine_that_never_moves_cells_cannot_predict_a_policy_that_does(shipped):
    profile = shipped.model_copy(update={"moves": None, "engine": "llama-cpp-python 9"})
    costs = CostModel(profile)
    assert costs.moves(NO_MOVES) == 0
    assert costs.relative("masked") is None
    with pytest.raises(UserError, match="knows no cost of moving cells: llama-cpp-python 9 never moves any"):
        costs.moves(Moves.from_runs([(10, 0, 8)]))
    world = load_scenario("chat")
    for policy in ("llama.cpp-b6975", "paged", "vllm"):
        build_policy(world, policy, costs)
    for policy in ("adaptive", "fill-holes", "llama.cpp-b4666", "growing"):
        with pytest.raises(UserError, match=f"knows no cost of {policy}'s moves"):
            build_policy(world, policy, costs)


def test_llamacpp_rotates_every_key_of_the_cache_whoever_shifted(shipped):
    shift = Shift(np.arange(3), np.ones(3, dtype=np.int64))
    every = CostModel(shipped.model_copy(update={"shifts_all": True}))
    assert every.shift(shift, Group(600)) == pytest.approx(200 * CostModel(shipped).shift(shift, Group(600)))
    assert every.shift(Shift(np.arange(0), np.arange(0)), Group(600)) == 0


def test_a_file_is_the_same_model_wherever_it_lies(shipped):
    costs = CostModel(shipped.model_copy(update={"model": "/a/m.gguf"}))
    costs.check("b/m.gguf", "masked")
    with pytest.raises(UserError, match=r"no times for /a/n.gguf: profile default was measured on /a/m.gguf"):
        costs.check("/a/n.gguf", "masked")
    llama = CostModel(shipped.model_copy(update={"model": "smollm2", "engine": "llama-cpp-python 9"}))
    with pytest.raises(UserError, match=r"name the model in the scenario: model.name = 'smollm2'"):
        llama.check("tiny", "masked")
    llama.check("/c/SmolLM2-135M-Instruct.Q4_1.gguf", "masked")


def test_where_masked_cells_are_skipped_only_useful_ones_cost(shipped):
    """Priced as a pass whose tiles hold nothing else; and so it is however many steps are taken at a time."""
    nothing = Coefficient(value=0, low=0, high=0)
    attention = shipped.kernels["tiled"].model_copy(update={"skips": True, "per_run_s": nothing})
    profile = shipped.model_copy(update={"kernels": {**shipped.kernels, "tiled": attention}})
    chunks = (Chunk(0, 9, 1),)
    scattered = reads_of("tiled", chunks, lambda seq: np.arange(10) * 100, 1000)
    whole = Reads(scattered.tokens, scattered.useful, scattered.useful, scattered.runs, 10)
    passes = [PassReads.of(MicroBatch(chunks, (Place(np.arange(1), reads),))) for reads in (scattered, whole)]
    tiled = profile.model_copy(update={"kernels": {"tiled": attention.model_copy(update={"skips": False})}})
    skipping, all_of_them = (CostModel(each).pass_price("tiled").seconds(passes[0]) for each in (profile, tiled))
    assert skipping == CostModel(tiled).pass_price("tiled").seconds(passes[1]) < all_of_them
    world = load_scenario("chat", workload__requests=30, cache__kernel="tiled")
    costs = CostModel(profile)
    one, many = (drive_with(world, costs, most_steps=most).summary["e2e_s"] for most in (0, 1 << 62))
    assert one == many
    assert many["mean"] < run(world, "llama.cpp-b6975").summary["e2e_s"]["mean"]


def drive_with(world, costs, most_steps):
    policy = build_policy(world, "llama.cpp-b6975")
    recorder = Recorder(time_breakdown=ledger_for(world, policy, costs), detail="tables")
    backend = SimulatedBackend(costs, policy.kernel, policy.groups)
    result, _ = drive(world, policy, backend, recorder, None, most_steps=most_steps)
    spent = result.causes[list(SECONDS)].sum(axis=1)
    assert spent.to_numpy() == pytest.approx(result.causes["e2e_s"].to_numpy(), rel=1e-9)
    assert "holes_s" in result.passes
    assert (result.passes["holes_s"] == 0).all()
    return result


def test_the_engine_of_a_profile_is_named(shipped):
    llama = shipped.model_copy(update={"engine": "llama-cpp-python 9"})
    assert llama.describe().endswith("llama-cpp-python 9")
    assert "BLAS" in shipped.describe() or shipped.machine.blas in shipped.describe()
    with pytest.raises(UserError, match=r"kvsim calibrate --engine llamacpp --model m.gguf"):
        CostModel(llama).check("m.gguf", "masked")


def test_for_a_model_from_a_file_the_hint_names_the_engine_that_the_policies_stand_for(shipped):
    with pytest.raises(
        UserError, match=r"calibrate --engine llamacpp --model m.gguf for the policies of llama.cpp, or"
    ):
        CostModel(shipped).check("m.gguf", "masked")
    reason = shipped.why_no_times("m.gguf", "f32", "f32", "llama.cpp-b6975")
    assert reason.endswith("measure one with: kvsim calibrate --engine llamacpp --model m.gguf")


def test_a_refused_profile_says_so_wherever_it_prices(shipped):
    costs = CostModel(shipped.model_copy(update={"refused": "off by 20 %"}))
    assert costs.warnings() == ["profile default was refused when it was measured: off by 20 %"]


def test_going_beyond_the_measured_range_is_said(shipped):
    world = load_scenario(
        "chat",
        workload__requests=5,
        server__n_ubatch=4096,
        server__n_batch=4096,
        server__slot_context=4096,
        cache__cells=16384,
    )
    long = load_scenario(world, workload__prompt_tokens={"kind": "fixed", "value": 3000})
    assert run(world, "paged").warnings == ()
    (warning,) = run(long, "paged").warnings
    assert "4096 tokens; the profile was measured up to" in warning


def test_a_profile_of_another_model_is_refused():
    with pytest.raises(UserError, match="no times for small: profile default was measured on tiny; measure one"):
        run(load_scenario("chat", model__name="small"))


def test_a_profile_survives_its_file(shipped, tmp_path):
    shipped.save(tmp_path / "p.json")
    assert load_profile(str(tmp_path / "p.json")) == shipped


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shift_per_cell_s": {"value": -1, "low": 0, "high": 0}}, "shift_per_cell_s.value"),
        ({"format": 99}, "format 99"),
        ({"moves": 7}, "moves"),
    ],
)
def test_a_damaged_profile_is_refused_in_one_line(shipped, tmp_path, change, said):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**shipped.model_dump(mode="json"), **change}))
    with pytest.raises(UserError, match=said) as error:
        load_profile(str(path))
    assert "\n" not in str(error.value)


def test_same_seed_same_numbers():
    world = load_scenario("chat", workload__requests=60)
    first, second = run(world).summary, run(world).summary
    first.pop("wall_s"), second.pop("wall_s")
    assert first == second
    other = run(load_scenario(world, seed=2)).summary
    assert other["e2e_s"] != first["e2e_s"]


def test_kernel_of_the_scenario_replaces_the_policy_s():
    world = load_scenario("chat", cache__kernel="gather")
    assert build_policy(world, "contiguous").kernel == "gather"


@pytest.mark.parametrize(
    ("name", "engine", "tokens"), [("default", "numpy", 2048), ("llamacpp-smollm2", "llama-cpp-python", 512)]
)
def test_shipped_profiles_reach_the_largest_usual_batches_and_say_where_they_were_measured(name, engine, tokens):
    profile = load_profile(name)
    assert profile.engine.startswith(engine)
    assert profile.tokens.high == tokens
    assert profile.held_out_error_median < 0.06
    assert (profile.name, profile.refused) == (name, None)
    assert profile.machine.processor in profile.describe()
