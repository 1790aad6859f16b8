"""The command line as a user meets it: the installed program, its streams and its exit codes.

Where only the answer matters, a command runs in this process, which is quicker.
"""

import json
import subprocess
import sys
from types import ModuleType

import pandas as pd
import pytest

from kvsim import __main__ as program
from kvsim import load_profile, load_scenario
from kvsim.cli.option_groups import ScenarioOptions
from kvsim.scenario.builtin import builtin_names
from tests.kvsim.cli.answers import PROGRAM, TIGHT, complaint, succeeded
from tests.workloads.fuzz.readers import AZURE

BOTH = ("--policy", "contiguous", "--policy", "paged")
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
SUMMARY_KEYS = {"scenario", "policy", "seed", "requests", "completed", "failed", "throughput_tokens_per_s", *LATENCIES}
SUMMARY_KEYS |= {"cache", "profile", "basis", "wall_s", "preemptions", "recomputed_tokens", "prefix", "host"}
CACHE_KEYS = {"utilization_mean", "external_fragmentation_mean", "internal_fragmentation_mean", "failed_allocations"}
CACHE_KEYS |= {"batch_splits", "moved_bytes", "moved_cells"}


def check_summary(summary):
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["cache"].keys() >= CACHE_KEYS
    assert all(list(summary[latency]) == ["mean", "p50", "p95", "p99"] for latency in LATENCIES)
    assert summary["completed"] + summary["failed"] == summary["requests"]
    assert list(summary["prefix"]) == ["tokens", "found", "hit_rate"]
    tier = ["bytes_out", "bytes_in", "bytes_prefetched", "prefetch_wait_s"]
    chunks = ["chunk_loads", "chunk_tokens", "load_wait_s", "store_wait_s", "lookup_wait_s"]
    copies = ["saves", "loads", "copy_s", "most_bytes", "limit_bytes", "step_copies_s"]
    assert list(summary["host"]) == [*tier, *chunks, *copies]


@pytest.mark.slow
def test_the_installed_program_prints_the_same_object_every_time(kvsim, within):
    command = ("run", "chat", "--policy", "paged", "--seed", "1", "--requests", "40", "--json")
    one, two = (json.loads(succeeded(run(*command))) for run in (kvsim, within))
    check_summary(one)
    assert [one[key] for key in ("scenario", "policy", "seed", "requests")] == ["chat", "paged", 1, 40]
    assert one.pop("wall_s") > 0
    two.pop("wall_s")
    assert one == two


def test_run_prints_what_a_reader_asks_first(within):
    printed = succeeded(within("run", "chat", "--policy", "paged", "--seed", "7", "--requests", "40"))
    printed = " ".join(printed.split())
    assert "chat under paged, scheduler llama-server, 2,048 cells, 8 slots, seed 7" in printed
    assert "40 of 40 requests completed, 0 failed" in printed
    for word in ("TTFT", "TPOT", "P99", "external fragmentation", "profile default"):
        assert word in printed


