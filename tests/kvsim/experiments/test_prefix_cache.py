"""Hit rates of prefix caches against a block-by-block model, at their limits, and on a real trace."""

import json
import random
import sys
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise

import joblib
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.advice.workload_fit.request_source import describe_workload
from kvsim.errors import UserError
from kvsim.experiments.prefix_cache import PrefixStudy, prefix_cache
from kvsim.experiments.stack_distances import lru_hits
from kvsim.reports.report import report_of
from kvsim.scenario.prefixes import Lookup
from kvsim.scenario.scenario import load_scenario
from kvsim.scenario.trace_files import trace_scenario
from kvsim.simulation.run import run
from policies import EVICTIONS
from tests.traces import SHARED, needs_shared
from tests.workloads.fuzz.readers import AZURE, BURST, RAGPULSE
from workloads import WorkloadError
from workloads.reuse import Reuse

CONVERSATION = SHARED / "mooncake_conversation" / "conversation_trace.jsonl.gz"


def write(path, prompts, last=512):
    """Write a Mooncake trace of prompts given by the ids of their blocks; last blocks have ``last`` tokens."""
    rows = [
        {"timestamp": 0, "input_length": 512 * (len(ids) - 1) + last, "output_length": 1, "hash_ids": list(ids)}
        for ids in prompts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mooncake(path):
    """A scenario of a Mooncake trace, in its own blocks."""
    return trace_scenario(path, "mooncake", own_blocks=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("prompts")


def study(folder, prompts, evictions=None, blocks=None, **options):
    """Run a small study in this process."""
    path = write(folder / "trace.jsonl", prompts)
    with joblib.parallel_config("sequential"):
        return prefix_cache(mooncake(path), evictions, blocks, **options)


def hits_of(found):
    return {(row.eviction, row.blocks): row.hits for row in found.table.itertuples()}


# A block-by-block model


@dataclass(eq=False)
class Block:
    id: int
    born: int
    uses: int = 1
    spared: bool = False
    rank: tuple = ()
    """Order of eviction among free blocks; the smallest is evicted first."""


def model(prompts, eviction, n):
    """Hits of all prompts in a cache of ``n`` blocks, by linear search."""
    clock = hits = 0
    blocks = []
    hand = None
    for now, ids in enumerate(prompts):
        held = []
        for i in ids[:n]:
            block = next((block for block in blocks if block.id == i), None)
            if block is None:
                break
            block.uses += 1
            block.spared = True
            held.append(block)
        hits += len(held)
        fresh = len(ids[:n]) - len(held)
        while len(blocks) + fresh > n:
            if eviction == "sieve":
                at = 0 if hand is None else blocks.index(hand)
                while blocks[at] in held or blocks[at].spared:
                    if blocks[at] not in held:
                        blocks[at].spared = False
                    at = (at + 1) % len(blocks)
                victim = blocks[at]
                hand = blocks[at + 1] if at + 1 < len(blocks) else None
            else:
                victim = min((block for block in blocks if block not in held), key=lambda block: block.rank)
            blocks.remove(victim)
        for i in ids[len(held) : n]:
            clock += 1
            held.append(Block(i, clock))
            blocks.append(held[-1])
        for block in reversed(held):
            clock += 1
            uses = [later for later in range(now + 1, len(prompts)) if block.id in prompts[later]]
            worth = {"fifo": block.born, "lfu": block.uses, "belady": -min(uses, default=10**9)}
            block.rank = (worth.get(eviction, 0), clock)
    return hits


def best(prompts, n):
    """The most hits that any order of eviction can have, by exhaustive search."""

    @cache
    def after(now, kept):
        if now == len(prompts):
            return 0
        ids = prompts[now][:n]
        found = next((k for k, i in enumerate(ids) if i not in kept), len(ids))
        others = kept - set(ids)
        room = n - len(ids)
        choices = {frozenset(ids) | others} if len(others) <= room else set()
        if not choices:
            choices = {frozenset(ids) | frozenset(some) for some in combinations(sorted(others), room)}
        return found + max(after(now + 1, choice) for choice in choices)

    return after(0, frozenset())


@st.composite
def talks(draw, most=12):
    """Prompts that share a prefix of some length with an earlier one and continue with new blocks."""
    prompts = []
    new = 0
    for _ in range(draw(st.integers(1, most))):
        begun = draw(st.sampled_from(prompts)) if prompts and draw(st.integers(0, 3)) else ()
        begun = begun[: draw(st.integers(0, len(begun)))]
        more = draw(st.integers(0 if begun else 1, 3))
        prompts.append((*begun, *range(new, new + more)))
        new += more
    return tuple(prompts)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(prompts=talks(), n=st.integers(1, 9))
def test_hits_match_the_block_by_block_model(folder, prompts, n):
    found = study(folder, prompts, blocks=[n])
    assert hits_of(found) == {(eviction, n): model(prompts, eviction, n) for eviction in EVICTIONS}
    assert found.reuse.blocks == sum(map(len, prompts))
    assert found.reuse.distinct == len(set().union(*prompts))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(prompts=talks(8), n=st.integers(1, 6))
def test_belady_is_optimal(folder, prompts, n):
    found = hits_of(study(folder, prompts, blocks=[n]))
    assert found["belady", n] == best(prompts, n)
    assert max(found.values()) == found["belady", n]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(prompts=talks(20))
def test_a_cache_of_all_blocks_evicts_nothing(folder, prompts):
    found = study(folder, prompts)
    distinct = len(set().union(*prompts))
    assert found.infinite == pytest.approx(1 - distinct / found.reuse.blocks)
    for eviction in EVICTIONS:
        assert hits_of(found)[eviction, distinct] == found.reuse.blocks - distinct


def crowd(seed, n=300):
    """Prompts with a few shared beginnings, some follow-ups, and new blocks."""
    draw = random.Random(seed)
    prompts = []
    for number in range(n):
        topic = min(int(draw.expovariate(0.4)), 9)
        prompt = [10 * topic + depth for depth in range(draw.randint(1, 5))]
        if len(prompt) > 3:
            prompt.append(1000 + 10 * topic + draw.randint(0, 3))
        if draw.random() < 0.4:
            prompt += [10_000 + 10 * number + k for k in range(draw.randint(1, 4))]
        prompts.append(tuple(prompt))
    return chained(prompts)


def chained(prompts):
    """The prompts with ids that also identify all preceding blocks, as in a trace."""
    names = {}
    return tuple(tuple(names.setdefault(ids[: k + 1], len(names)) for k in range(len(ids))) for ids in prompts)


@pytest.mark.slow
def test_eviction_policies_differ_in_small_caches(folder):
    prompts = crowd(7)
    found = hits_of(study(folder, prompts, blocks=[12, 20]))
    assert found == {(eviction, n): model(prompts, eviction, n) for eviction in EVICTIONS for n in (12, 20)}
    assert len({found[eviction, 20] for eviction in EVICTIONS}) == 5
    assert max(EVICTIONS, key=lambda eviction: found[eviction, 20]) == "belady"


# Results of a study


def test_the_table_and_counts_of_a_study(folder):
    """Block 1 is shared by all prompts, 2 by two; prompts longer than the cache are truncated."""
    prompts = ((1, 2), (1, 3, 4), (1, 2))
    found = study(folder, prompts, ["lru", "belady", "lru"], [4, 2, 4])
    assert found.scenario == "trace"
    assert (found.block_size, found.requests) == (512, 3)
    assert found.reuse == Reuse(512, 7, 4, 7 * 512, 3 * 512, 3 / 7)
    assert found.infinite == pytest.approx(3 / 7)
    rows = [
        ("lru", 2, 1024, 2, 2 / 7, 1.0),
        ("lru", 4, 2048, 3, 3 / 7, 1.0),
        ("belady", 2, 1024, 2, 2 / 7, 1.0),
        ("belady", 4, 2048, 3, 3 / 7, 1.0),
    ]
    columns = ["eviction", "blocks", "tokens", "hits", "hit_rate", "of_best"]
    pd.testing.assert_frame_equal(found.table, pd.DataFrame(rows, columns=columns))
    printed = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert printed["runs"][1] == dict(zip(columns, rows[1], strict=True))
    assert printed["infinite_hit_rate"] == found.infinite
    assert (printed["one_in"], printed["error"]) == (1, None)


def test_without_belady_there_is_no_share_of_the_best(folder):
    found = study(folder, ((1, 2), (1, 2)), ["lru"], [2])
    assert found.table["of_best"].isna().all()
    assert found.to_dict()["runs"][0]["of_best"] is None
    found = study(folder, ((1, 2), (3, 4)), blocks=[2])
    assert found.table["of_best"].isna().all(), "no hit is no share of no hit"
    assert (found.infinite, found.knees) == (0.0, {})


@pytest.mark.parametrize(("tokens", "references", "distinct"), [(128, 12, 8), (300, 6, 5), (512, 4, 3), (1024, 2, 2)])
def test_blocks_of_another_size(folder, tokens, references, distinct):
    """Prompts of 700 tokens: 512 shared, and 188 of another block whose 512 tokens are all known.

    So the last block counts whether it is full or not.
    """
    path = write(folder / "trace.jsonl", ((1, 2), (1, 3)), last=188)
    with joblib.parallel_config("sequential"):
        found = prefix_cache(mooncake(path), ["lru"], [100], block_size=tokens)
    assert found.reuse[:3] == (tokens, references, distinct)
    assert found.table["hits"].tolist() == [references - distinct]
    assert found.table["tokens"].tolist() == [100 * tokens]


@pytest.mark.slow
def test_sizes_go_from_a_small_share_to_everything(folder):
    """They are evenly spaced on a logarithmic scale, and the smallest holds the longest prompt."""
    prompts = [(0, *range(10 * k + 1, 10 * k + 7)) for k in range(1000)]
    sizes = study(folder, prompts, ["lru"]).table["blocks"].tolist()
    assert (sizes[0], sizes[-1], len(sizes)) == (12, 6001, 16), "12 of 6,001 are 0.2 %"
    steps = [b / a for a, b in pairwise(sizes)]
    assert max(steps) < 1.1 * min(steps)
    sizes = study(folder, [*prompts, tuple(range(20_000, 20_500))], ["lru"]).table["blocks"].tolist()
    assert (sizes[0], sizes[-1]) == (500, 6501)
    assert study(folder, [(1,), (1,)], ["lru"]).table["blocks"].tolist() == [1]


def knees_of(*curves):
    rows = [
        (f"e{number}", blocks, blocks, 0, rate, rate) for number, curve in enumerate(curves) for blocks, rate in curve
    ]
    table = pd.DataFrame(rows, columns=["eviction", "blocks", "tokens", "hits", "hit_rate", "of_best"])
    return PrefixStudy("s", 1, 1, None, table).knees


def test_the_working_set_is_at_the_knee_of_the_curve():
    """The knee is farthest above the chord: 0.7 above it at 20, and 0.76 at 30."""
    steep = [(10, 0.0), (20, 0.4), (30, 0.48), (110, 0.5)]
    straight = [(10, 0.25), (20, 0.5), (30, 0.75)]
    sagging = [(10, 0.0), (20, 0.01), (30, 0.5)]
    falling = [(10, 0.5), (20, 0.6), (30, 0.4)]
    short = [(10, 0.1), (20, 0.5)]
    assert knees_of(steep, straight, sagging, falling, short) == {"e0": 30}
    steep[1] = (20, 0.47)
    assert knees_of(straight, steep) == {"e1": 20}


def test_prompts_without_a_full_block_are_reported():
    """A prompt of 400 tokens looks up no block of 400: its last token is always computed."""
    with pytest.raises(UserError) as fault:
        prefix_cache("chat", block_size=400)
    assert str(fault.value) == "chat: no prompt is longer than a block of 400 tokens; try a smaller block size"
    assert prefix_cache("chat", ["lru"], [100], block_size=399).reuse.blocks > 0


def test_unshared_prompts_never_hit():
    with joblib.parallel_config("sequential"):
        found = prefix_cache(load_scenario("chat", workload__requests=30), ["lru", "belady"], [5, 1000], block_size=8)
    assert found.reuse.blocks == found.reuse.distinct > 100
    assert (found.table["hits"] == 0).all()


def test_sessions_hit_their_earlier_turns_and_system_prompts():
    """A turn hits all full blocks of the prompt before it and its answer, and a first turn those of its system prompt.

    Prompts have 27, 44 and 61 tokens, and after their answers 37 and 54, of which the last has not been computed.
    """
    keys = {"kind": "sessions", "sessions": 5, "turns": {"kind": "fixed", "value": 3}, "system_prompts": 1}
    keys |= {"system_tokens": {"kind": "fixed", "value": 20}, "user_tokens": {"kind": "fixed", "value": 7}}
    world = load_scenario(
        {"workload": {**keys, "output_tokens": {"kind": "fixed", "value": 10}}, "cache": {"block_size": 8}}
    )
    with joblib.parallel_config("sequential"):
        found = prefix_cache(world, ["lru"], [1000])
    assert (found.reuse.blocks, found.reuse.tokens) == (5 * (26 // 8 + 43 // 8 + 60 // 8), 5 * (27 + 44 + 61))
    hits = 4 * (20 // 8) + 5 * (36 // 8 + 53 // 8)
    assert found.table["hits"].tolist() == [hits]
    assert found.infinite == found.table["hit_rate"][0] == 8 * hits / found.reuse.tokens


def sessions_apart(**keys):
    """Conversations of which no two requests overlap, on a cache that holds all of them."""
    workload = {"kind": "sessions", "sessions": 25, "rate": 1e-5, "think_s": 30.0, "system_prompts": 2}
    return load_scenario(
        {
            "workload": {**workload, **keys},
            "server": {"scheduler": "vllm"},
            "cache": {"policy": "vllm", "cells": 2**19},
        }
    )


CONVERSATIONS = {
    "sessions": {},
    "one token a message": {"user_tokens": {"kind": "fixed", "value": 1}},
    "whole blocks": {
        "user_tokens": {"kind": "fixed", "value": 16},
        "output_tokens": {"kind": "fixed", "value": 32},
        "system_tokens": {"kind": "fixed", "value": 48},
    },
    "long answers": {"output_tokens": {"kind": "fixed", "value": 177}},
}


@pytest.mark.parametrize("keys", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_a_study_a_run_and_a_description_find_the_same(keys, block_size):
    world = load_scenario(sessions_apart(**keys), cache__block_size=block_size)
    ran = run(world).summary
    with joblib.parallel_config("sequential"):
        studied = prefix_cache(world, ["lru"])
    described = describe_workload(world).reuse
    assert ran["failed"] == ran["truncated"] == ran["preemptions"] == 0
    assert described == studied.reuse
    assert (described.tokens, described.found) == (ran["prefix"]["tokens"], ran["prefix"]["found"])
    assert described.hit_rate == ran["prefix"]["hit_rate"] == studied.table["hit_rate"].iloc[-1] > 0.3


def test_requests_that_overlap_find_the_same_in_a_cache_with_room():
    """Blocks can be found from the moment they are scheduled, so that those who come together share a system prompt."""
    world = load_scenario(sessions_apart(), workload__rate=20.0, workload__think_s=0.1)
    assert run(world).summary["prefix"]["hit_rate"] == pytest.approx(describe_workload(world).reuse.hit_rate, abs=0.01)


def test_sessions_take_turns_in_a_small_cache():
    """Requests come in order of arrival, not session by session: while one user thinks, others take their blocks."""
    together = load_scenario(sessions_apart(), workload__rate=1.0)
    with joblib.parallel_config("sequential"):
        apart, mixed = (prefix_cache(world, ["lru"], [60]) for world in (sessions_apart(), together))
    assert apart.infinite == pytest.approx(mixed.infinite, abs=0.02)
    assert mixed.table["hit_rate"][0] < apart.table["hit_rate"][0] - 0.1


UNKNOWN = {
    "azure": AZURE,
    "burstgpt": BURST.replace(b"0,0,0", b"3,4,7"),
    "table": b"arrival,prompt,output\n0,40,2\n0.5,30,4\n",
    "ragpulse": RAGPULSE,
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_trace_that_does_not_say_what_prompts_share_has_no_hit_rate(tmp_path, kind):
    path = tmp_path / "trace.csv"
    path.write_bytes(UNKNOWN[kind])
    world = load_scenario(trace_scenario(path, kind, **({"skip_bad_rows": True} if kind == "ragpulse" else {})))
    found = prefix_cache(world)
    assert (found.infinite, found.reuse, len(found.table)) == (None, None, 0)
    assert found.reason == "unknown: this trace does not say which prompts share a beginning"
    told = found.to_dict()
    figures = ("prompt_tokens", "references", "distinct", "infinite_hit_rate", "knee_blocks", "error")
    assert {told[key] for key in figures} == {None}
    assert (told["runs"], told["reason"]) == ([], found.reason)
    with pytest.raises(UserError, match="unknown: this trace"):
        found.plot()
    assert describe_workload(world).reuse is None
    assert run(world).summary["prefix"]["hit_rate"] is None


def test_of_a_mix_nothing_is_known_if_a_part_does_not_say(tmp_path):
    (tmp_path / "trace.csv").write_bytes(AZURE)
    parts = [{"kind": "azure", "path": str(tmp_path / "trace.csv")}, {"kind": "sessions", "sessions": 3}]
    assert prefix_cache(load_scenario({"workload": {"kind": "mix", "parts": parts}})).reason
    parts[0] = {"kind": "poisson", "requests": 3}
    assert prefix_cache(load_scenario({"workload": {"kind": "mix", "parts": parts}}), ["lru"]).infinite > 0.3


def test_malformed_traces_are_reported(tmp_path):
    (tmp_path / "odd.jsonl").write_text('{"timestamp": 0}\n')
    with pytest.raises(WorkloadError, match=r"odd.jsonl: row 1: no key"):
        prefix_cache(mooncake(tmp_path / "odd.jsonl"))


@pytest.mark.slow
def test_results_do_not_depend_on_the_process(folder):
    """Workers give the same table in the same order as this process."""
    path = write(folder / "trace.jsonl", crowd(3))
    tables = []
    for backend in ("sequential", "loky"):
        with joblib.parallel_config(backend):
            tables.append(prefix_cache(mooncake(path), blocks=[10, 20, 40]).table)
    for table in tables[1:]:
        pd.testing.assert_frame_equal(tables[0], table)


def test_progress_is_reported_up_to_the_end(folder):
    """Two prompts are read, then two caches replayed; ``lru`` needs no replay."""
    shares = []
    study(folder, ((1, 2), (1, 3)), ["lru", "fifo"], [1, 2], progress=shares.append)
    assert shares == pytest.approx([0.2, 0.4, 0.7, 1.0, 1.0])


# LRU in one pass, and samples for others


STUDY = sys.modules[prefix_cache.__module__]


def replayed(lookups, sizes):
    """Hits of LRU, cache by cache, in a real pool of blocks."""
    return [STUDY._count_hits([(lookups, "lru", n)], 0) for n in sizes]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(prompts=talks(30), answers=st.lists(st.integers(0, 3), min_size=30, max_size=30))
def test_lru_in_one_pass_is_that_of_a_cache_of_each_size(prompts, answers):
    """Also where answers follow that no other request asks for, and where a request does not fit."""
    lookups = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=False)):
        keys = [*prompt, *range(1000 * number + 1000, 1000 * number + 1000 + answer)]
        lookups.append(Lookup(len(keys), keys, len(prompt)))
    sizes = range(1, 40, 3)
    assert lru_hits(lookups, sizes) == replayed(lookups, sizes)


def test_lru_in_one_pass_holds_a_block_once_that_a_cache_stores_again():
    """Prompts of two blocks that do not look up the second: its copy takes the place of block 9 in a cache of four."""
    ask = {"twice": Lookup(2, [1, 2], 1), "other": Lookup(2, [8, 9], 2)}
    lookups = [ask[name] for name in ("other", "twice", "twice", "other")]
    assert (lru_hits(lookups, [4, 5]), replayed(lookups, [4, 5])) == ([3, 3], [2, 3])


@pytest.mark.slow
def test_samples_are_as_far_off_as_they_say(folder, monkeypatch):
    prompts, sizes = crowd(11, n=2000), [150, 400, 900]
    whole = study(folder, prompts, blocks=sizes)
    assert (whole.one_in, whole.error) == (1, None)
    monkeypatch.setattr(STUDY, "_MOST_LOOKUPS", 50_000)
    sampled = study(folder, prompts, blocks=sizes)
    assert sampled.one_in == 2 * -(-whole.reuse.blocks * 5 * 3 // 50_000)
    off = (sampled.table["hit_rate"] - whole.table["hit_rate"]).abs()
    assert off[sampled.table["eviction"] == "lru"].max() == 0
    assert 0 < off.max() < sampled.error < 0.1
    assert f"about {100 * sampled.error:.2g} points" in report_of(sampled)._repr_html_()
    pd.testing.assert_frame_equal(sampled.table, study(folder, prompts, blocks=sizes).table)


@pytest.mark.slow
def test_the_figure_has_a_line_for_each_policy(folder):
    found = study(folder, crowd(5, n=60))
    axis = found.plot().axes[0]
    curves = [line for line in axis.lines if len(line.get_xdata()) == found.table["blocks"].nunique()]
    by_policy = [table for _, table in found.table.groupby("eviction", sort=False)]
    assert [line.get_xdata().tolist() for line in curves] == [table["blocks"].tolist() for table in by_policy]
    assert [line.get_ydata().tolist() for line in curves] == [table["hit_rate"].tolist() for table in by_policy]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == list(EVICTIONS)
    assert f"infinite cache: {found.infinite:.1%}" in [text.get_text() for text in axis.texts]


@pytest.mark.slow
def test_a_study_is_saved_as_a_table_and_a_figure(folder, tmp_path):
    found = study(folder, ((1, 2), (1, 3), (1, 2)))
    written = found.save(tmp_path / "new" / "folder")
    assert [path.name for path in written] == ["prefix-cache.csv", "prefix-cache.png"]
    pd.testing.assert_frame_equal(pd.read_csv(written[0]), found.table)
    assert written[1].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


# A real trace


@pytest.mark.slow
@needs_shared
def test_a_real_trace_hits_as_its_publishers_count():
    """12,031 requests look up 288,500 blocks of 512 tokens. At most 8,199 blocks are live at a time, so ``belady`` with
    10,000 evicts no block that is needed again."""
    world = mooncake(CONVERSATION)
    found = prefix_cache(world, ["lru", "belady"], [10_000])
    assert (found.requests, found.reuse.blocks, found.reuse.distinct) == (12_031, 288_500, 182_790)
    assert round(found.infinite, 3) == 0.366
    rates = found.table.set_index("eviction")["hit_rate"]
    assert round(rates["lru"], 3) == 0.212
    assert rates["belady"] == pytest.approx(found.infinite)
    rates = prefix_cache(world, ["lru"], [1_000, 50_000]).table["hit_rate"]
    assert rates.round(3).tolist() == [0.045, 0.355]


@needs_shared
def test_the_reuse_of_real_prompts():
    found = describe_workload(SHARED / "mooncake_arxiv_1000" / "mooncake_trace_1000.jsonl.gz").reuse
    assert found.hit_rate == pytest.approx(0.380, abs=6e-4)
    assert (found.block_size, found.blocks) == (512, 19_686)
