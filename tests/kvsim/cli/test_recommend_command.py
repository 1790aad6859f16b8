"""``kvsim recommend --url``: of a server that runs, what it says is kept to, and asked again."""

import json
from types import SimpleNamespace

from kvsim.advice.memory.command_line import titled_model
from kvsim.engines.live.served import model_of
from tests.kvsim.cli.answers import succeeded
from tests.kvsim.engines.live.fake_server import fake_server

ROWS = "".join(f"{i / 2},{50 + i % 60},20\n" for i in range(60))


def test_a_server_that_runs_is_kept_to_where_there_are_no_times(within, tmp_path):
    (tmp_path / "log.csv").write_text(f"arrival,prompt,output\n{ROWS}")
    asked = "--trace", "log.csv", "--slo", "ttft_p95<2s", "--model", "llama-3.1-8b"
    with fake_server() as server:
        done = within("recommend", *asked, "--url", server.url)
    printed = succeeded(done, warned=True)
    assert done.stderr.count("\n") == 1
    assert "assumed: a cache for each slot, flash attention, K in f16, V in f16, batch 2,048/512; --now" in done.stderr
    assert f"kvsim calibrate --url {server.url} --out mine.json; then give --profile mine.json" in printed
    assert "llama-server --ctx-size 8192 --parallel 4" in printed, "no shorter context than the server's 2,048"
    assert "no shorter than that of the server that runs now, 2,048 tokens" in printed
    assert "vllm serve" not in printed
    assert "; in f16 1" not in printed
    saved = json.loads((tmp_path / "results" / "recommend-log" / "recommendation.json").read_text())
    assert saved["command"].endswith(f" --url {server.url}")
    assert saved["engine"] == "llamacpp"


def test_what_runs_now_is_typed_again(within, tmp_path):
    (tmp_path / "log.csv").write_text(f"arrival,prompt,output\n{ROWS}")
    asked = "--trace", "log.csv", "--slo", "ttft_p95<2s", "--model", "llama-3.1-8b"
    told = json.loads(succeeded(within("recommend", *asked, "--now", "llama-server -c 4096 -np 1", "--json")))
    assert told["command"].endswith(" --now 'llama-server -c 4096 -np 1'")
    assert {dict(fit["flags"])["--ctx-size"] for fit in told["fits"]} == {"4096", "16384"}


def test_a_file_that_is_there_is_read_whatever_model_is_called_like_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = SimpleNamespace(model_file="smollm2.gguf", model=None)
    assert model_of("a server", told, None) == "smollm2", "as far as is known here"
    (tmp_path / "smollm2.gguf").write_bytes(b"GGUF")
    assert model_of("a server", told, None) == str(tmp_path / "smollm2.gguf")
    assert titled_model("smollm2.gguf") == ("smollm2.gguf", None)