def test_compare_as_one_object(within, tmp_path):
    compared = json.loads(succeeded(within("compare", "chat", *BOTH, "--requests", "40", "--json")))
    assert [summary["policy"] for summary in compared["policies"]] == ["contiguous", "paged"]
    for summary in compared["policies"]:
        check_summary(summary)
    assert (compared["scenario"], compared["seed"], compared["profile"]) == ("chat", 1, "default")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_compare_writes_a_picture_and_tables(within, tmp_path):
    printed = succeeded(within("compare", "chat", *BOTH, "--requests", "40", "--out", "kept", "--plots"))
    folder = tmp_path / "kept" / "chat"
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    compared = json.loads((folder / "comparison.json").read_text())
    table = pd.read_csv(folder / "comparison.csv", index_col="policy")
    for summary in compared["policies"]:
        check_summary(summary)
        assert table.loc[summary["policy"], "ttft_p95_s"] == pytest.approx(summary["ttft_s"]["p95"])
        assert len(pd.read_csv(folder / f"requests-{summary['policy']}.csv")) == 40
    assert load_scenario(folder / "scenario.toml").workload.requests == 40
    assert f"{len(list(folder.iterdir())) - 3} more files in kept/chat/" in printed
    for name in ("cells.png", "cells-paged.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    printed = succeeded(within("compare", "chat", *BOTH, "--requests", "4", "--out", "kept"))
    assert list(folder.glob("*.png")) + list(folder.glob("*.npz")) == []
    assert "in kept/chat/; --plots draws pictures too" in printed


MISTAKES = {
    "misspelt key": (("run", "misspelt.toml"), "misspelt.toml: workload.raet: unknown key; did you mean 'rate'?"),
    "negative rate": (("compare", "negative.toml"), "negative.toml: workload.rate: "),
    "trace with a NaN": (("run", "nan.toml"), "nan.csv: row 2: ContextTokens 'NaN' "),
    "missing trace": (("run", "lost.toml"), "lost.csv: no such file"),
    "missing trace, compared": (("compare", "lost.toml", *BOTH), "lost.csv: no such file"),
    "missing file": (("run", "none.toml"), "none.toml: no such file, and not a built-in scenario"),
    "missing file, shown": (("scenario", "show", "none.toml"), "none.toml: no such file"),
    "unknown policy": (("compare", "--policy", "paged", "--policy", "magic"), "no policy called 'magic'; there are "),
    "unknown profile": (("run", "--profile", "magic"), "magic: no such file, and not a shipped profile"),
    "unknown model": (("calibrate", "--model", "gpt"), "no model called 'gpt'; there are tiny, small"),
    "no JSON": (("run", "--profile", "nan.csv"), "nan.csv: not a machine profile: file: invalid json"),
    "out is a file": (("compare", "--requests", "5", "--out", "nan.csv"), "nan.csv/chat: cannot write results: "),
    "name that leads out of the folder": (("compare", "outside.toml", *BOTH, "--out", "kept"), "outside.toml: name: "),
    "profile of nobody": (
        ("run", "--profile", "~no-such-user/p.json"),
        "~no-such-user/p.json: no such file",
    ),
    "half a profile": (
        ("run", "--profile", "half.json"),
        "half.json: not a machine profile: moves: field required",
    ),
}
GIVEN_FILES = {
    "misspelt.toml": "[workload]\nraet = 8.0\n",
    "negative.toml": "[workload]\nrate = -8.0\n",
    "nan.toml": '[workload]\nkind = "azure"\npath = "nan.csv"\n',
    "lost.toml": '[workload]\nkind = "azure"\npath = "lost.csv"\n',
    "outside.toml": 'name = "../outside"\n[workload]\nrequests = 5\n',
    "nan.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4\n2023-11-16 18:15:47,NaN,4\n",
    "half.json": '{"format": 1}',
}


def give(folder, files):
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize(("command", "answer"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_in_one_line(within, tmp_path, command, answer):
    give(tmp_path, GIVEN_FILES)
    assert answer in complaint(within(*command))
    assert {path.name for path in tmp_path.iterdir()} == set(GIVEN_FILES), "nothing is left behind"


@pytest.mark.slow
def test_the_installed_program_answers_a_mistake_in_the_same_way(kvsim, tmp_path):
    give(tmp_path, GIVEN_FILES)
    command, answer = MISTAKES["misspelt key"]
    assert answer in complaint(kvsim(*command))


@pytest.mark.parametrize("change", [{"matmul_knots": []}, {"matmul_knots": [1]}, {"matmul_slopes_s": []}], ids=str)
def test_a_profile_that_does_not_fit_together_is_refused(within, tmp_path, change):
    broken = load_profile("default").model_dump(mode="json") | change
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    assert "broken.json: not a machine profile: matmul" in complaint(within("run", "--profile", "broken.json"))


# Schedulers, prefixes and the host tier


SERVER_MISTAKES = {
    "nowhere to swap to": (
        'scheduler = "vllm"\npreemption = "swap"',
        "scenario: server.preemption: there is nowhere to swap to; give cache.host_cells",
    ),
    "llama-server does not swap": (
        'preemption = "swap"\n[cache]\nhost_cells = 64',
        "scenario: server.preemption: only the scheduler vllm swaps, not llama-server",
    ),
    "static does not swap": (
        'scheduler = "static"\npreemption = "swap"\n[cache]\nhost_cells = 64',
        "scenario: server.preemption: only the scheduler vllm swaps, not static",
    ),
    "nothing to prefetch": (
        'prefetch = "on-resume"',
        "scenario: server.prefetch: there is nothing to bring back from; give cache.host_cells",
    ),
    "unknown scheduler": (
        'scheduler = "orca"',
        "server.scheduler: no scheduler called 'orca'; there are llama-server, llama-server-fair, ",
    ),
    "unknown order": ('order = "fair"', "server.order: input should be 'fcfs', 'priority', "),
    "unknown preemption": ('preemption = "kill"', "server.preemption: input should be 'recompute' or 'swap'"),
    "unknown prefetch": ('prefetch = "all"', "server.prefetch: input should be 'none', 'on-resume' or 'predictive'"),
    "misspelt": ("long_prefil_threshold = 3", "did you mean 'long_prefill_threshold'?"),
    "a similarity beyond all": (
        "slot_similarity = 1.5",
        "server.slot_prompt_similarity: input should be less than or equal",
    ),
    "all kept free": ("[cache]\nwatermark = 1.0", "cache.watermark: input should be less than 1, got 1.0"),
    "unknown eviction": (
        '[cache]\neviction = "mru"',
        "cache.eviction: no order of eviction called 'mru'; did you mean 'lru'? There are lru, fifo, ",
    ),
    "unknown order of free blocks": ('[cache]\nfree_order = "0.1"', "cache.free_order: input should be '0.33.0' or "),
    "less than nothing in the host": ("[cache]\nhost_cells = -1", "cache.host_cells: input should be greater than or"),
    "no room for a block": ('[cache]\npolicy = "paged"\ncells = 24', "24 cells make 1 blocks of 16, and block 0 is "),
}


@pytest.mark.parametrize(("keys", "answer"), SERVER_MISTAKES.values(), ids=SERVER_MISTAKES)
def test_a_server_that_cannot_be_is_refused_in_one_line(within, tmp_path, keys, answer):
    (tmp_path / "odd.toml").write_text(f"[server]\n{keys}\n")
    said = complaint(within("run", "odd.toml"))
    assert said.startswith("odd.toml: ") or said.startswith("odd: cache: ")
    assert answer in said


def test_run_tells_of_prefixes_preemptions_and_the_host_tier(within, tmp_path):
    (tmp_path / "tight.toml").write_text(TIGHT)
    told = json.loads(succeeded(within("run", "tight.toml", "--json")))
    check_summary(told)
    prefix, host = told["prefix"], told["host"]
    assert 0 < prefix["found"] < prefix["tokens"]
    assert prefix["hit_rate"] == prefix["found"] / prefix["tokens"]
    assert told["preemptions"] > 0
    assert 0 < host["bytes_prefetched"] < host["bytes_in"]
    assert host["bytes_out"] > 0
    printed = " ".join(succeeded(within("run", "tight.toml")).split())
    share = f"prefixes: {prefix['hit_rate']:.1%} of the prompt tokens were in the cache already"
    again = f"{told['preemptions']} preemptions, {told['recomputed_tokens']} tokens computed again"
    assert f"{share}; {again}" in printed
    assert f"host tier: {host['bytes_out'] / 2**20:.2f} MiB out, {host['bytes_in'] / 2**20:.2f} MiB back, " in printed
    assert "of that ahead of use; steps waited " in printed


def test_run_does_not_tell_of_what_was_not_there(within):
    printed = succeeded(within("run", "chat", "--requests", "5", "--policy", "paged"))
    assert "prefixes:" not in printed
    assert "host tier:" not in printed


STUCK = """
[workload]
kind = "batch"
requests = 3
prompt_tokens = {kind = "fixed", value = 10}
output_tokens = {kind = "fixed", value = 12}
[server]
scheduler = "vllm"
[cache]
cells = 24
"""
NO_PROGRESS = "growing: no progress after 0.0"


def test_a_run_that_makes_no_progress_says_why(within, tmp_path):
    (tmp_path / "stuck.toml").write_text(STUCK)
    said = complaint(within("run", "stuck.toml", "--policy", "growing"))
    assert said.startswith(NO_PROGRESS)
    assert "8 of 24 cells are free; request 0 (10 prompt tokens, 7 generated) waits for 17, request 1 " in said


def test_compare_leaves_out_who_makes_no_progress_and_says_so(within, tmp_path):
    (tmp_path / "stuck.toml").write_text(STUCK)
    three = ("--policy", "contiguous", "--policy", "growing", "--policy", "paged")
    block = "block_size = 4\n"
    (tmp_path / "stuck.toml").write_text(STUCK + block)
    finished = within("compare", "stuck.toml", *three, "--json")
    assert finished.returncode == 0
    compared = json.loads(finished.stdout)
    assert [summary["policy"] for summary in compared["policies"]] == ["contiguous", "paged"]
    for summary in compared["policies"]:
        check_summary(summary)
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"warning: left out {NO_PROGRESS}")


def test_compare_ends_where_nobody_makes_progress(within, tmp_path):
    (tmp_path / "stuck.toml").write_text(STUCK)
    said = complaint(within("compare", "stuck.toml", "--policy", "growing", "--json"))
    assert said.startswith(f"left out {NO_PROGRESS}")


@pytest.mark.slow
def test_compare_shows_prefix_hits_and_preemptions(within, tmp_path):
    (tmp_path / "tight.toml").write_text(TIGHT.replace('"swap"', '"recompute"'))
    printed = succeeded(within("compare", "tight.toml", "--policy", "paged", "--policy", "chunked", "--out", "kept"))
    table = pd.read_csv(tmp_path / "kept" / "tight" / "comparison.csv", index_col="policy")
    assert table.loc["paged", "prefix_hit_rate"] > 0.3
    assert table.loc["chunked", "prefix_hit_rate"] == 0
    assert (table["preemptions"] > 0).all()
    assert f"{table.loc['paged', 'prefix_hit_rate']:.1%}" in printed
    assert "preemptions" in printed


@pytest.mark.slow
def test_a_run_that_preempts_does_not_claim_that_nothing_was_found(within, tmp_path):
    rows = "2024-01-01 00:00:00,60,60\n" * 8
    (tmp_path / "mine.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    (tmp_path / "mine.toml").write_text(
        '[workload]\nkind = "azure"\npath = "mine.csv"\n[server]\nscheduler = "vllm"\nslots = 8\n'
        '[cache]\npolicy = "vllm"\ncells = 400\n'
    )
    printed = succeeded(within("run", "mine.toml"))
    assert "prefixes: unknown: this trace does not say which prompts share a beginning; " in printed
    assert json.loads(succeeded(within("run", "mine.toml", "--json")))["prefix"]["hit_rate"] is None
    assert "unknown" in succeeded(within("compare", "mine.toml", "-p", "vllm", "-p", "paged"))


OWN = """ts;who;in;out
2026-03-01T10:00:00Z;u1;220;35
2026-03-01T10:00:02.5Z;u2;340;60
2026-03-01T10:00:09Z;u1;290;41
2026-03-01T10:00:19Z;u2;460;50
2026-03-01T10:00:15Z;u1;380;22
"""
NAMED = ("--columns", "arrival=ts,prompt=in,output=out,session=who")


def test_a_table_of_one_s_own_is_read_by_its_columns(within, tmp_path):
    """Of u1, 220 + 35 and 290 + 41 tokens come again, of u2 340 + 60; the last token of an answer is not computed."""
    (tmp_path / "mine.log").write_text(OWN)
    done = within("prefix-cache", "mine.log", *NAMED, "--json", "-e", "lru")
    told = json.loads(succeeded(done, warned=True))
    assert told["infinite_hit_rate"] == 16 * (254 // 16 + 330 // 16 + 399 // 16) / (220 + 290 + 380 + 340 + 460)
    assert "5 rows were sorted by arrival, 1 of them out of order, and put together in 2 sessions" in done.stderr
    assert "3 of 3 later turns" in done.stderr
    described = json.loads(succeeded(within("workload", "describe", "mine.log", *NAMED, "--json"), warned=True))
    assert described["reuse"]["hit_rate"] == told["infinite_hit_rate"]
    assert (described["sessions"], described["duration_s"]) == (2, 19.0)


@pytest.mark.parametrize(("scale", "decimals"), [(1, 3), (1e3, 0), (1e6, 0), (1e9, 0)])
def test_numbers_since_1970_are_read_in_their_unit(within, tmp_path, scale, decimals):
    rows = "".join(f"{(1_770_000_000 + at) * scale:.{decimals}f},{tokens},5\n" for at, tokens in ((0, 30), (8, 40)))
    (tmp_path / "mine.csv").write_text(f"Arrival,Prompt,output\n{rows}")
    assert json.loads(succeeded(within("workload", "describe", "mine.csv", "--json")))["duration_s"] == 8


def test_the_unit_of_times_can_be_given(within, tmp_path):
    (tmp_path / "mine.csv").write_text("arrival,prompt,output\n500,30,5\n1500,30,5\n")
    told = json.loads(succeeded(within("workload", "describe", "mine.csv", "--time", "ms", "--json")))
    assert told["duration_s"] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("brief_search")
def test_a_recommendation_for_a_table_of_one_s_own(within, tmp_path):
    rows = "".join(f"{i / 4},{30 + i % 7},{5 + i % 3}\n" for i in reversed(range(60)))
    (tmp_path / "mine.csv").write_text(f"ts,in,out\n{rows}")
    options = ("--slo", "ttft_p95<1s", "--engine", "vllm", "--requests", "20", "--workers", "1", "--model", "tiny")
    done = within("recommend", "--trace", "mine.csv", "--columns", "arrival=ts,prompt=in,output=out", *options)
    printed = " ".join(succeeded(done).split())
    assert "60 rows were sorted by arrival, 59 of them out of order" in printed
    assert (
        "prefix hits: unknown: this trace does not say which prompts share a beginning; it is assumed that none do"
        in printed
    )


OWN_MISTAKES = {
    "none named": ((), "mine.log: begins with 'ts;who;in;out'; expected a trace of one of the kinds azure, "),
    "some named": (
        ("--columns", "arrival=ts,session=who"),
        "mine.log: no column is clearly prompt or output; name its columns with --columns arrival=ts,prompt=NAME,"
        "output=out (and session, priority, if there); found: ts, who, in, out",
    ),
    "unknown field": (
        ("--columns", "arival=ts"),
        "--columns: there is no 'arival'; did you mean 'arrival'? accepted: ",
    ),
    "no name": (
        ("--columns", "arrival=ts,prompt"),
        "--columns: 'prompt' is not FIELD=NAME; pairs such as arrival=ts",
    ),
    "twice": (("--columns", "arrival=ts,arrival=in"), "--columns: arrival is given twice; pairs such as"),
    "no such column": (
        ("--columns", "arrival=tz,prompt=in,output=out"),
        "mine.log: header: no column 'tz'; expected tz,in,out, got 'ts,who,in,out'",
    ),
    "one for two": (
        ("--columns", "arrival=ts,prompt=in,output=in"),
        "mine.log: column 'in' is named twice, for prompt",
    ),
    "no such unit": ((*NAMED, "--time", "h"), "--time: 'h'; accepted: s, ms, us, ns, datetime"),
    "another unit": (
        (*NAMED, "--time", "ms"),
        "mine.log: row 1: ts '2026-03-01T10:00:00Z' is not a time; expected a num",
    ),
}


@pytest.mark.parametrize(("options", "answer"), OWN_MISTAKES.values(), ids=OWN_MISTAKES)
@pytest.mark.parametrize("verb", [("prefix-cache",), ("workload", "describe")])
def test_a_table_that_cannot_be_understood_is_answered_in_one_line(within, tmp_path, verb, options, answer):
    (tmp_path / "mine.log").write_text(OWN)
    assert complaint(within(*verb, "mine.log", *options)).startswith(answer)


def test_columns_are_for_tables_only(within, tmp_path):
    (tmp_path / "trace.csv").write_bytes(AZURE)
    assert "--continue-clock are for trace files" in complaint(within("prefix-cache", "chat", *NAMED))
    assert "columns is an option of trace files" in complaint(within("workload", "describe", "chat", *NAMED))
    refused = complaint(within("workload", "describe", "trace.csv", "--kind", "azure", *NAMED))
    assert refused == "trace.csv: --columns and --time are for tables; a trace of kind azure has columns of its own"
    slo = ("--slo", "ttft_p95<1s")
    assert "for a trace given by --trace only" in complaint(within("recommend", "--scenario", "chat", *slo, *NAMED))


def test_a_scenario_that_is_shown_loads_again(within, tmp_path):
    shown = succeeded(within("scenario", "show", "chat"))
    (tmp_path / "shown.toml").write_text(shown)
    assert load_scenario(tmp_path / "shown.toml").to_toml() == load_scenario("chat").to_toml()
    said, text = shown.splitlines()[:2], "".join(shown.splitlines(keepends=True)[2:])
    assert text == load_scenario("chat").to_toml()
    assert said[0].startswith("# scheduler llama-server: llama-server 0.6.0-dev")
    assert said[1] == "# policy contiguous: a layout of no engine"


def test_scenarios_and_policies_are_listed(within):
    assert succeeded(within("scenario", "list")).split() == builtin_names()
    described = json.loads(succeeded(within("policies", "--json")))
    assert described.keys() >= {"contiguous", "paged"}
    assert all(line and "\n" not in line for line in described.values())


@pytest.mark.slow
def test_a_reader_who_leaves_early_sees_no_traceback():
    program = subprocess.Popen([PROGRAM, "policies"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    program.stdout.close()
    assert program.stderr.read() == ""
    program.stderr.close()
    program.wait()


@pytest.mark.slow
def test_a_calibrated_profile_predicts(within, tmp_path, monkeypatch):
    monkeypatch.setattr("kvsim.calibration.subject._EACH", (8, 8))
    # Tests share the machine with each other, so a busy one is no obstacle here.
    measured = json.loads(succeeded(within("calibrate", "--seconds", "1", "--force", "--out", "mine.json", "--json")))
    assert measured == json.loads((tmp_path / "mine.json").read_text())
    assert load_profile("mine.json", tmp_path).samples == measured["samples"]
    predicted = json.loads(succeeded(within("run", "chat", "--requests", "10", "--profile", "mine.json", "--json")))
    assert predicted["profile"] == measured["name"] == "mine"
    check_summary(predicted)


@pytest.mark.parametrize("where", ["importing", "running"])
def test_an_interrupt_ends_with_130_whenever_it_comes(where, monkeypatch):
    reached = []

    def interrupt(name="called"):
        if name.startswith("__"):  # The import system's own questions.
            raise AttributeError(name)
        reached.append(name)
        raise KeyboardInterrupt

    module = ModuleType("kvsim.cli.app")
    setattr(module, "__getattr__" if where == "importing" else "main", interrupt)
    monkeypatch.setitem(sys.modules, "kvsim.cli.app", module)
    monkeypatch.setattr(program, "_postpone_collections", lambda: None)
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 130
    assert reached == ["main" if where == "importing" else "called"]


def test_a_comparison_fits_a_screen_and_all_has_the_rest(within):
    run = ("compare", "chat", "-p", "paged", "-p", "llama.cpp-b6975", "--requests", "60")
    brief, whole = succeeded(within(*run)), succeeded(within(*run, "--all"))
    for printed in (brief, whole):
        assert "what your users wait for" in printed
    for detail in ("batch", "assumed under llama.cpp-b6975"):
        assert detail in whole
        assert detail not in brief
    assert "--all" in brief
    assert "--all" not in whole


def test_why_takes_what_run_takes(within, tmp_path):
    told = within("why", "chat", "--requests", "60", "--seed", "3", "--scheduler", "vllm", "-p", "vllm", "--json")
    told = json.loads(succeeded(told))
    assert (told["completed"], told["policy"]) == (60, "vllm")
    (tmp_path / "results").mkdir()
    assert complaint(within("why", "results", "--seed", "3")) == "--seed: of a scenario; results has results"


def test_a_policy_that_is_typed_makes_up_for_one_that_cannot_serve_the_model(within):
    """The scenario's own keeps no states."""
    served = ("agents", "--model", "qwen3.5-27b", "--device", "h200_sxm", "--requests", "3")
    assert json.loads(succeeded(within("run", *served, "-p", "hybrid", "--json")))["policy"] == "hybrid"
    assert complaint(within("run", *served)).startswith("agents: scenario: qwen3.5-27b: its layers keep states")
    assert complaint(within("run", *served, "-p", "hybird")).startswith("no policy called 'hybird'")
    assert complaint(within("why", *served, "-p", "hybrid", "--kv", "q9")).startswith(
        "agents: scenario: --cache-type-k: no type"
    )


def test_what_a_device_replaces_in_a_file_is_said(within, tmp_path):
    own = """
[workload]
requests = 9
[model]
name = "qwen3-8b"
[server]
slots = 6
[cache]
cells = 20000
"""
    (tmp_path / "own.toml").write_text(own)
    done = within("run", "own.toml", "--device", "rtx4090", "--json")
    assert done.stderr == (
        "warning: own.toml: server.slots = 6, cache.cells = 20000: left aside, as of another machine than rtx4090; to "
        'keep them, write device = "rtx4090" in the file\'s [machine]\n'
    )
    assert json.loads(done.stdout)["slots"] == 256
    (tmp_path / "own.toml").write_text(f'{own}[machine]\ndevice = "rtx4090"\n')
    done = within("run", "own.toml", "--device", "rtx4090", "--json")
    assert done.stderr == ""
    assert (json.loads(done.stdout)["slots"], json.loads(done.stdout)["cells"]) == (6, 20000)


def test_a_sweep_says_what_a_device_replaces_too(within, tmp_path):
    """But for its axes, and for scenarios that kvsim ships."""
    sweep = """
[base.workload]
requests = 9
[base.model]
name = "qwen3-8b"
[base.server]
slots = 6
[base.cache]
cells = 20000
[axes]
"cache.cells" = [8192, 16384]
"""
    (tmp_path / "own.toml").write_text(sweep)
    done = within("sweep", "own.toml", "--device", "rtx4090", "--workers", "1", "--json")
    assert done.returncode == 0
    assert done.stderr == (
        "warning: own.toml: server.slots = 6: left aside, as of another machine than rtx4090; to keep them, write "
        'device = "rtx4090" in the file\'s [machine]\n'
    )
    (tmp_path / "own.toml").write_text('scenario = "chat"\n[axes]\n"workload.rate" = [1.0]\n')
    again = within("sweep", "own.toml", "--device", "rtx4090", "--model", "qwen3-8b", "--requests", "9", "--json")
    assert (again.returncode, "left aside" in again.stderr) == (0, False)


def test_options_are_said_as_they_are_typed():
    given = ScenarioOptions(scenario="chat", requests=40, ngl=3, flash_attn=False, skip_bad_rows=True)
    assert given.typed == "--n-gpu-layers 3 --no-flash-attn --requests 40 --skip-bad-rows"


def test_what_why_proposes_has_the_options_that_were_typed(within):
    served = ("--model", "qwen3-8b", "--device", "rtx4090")
    told = succeeded(within("why", "chat", "--requests", "40", *served))
    assert f"kvsim compare chat {' '.join(served)} --requests 40 --profile FILE" in told
    succeeded(within("compare", "chat", "-p", "paged", "-p", "vllm", "--requests", "40"))
    told = succeeded(within("why", "results/chat", *served))
    assert f"kvsim compare results/chat/scenario.toml {' '.join(served)} --profile FILE" in told


def test_as_what_a_log_was_read_is_no_warning(within, tmp_path):
    rows = "".join(
        f'{{"timestamp": "2026-01-01T00:00:0{i}Z", "usage": {{"prompt_tokens": 90, "completion_tokens": 9}}}}\n'
        for i in range(9)
    )
    (tmp_path / "log.jsonl").write_text(rows)
    done = within("run", "log.jsonl", "--model", "qwen3-8b", "--device", "rtx4090")
    assert done.stderr.startswith("note: log.jsonl: read as answers of OpenAI's API")


LOG = "timestamp,prompt_tokens,completion_tokens\n" + "".join(f"{i},{300 + 50 * i},{20 + i}\n" for i in range(10))


def test_a_log_is_run_where_a_scenario_is_expected(within, tmp_path):
    (tmp_path / "mine.csv").write_text(LOG)
    served = ("--model", "qwen3-8b", "--device", "rtx4090")
    ran = json.loads(within("run", "mine.csv", *served, "--json").stdout)
    assert (ran["scenario"], ran["requests"], ran["completed"]) == ("mine", 10, 10)
    assert "mine under vllm" in within("why", "mine.csv", *served).stdout
    (tmp_path / "own.csv").write_text(LOG.replace("timestamp,prompt_tokens,completion_tokens", "a,b,c"))
    columns = ("--columns", "arrival=a,prompt=b,output=c", "--time", "s")
    own = json.loads(within("run", "own.csv", *served, *columns, "--json").stdout)
    assert own["ttft_s"] == ran["ttft_s"]
    assert "own under vllm" in within("why", "own.csv", *served, *columns).stdout
    assert "of a table of your own" in complaint(within("run", "chat", *columns))
    said = complaint(within("run", "mine.csv"))
    assert said == "mine.csv: say what serves them, --model and --device, or name a scenario that does"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("runn", "No such command 'runn'. Did you mean 'run'?; see kvsim --help"),
        ("run --requests", "Option '--requests' requires an argument; see kvsim --help"),
        (
            "compare chat --polcy x",
            "No such option: --polcy (Possible options: --policy, --profile); see kvsim compare",
        ),
        ("workload describ x", "No such command 'describ'. Did you mean 'describe'?; see kvsim workload --help"),
        ("check", "Missing argument 'command'; see kvsim check --help"),
        ("run --tp 1 --tp=2", "--tp: given 2 times; one is expected; kvsim recommend takes several"),
        ("plan --device rtx3090 --device rtx4090", "--device: given 2 times; one is expected; kvsim recommend takes"),
    ],
)
def test_a_command_that_is_typed_wrongly_is_refused_in_one_line(within, words, said):
    assert complaint(within(*words.split())).startswith(said)
