"""Logs that one has anyway, in files that were made up in the forms that ``own_logs`` cites."""

from pathlib import Path

import pytest

from tests.worlds import command
from workloads import WorkloadError, open_trace, sniff

LOGS = Path(__file__).parents[2] / "data" / "logs"
TWO = [(631, 42), (120, 200)]
"""What most of the files have: the tokens of two prompts and answers."""


def read(path):
    trace = open_trace(path)
    return trace, [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in trace]


@pytest.mark.parametrize(
    ("name", "apart_s", "said"),
    [
        ("openai.jsonl", 7.0, "answers of OpenAI's API with their usage, one a line"),
        ("timings.jsonl", 7.0, "answers of llama-server with their timings, one a line"),
        ("ollama.jsonl", 7.0, "answers of Ollama, one a line"),
        ("litellm.csv", 7.125, "LiteLLM's spend log, CSV"),
        ("llama-server.log", 2.1, "llama-server's log; requests begin where they get a slot"),
        ("access.log", 7.0, "nginx's access log"),
        ("vllm-bench.json", 7.25, "a result of vllm bench serve"),
        ("guidellm.json", 7.0, "a report of GuideLLM"),
    ],
)
def test_a_log_is_found_by_itself_and_says_what_it_was_read_as(name, apart_s, said):
    assert sniff(LOGS / name) == "log"
    trace, requests = read(LOGS / name)
    assert [tokens for _, *tokens in requests] == [list(tokens) for tokens in TWO]
    assert [at for at, *_ in requests] == pytest.approx([0.0, apart_s])
    assert trace.notes[0].endswith(f"{name}: read as {said}")


def test_vllm_s_log_counts_the_tokens_of_streams_part_by_part():
    _, requests = read(LOGS / "vllm.log")
    assert requests == [(0.0, 5, 3), (4.0, 2, 2)]


def test_sessions_that_a_log_names_are_conversations():
    trace = open_trace(LOGS / "litellm.json")
    first, second = trace
    assert (first.session, second.session, second.think_s) == (0, 0, pytest.approx(7.125))
    assert second.content[:2] == (*first.content, first.answer)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("openai.jsonl", (751, 512, 512, 0.5)),
        ("timings.jsonl", (751, 512, 512, 0.5)),
        ("llama-server.log", (751, 512, 512, 0.5)),
        ("litellm.json", (631 + 720, 640, 640, 0.5)),
        ("ollama.jsonl", None),
    ],
)
def test_what_the_servers_cache_held_is_kept(name, found):
    trace = open_trace(LOGS / name)
    assert trace.logged_hits == found
    assert open_trace(LOGS / name, limit=1).logged_hits is None


def test_litellm_keeps_metadata_in_csv_too(tmp_path):
    path = tmp_path / "spend.csv"
    told = ['"{""additional_usage_values"": {""cache_read_input_tokens"": 30}}"', "not JSON", ""]
    rows = [f"2026-11-02T10:00:0{i}Z,100,7,{metadata}" for i, metadata in enumerate(told)]
    path.write_text("\n".join(["startTime,prompt_tokens,completion_tokens,metadata", *rows]) + "\n")
    assert open_trace(path).logged_hits == (300, 30, 30, pytest.approx(1 / 3))


def test_calls_without_tokens_are_left_out_and_counted():
    trace, _ = read(LOGS / "litellm.csv")
    assert trace.notes[1].endswith("1 entry without numbers of tokens dropped: row 2")


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_plain_columns_need_no_names(tmp_path, suffix):
    path = tmp_path / f"log.{suffix}"
    rows = [(1790000000, 631, 42), (1790000007, 120, 200)]
    names = ("timestamp", "prompt_tokens", "completion_tokens")
    if suffix == "csv":
        lines = [",".join(names), *(",".join(map(str, row)) for row in rows)]
    else:
        lines = [str(dict(zip(names, row, strict=True))).replace("'", '"') for row in rows]
    path.write_text("\n".join(lines) + "\n")
    assert read(path)[1] == [(0.0, 631, 42), (7.0, 120, 200)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.00.000.412 I build: 6975 (0123abcd)\n", "log.txt: a log of llama-server in which no slot got a request"),
        (
            "slot launch_slot_: id  0 | task 0 | processing task\n"
            "slot update_slots: id  0 | task 0 | new prompt, n_ctx_slot = 4096, n_keep = 0, task.n_tokens = 6\n"
            "       eval time =    1500.00 ms /    42 tokens\n",
            "log.txt: no times; start llama-server with --log-timestamps",
        ),
        (
            "INFO 11-02 10:00:00 [logger.py:40] Received request a: params: x\n",
            "log.txt: a log of vLLM without numbers",
        ),
        ('{"created": "soon", "usage": {"prompt_tokens": 3, "completion_tokens": 4}}\n', "log.txt: row 1: created"),
        (
            '{"created": 3, "usage": {"prompt_tokens": 0.5, "completion_tokens": 4}}\n',
            "log.txt: row 1: prompt_tokens 0.5",
        ),
        (
            '{"created": 3, "cached_tokens": "x", "usage": {"prompt_tokens": 5, "completion_tokens": 4}}\n',
            "log.txt: row 1: not what such a log has",
        ),
        ('{"input_lens": [3], "output_lens": [4]}\n', "log.txt: requests are not where they should be"),
        ('{"benchmarks": [{"requests": 3}]}\n', "log.txt: requests are not where they should be"),
    ],
)
def test_a_log_that_lacks_something_says_what_in_one_line(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    Path("log.txt").write_text(text)
    with pytest.raises(WorkloadError) as caught:
        open_trace("log.txt")
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_what_is_no_log_gets_its_columns_and_the_nearest_names(tmp_path):
    (tmp_path / "odd.csv").write_text("prompt_toks,outputs,start_tm\n1,2,3\n")
    done = command("workload", "describe", str(tmp_path / "odd.csv"))
    assert done.returncode == 2
    assert "--columns arrival=start_tm,prompt=prompt_toks,output=outputs" in done.stderr
    assert "found: prompt_toks, outputs, start_tm" in done.stderr
    gin = command("workload", "describe", str(LOGS / "gin.log"))
    assert gin.returncode == 2
    assert "this log of Ollama says when requests ended, not how long they were" in gin.stderr
