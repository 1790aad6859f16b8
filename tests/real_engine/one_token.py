"""Generate one token with a llama.cpp, before tests that would take minutes to show that it cannot.

``python -m tests.real_engine.one_token [FOLDER | LLAMA-SERVER]``: the installed llama-cpp-python, that of a folder, or
a server. One that was compiled for another processor dies without a word; a line says so, and the exit code is 1.
"""

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import Request, urlopen

from kvsim.errors import UserError
from kvsim.model.engine_shapes import gguf_path
from real_engine.llama_library import Context, ContextSettings, Library, LlamaModel
from tests.real_engine.llama_server.server import running
from tests.real_engine.llamacpp.models import write_llama

_LIMIT_S = 150.0
_IN_HERE = "--in-here"
DIED = (
    "died of an illegal instruction: it was compiled for another processor, or for instructions that this system does "
    "not enable. Remove .venv/.llama, .venv/llama-server and .venv/llama-0.3.8, and make test-llama compiles it anew"
)


def _model(folder: str) -> Path:
    """SmolLM2, whose weights are quantized; a tiny model where it is not there."""
    try:
        found = gguf_path("smollm2")
    except UserError:
        found = None
    return Path(found) if found is not None else write_llama(Path(folder) / "tiny.gguf")


def library(folder: str | None = None) -> None:
    """Decode a token in this process, which a wrong instruction ends."""
    loaded = Library(folder)
    settings = ContextSettings(cells=256, n_batch=32, n_ubatch=32, sequences=1)
    with (
        tempfile.TemporaryDirectory() as made,
        LlamaModel(loaded, _model(made)) as model,
        Context(model, settings) as context,
    ):
        context.decode([(0, 0, True, (1,))])
    print("testing against", loaded.name)


def server(path: Path) -> None:
    """Start a server and ask it for a token. Raises ``RuntimeError`` if it ends by itself, ``OSError`` if silent."""
    body = json.dumps({"prompt": [1], "n_predict": 1}).encode()
    with (
        tempfile.TemporaryDirectory() as made,
        running(path, _model(made), ["-t", "1", "-c", "256"], Path(made) / "log", _LIMIT_S) as port,
        urlopen(Request(f"http://127.0.0.1:{port}/completion", body), timeout=_LIMIT_S) as answer,
    ):
        answer.read()
    print("testing against", path)


def main(words: list[str]) -> int:
    """Do as told; the exit code."""
    if words[:1] == [_IN_HERE]:
        library(*words[1:])
        return 0
    fault = ""
    if words and Path(words[0]).is_file():
        try:
            server(Path(words[0]))
        except (RuntimeError, OSError) as e:
            fault = f"{words[0]} {DIED if str(-signal.SIGILL) in str(e).split() else f'gave no token: {e}'}"
    else:
        command = [sys.executable, "-m", "tests.real_engine.one_token", _IN_HERE, *words]
        code = subprocess.run(command, check=False).returncode
        fault = f"llama.cpp {DIED if code == -signal.SIGILL else f'gave no token: it ended with {code}'}" * (code != 0)
    if fault:
        print(fault, file=sys.stderr)
    return int(bool(fault))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
