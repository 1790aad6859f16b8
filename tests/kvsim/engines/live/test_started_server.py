"""Starting a server by a command: where it listens, what it is started with, and that it always ends."""

import json
import os
import shlex
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from kvsim.engines.live.started_server import check_free, read_command, started
from kvsim.errors import UserError

PROGRAM = Path(__file__).parent / "fake_program.py"
FLAGS = (("--ctx-size", "8192"), ("--kv-unified", ""), ("--parallel", "4"))


def fake(port, *options):
    return read_command(shlex.join([sys.executable, str(PROGRAM), "--port", str(port), *map(str, options)]))


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that has ended and was not waited for by whoever has it now.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pids, within_s=60):
    until = time.monotonic() + within_s
    while any(map(runs, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(map(runs, pids))


# The command


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ("--port 9000", "http://127.0.0.1:9000"),
        ("--port=9000 --host localhost", "http://localhost:9000"),
        ("--port 1 --port 9000", "http://127.0.0.1:9000"),
        ("--host 0.0.0.0", "http://127.0.0.1:8080"),
        ("--host ::1 --port 9000", "http://[::1]:9000"),
        ("", "http://127.0.0.1:8080"),
        ("vllm serve", "http://127.0.0.1:8000"),
    ],
)
def test_the_address_is_that_of_the_options(words, url):
    assert read_command(f"{sys.executable} {words}").address.url == url


def test_the_address_can_be_given():
    assert read_command(f"{sys.executable} --port 1", "http://127.0.0.1:2/v1").address.url == "http://127.0.0.1:2"


@pytest.mark.parametrize(
    ("words", "engine"),
    [("/opt/llama-server -m x.gguf", "llamacpp"), ("-m vllm.entrypoints.openai.api_server", "vllm"), ("x.py", None)],
)
def test_the_engine_is_known_by_the_words(words, engine):
    assert read_command(f"{sys.executable} {words}").engine == engine


def test_flags_go_to_the_end_or_where_they_are_asked_for():
    plain = ["--ctx-size", "8192", "--kv-unified", "--parallel", "4"]
    assert read_command("sh -m x").with_flags(FLAGS) == ["sh", "-m", "x", *plain]
    assert read_command("sh {flags} --port 1").with_flags(FLAGS) == ["sh", *plain, "--port", "1"]
    quoted = read_command("sh -c 'cd models; llama-server {flags}'").with_flags(FLAGS)
    assert quoted == ["sh", "-c", "cd models; llama-server --ctx-size 8192 --kv-unified --parallel 4"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "no command"),
        ("sh 'unclosed", "no closing quotation"),
        ("no-such-program -m x", "no-such-program: there is no such program"),
        ("sh --host example.org", "http://example.org:8080: not an address of this machine"),
        ("sh --port eighty", "an address such as http://127.0.0.1:8080 is expected"),
    ],
)
def test_a_command_that_cannot_be_is_refused_in_one_line(command, message):
    with pytest.raises(UserError, match="--verify: ") as fault:
        read_command(command)
    assert message in str(fault.value)
    assert "\n" not in str(fault.value)


# The server


def test_it_is_ready_with_its_flags_and_ends_with_all_that_it_started(port, tmp_path):
    command = fake(port, "--child", tmp_path / "pids", "--argv", tmp_path / "argv")
    with started(command, FLAGS, start_s=30) as (settings, process):
        assert settings.api == "llama-server"
        assert process == json.loads((tmp_path / "pids").read_text())[0]
        pids = json.loads((tmp_path / "pids").read_text())
        assert all(map(runs, pids))
        assert json.loads((tmp_path / "argv").read_text())[-5:] == command.with_flags(FLAGS)[-5:]
    assert gone(pids)
    check_free(command.address)


def test_it_ends_when_the_user_stops(port, tmp_path):
    with pytest.raises(KeyboardInterrupt), started(fake(port, "--child", tmp_path / "pids"), (), start_s=30):
        raise KeyboardInterrupt
    assert gone(json.loads((tmp_path / "pids").read_text()))


def test_it_ends_when_we_are_told_to_end(port, tmp_path):
    before = signal.getsignal(signal.SIGTERM)

    def asked():
        with started(fake(port, "--child", tmp_path / "pids"), (), start_s=30):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(SystemExit) as end:
        asked()
    assert end.value.code == 128 + signal.SIGTERM
    assert gone(json.loads((tmp_path / "pids").read_text()))
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_port_in_use_is_told_before_anything_is_started(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = fake(port, "--argv", tmp_path / "argv")
        with pytest.raises(UserError, match=f"{port}: the port is in use"), started(command, ()):
            pass
    assert not (tmp_path / "argv").exists()


def test_one_that_ends_says_how_and_its_last_line(port):
    with (
        pytest.raises(UserError, match=r"the server ended with code 5; it said last: error: no such model$"),
        started(fake(port, "--ends", 5), (), start_s=30),
    ):
        pass


def test_one_that_ends_while_it_is_asked_says_so_too(port, tmp_path):
    def asked():
        with started(fake(port, "--child", tmp_path / "pids"), (), start_s=30):
            server = json.loads((tmp_path / "pids").read_text())[0]
            os.kill(server, signal.SIGKILL)
            assert gone([server])
            raise UserError("cannot be reached")

    with pytest.raises(UserError, match=r"the server ended by signal 9; it said last: loading$"):
        asked()
    assert gone(json.loads((tmp_path / "pids").read_text()))


def test_one_that_was_compiled_for_another_processor_says_so(port, tmp_path):
    command = read_command(
        f"{sys.executable} -c 'import os, signal; os.kill(os.getpid(), signal.SIGILL)' --port {port}"
    )
    with (
        pytest.raises(UserError, match="an illegal instruction: it was compiled for another processor"),
        started(command, ()),
    ):
        pass


def test_one_that_never_is_ready_is_given_up(port, tmp_path):
    command = fake(port, "--never-ready", "--child", tmp_path / "pids")
    with (
        pytest.raises(UserError, match=r"not ready after 2 s: .*it said last: loading$"),
        started(command, (), start_s=2),
    ):
        pass
    assert gone(json.loads((tmp_path / "pids").read_text()))


def test_one_that_is_no_program_cannot_be_started(tmp_path, port):
    path = tmp_path / "llama-server"
    path.write_text("not a program")
    path.chmod(0o755)
    with pytest.raises(UserError, match="cannot be started: "), started(read_command(f"{path} --port {port}"), ()):
        pass
