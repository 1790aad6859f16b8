"""How a server was started, as the system tells it."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from kvsim.engines.live.address import Address
from kvsim.engines.live.listening import started_at
from kvsim.engines.live.served import served
from kvsim.engines.live.settings import ServerSettings
from kvsim.errors import UserError
from tests.kvsim.engines.live.fake_server import fake_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it")

LISTENS = """
import socket
listens = socket.create_server(("127.0.0.1", 0))
print(listens.getsockname()[1], flush=True)
input()
"""


@contextmanager
def listening(*words, **variables):
    """Where a process listens whose command line ends with these words."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | variables,
        text=True,
    ) as process:
        try:
            yield Address(f"http://127.0.0.1:{int(process.stdout.readline())}"), process.pid
        finally:
            process.communicate("\n")


def test_a_command_line_is_read_without_its_secrets():
    words = ("llama-server", "-m", "a.gguf", "-np", "4", "-t", "1", "--api-key", "secret", "--no-kv-unified")
    with listening(*words, LLAMA_ARG_CTX_SIZE="4096", LLAMA_API_KEY="hidden") as (address, process):
        found = started_at(address)
    assert (found.process, found.line.program, found.line.title) == (process, "llamacpp", "a.gguf")
    assert found.flags == {"--ctx-size": "4096", "--parallel": "4", "--threads": "1", "--no-kv-unified": ""}
    assert found.words == ["--ctx-size", "4096", "--parallel", "4", "--threads", "1", "--no-kv-unified"]
    assert "secret" not in repr(found)
    assert "hidden" not in repr(found)
    assert found.folder.samefile(os.getcwd())


def test_of_vllm_too():
    with listening("vllm", "serve", "my/model", "--max-num-seqs", "8") as (address, _):
        assert started_at(address).flags == {"--max-num-seqs": "8"}


def test_what_is_no_server_of_these_or_elsewhere_is_not_read():
    with fake_server() as server:
        assert started_at(Address(server.url)) is None
    assert started_at(Address("http://192.0.2.1:8080")) is None
    assert started_at(Address(server.url)) is None


@pytest.mark.slow
def test_a_server_is_what_its_command_line_says():
    with listening("llama-server", "-np", "4", "-t", "1", "-c", "8192") as (address, process):
        started = started_at(address)
    settings = ServerSettings("llama-server", "llama-server b1", slots=4, context=2048, started=started)
    found = served(address, settings, "smollm2")
    assert (found.scenario.unified, found.scenario.cache.cells, found.threads) == (False, 8192, 1)
    assert found.assumed == ("flash attention (no --flash-attn on its command line)",)
    assert served(address, settings, "smollm2", "-t 1 -fa on").assumed == ()
    with pytest.raises(UserError, match=f"--flags says --threads 2, but of .* .process {process}. says .*--threads 1"):
        served(address, settings, "smollm2", "-t 2")
