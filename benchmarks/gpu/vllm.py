"""Times vLLM on this machine's GPU, with models of random weights: batches of a kind, and a server under load.

    python -m benchmarks.gpu.vllm --out FOLDER

runs ``vllm bench latency`` over a grid, then ``vllm serve`` with ``vllm bench serve`` at several loads, until the
minutes are over; what is there already is not run again. With the Python that has vLLM.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.gpu.llamacpp import LEAST_S, Clock, describe
from benchmarks.gpu.random_gguf import config
from kvsim.errors import UserError

CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
CONTEXT = 8192
BATCHES = ((1, 512), (8, 512), (32, 512), (1, 2048), (1, 7168), (64, 512), (128, 512), (8, 4096))
"""Sequences and tokens of their prompts, the most important first; each generates 64."""
LOADS = (1, 4, 16, 64)
"""Requests at a time, each of 1,024 tokens, with 128 in its answer."""
_BENCH = """
import sys
from importlib import import_module
from vllm.utils.argparse_utils import FlexibleArgumentParser
bench = import_module(f"vllm.benchmarks.{sys.argv.pop(1)}")
parser = FlexibleArgumentParser()
bench.add_cli_args(parser)
bench.main(parser.parse_args())
"""
BENCH = [sys.executable, "-c", _BENCH]
SERVE = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
"""``vllm bench`` and ``vllm serve`` without the command vllm, which the package for processors does not find."""


def write_model(folder: Path, name: str) -> dict[str, Any]:
    """Write what vLLM reads of a model, but for the weights: its shape and a vocabulary of made-up words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    shape = config(name)
    shape |= {"architectures": [CLASSES[shape["model_type"]]], "hidden_act": "silu", "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(shape))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(shape["vocab_size"])}, "w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return shape


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a group of its own."""
    with log.open("a") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it started, which would keep the GPU's memory."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(words: list[str], limit_s: float, log: Path) -> str:
    """Run a command of vLLM, and say what came of it."""
    begin = time.monotonic()
    process = start([*BENCH, *words], log)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        stop(process)
        return f"cut after {limit_s:.0f} s"
    end = f"ended with {process.returncode}, see {log}, " if process.returncode else ""
    return f"{end}{time.monotonic() - begin:.0f} s"


def record(out: Path, name: str, folder: Path, flags: list[str], clock: Clock) -> None:
    """Time one model as far as it has not been."""
    log = out / f"{Path(name).stem}.log"
    common = ["--load-format", "dummy", "--max-model-len", str(CONTEXT), *flags]
    for sequences, prompt in BATCHES:
        path = out / f"{Path(name).stem}-latency-{sequences}x{prompt}.json"
        if path.exists() or clock.left(LEAST_S) < LEAST_S:
            continue
        lengths = ["--input-len", str(prompt), "--output-len", "64", "--batch-size", str(sequences)]
        words = ["latency", "--model", str(folder), *lengths, "--num-iters-warmup", "1", "--num-iters", "3"]
        print(f"{path.name}: {run([*words, '--output-json', str(path), *common], clock.left(180), log)}", flush=True)
    missing = [load for load in LOADS if not (out / f"{Path(name).stem}-serve-{load}.json").exists()]
    if not missing or clock.left(LEAST_S) < LEAST_S:
        return
    port = "8123"
    server = start([*SERVE, "--model", str(folder), "--port", port, *common], log)
    try:
        for load in missing:
            file = f"{Path(name).stem}-serve-{load}.json"
            words = ["serve", "--model", str(folder), "--port", port, "--dataset-name", "random"]
            words += ["--random-input-len", "1024", "--random-output-len", "128", "--ignore-eos", "--save-result"]
            words += ["--max-concurrency", str(load), "--num-prompts", str(max(4 * load, 8)), "--result-dir", str(out)]
            words += ["--result-filename", file, "--ready-check-timeout-sec", "300"]
            if clock.left(LEAST_S) >= LEAST_S and server.poll() is None:
                print(f"{file}: {run(words, clock.left(300), log)}", flush=True)
    finally:
        stop(server)


def main(
    out: Annotated[Path, typer.Option(help="The folder of what is recorded.")],
    models: Annotated[str, typer.Option(help="Names of kvsim plan --list, or config.json files.")] = (
        "llama-3.1-8b,qwen3-14b,qwen3-32b,qwen3-30b-a3b"
    ),
    minutes: Annotated[float, typer.Option(help="For all of it.")] = 8.0,
    flags: Annotated[str, typer.Option(help="More flags of vLLM's engine, such as --enforce-eager.")] = "",
) -> None:
    """Time vLLM with models of random weights."""
    clock = Clock(time.monotonic() + 60 * minutes)
    try:
        for model in models.split(","):
            config(model)
        if importlib.util.find_spec("vllm") is None:
            raise UserError(f"{sys.executable} has no vllm; run this with a Python that has it")
    except UserError as e:
        print(e, file=sys.stderr)
        raise typer.Exit(2) from None
    out.mkdir(parents=True, exist_ok=True)
    describe(out)
    for model in models.split(","):
        # Named like the model, which is what the results are of.
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / re.sub(r"[^\w.-]", "-", Path(model).stem)
            folder.mkdir()
            write_model(folder, model)
            record(out, model, folder, flags.split(), clock)


if __name__ == "__main__":
    typer.run(main)
