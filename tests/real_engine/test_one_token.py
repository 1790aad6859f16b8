"""One token before the tests with llama.cpp: one that was compiled for another processor is named."""

import signal
import subprocess

import pytest

from tests.real_engine import one_token


@pytest.mark.parametrize(
    ("code", "says"),
    [(0, ""), (-signal.SIGILL, "died of an illegal instruction: it was compiled for another"), (2, "it ended with 2")],
)
def test_how_a_library_ended_is_told(code, says, monkeypatch, capsys):
    monkeypatch.setattr(one_token.subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, code))
    assert one_token.main(["folder"]) == (code != 0)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("signal", "says"), [("ILL", "died of an illegal instruction"), ("KILL", "gave no token: ")])
def test_a_server_that_ends_while_it_loads_is_told(signal, says, tmp_path, capsys):
    server = tmp_path / "llama-server"
    server.write_text(f"#!/bin/sh\nkill -{signal} $$\n")
    server.chmod(0o755)
    assert one_token.main([str(server)]) == 1
    assert says in capsys.readouterr().err
