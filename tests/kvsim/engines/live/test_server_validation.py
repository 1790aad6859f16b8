"""Asking servers in turns, and comparing what they took."""

import pytest
from typer.testing import CliRunner

from kvsim.cli.commands.validate import app
from kvsim.engines.live import server_validation
from kvsim.engines.live.address import address_of
from kvsim.engines.live.recorded_meta import Asking
from kvsim.engines.live.server_validation import validate_servers
from kvsim.errors import UserError
from kvsim.scenario.scenario import load_scenario
from tests.kvsim.engines.live.fake_server import fake_server
from tests.kvsim.engines.recordings.stepped_servers import KNOWN

OF_FAKE = KNOWN.model_copy(update={"model": "fake.gguf"})
SMALL = load_scenario(
    {
        "name": "small",
        "workload": {
            "kind": "poisson",
            "rate": 400.0,
            "requests": 12,
            "prompt_tokens": {"kind": "fixed", "value": 12},
            "output_tokens": {"kind": "fixed", "value": 3},
        },
    }
)


def asked(server, **keys):
    return Asking(address_of(server.url, allow_remote=False), **keys)


def test_every_turn_asks_every_server(tmp_path):
    begun = []
    with fake_server(token_s=0.003) as one, fake_server(token_s=0.003) as other:
        done = validate_servers(
            SMALL, [asked(one), asked(other)], OF_FAKE, tmp_path, announce=lambda name, total: begun.append(name)
        )
        assert len(one.asked) == len(other.asked)
    assert [name.partition(":")[0] for name in begun[:4]] == ["turn 1 of 2"] * 2 + ["turn 2 of 2"] * 2
    assert len(done.recordings) == len(done.compared.runs) == 4
    assert {path.name for path in tmp_path.glob("*.jsonl.gz")} == {
        f"small.127.0.0.1-{server.port}.turn{turn}.jsonl.gz" for server in (one, other) for turn in (1, 2)
    }
    for run in done.compared.runs:
        assert run.recording.seen
        assert len(run.requests) == 12
        assert run.spread is not None


def test_failed_requests_are_a_warning(tmp_path):
    with fake_server(token_s=0.003, refuses=400, faulty_from=11) as server:
        done = validate_servers(SMALL, [asked(server)], OF_FAKE, tmp_path, turns=1)
    assert any("failed; request" in line for line in done.warnings)


def test_a_server_that_goes_leaves_what_was_gathered_and_can_be_resumed(tmp_path):
    with fake_server(token_s=0.003, is_gone=True, faulty_from=6) as server:
        port = server.port
        with pytest.raises(UserError) as stopped:
            validate_servers(SMALL, [asked(server)], OF_FAKE, tmp_path, turns=1)
    assert "of 12 requests are in" in str(stopped.value)
    assert "--resume goes on" in str(stopped.value)
    with fake_server(token_s=0.003, port=port) as again:
        done = validate_servers(SMALL, [asked(again, resume=True)], OF_FAKE, tmp_path, turns=1)
        kept = len(again.asked)
        # All is there now: nothing more is asked.
        validate_servers(SMALL, [asked(again, resume=True)], OF_FAKE, tmp_path, turns=1)
        assert len(again.asked) == kept
    assert len(done.compared.runs[0].requests) == 12


def test_a_recording_of_other_requests_is_not_taken_for_theirs(tmp_path):
    with fake_server(token_s=0.003) as server:
        validate_servers(SMALL, [asked(server)], OF_FAKE, tmp_path, turns=1)
        other = load_scenario(SMALL, workload__requests=7)
        with pytest.raises(UserError, match="has 12 requests with seed 1; asked for are 7 with seed 1; without"):
            validate_servers(other, [asked(server, resume=True)], OF_FAKE, tmp_path, turns=1)


def test_a_profile_of_another_model_is_refused(tmp_path):
    with (
        fake_server(token_s=0.003) as server,
        pytest.raises(UserError, match=r"and profile known is of x\.gguf"),
    ):
        validate_servers(SMALL, [asked(server)], KNOWN.model_copy(update={"model": "x.gguf"}), tmp_path, turns=1)


@pytest.mark.parametrize(("begun", "says"), [(True, "--resume goes on"), (False, "stopped\n")])
def test_an_interrupt_says_what_is_kept(begun, says, tmp_path, monkeypatch):
    def interrupted(scenario, servers, profile, folder, **_):
        folder.mkdir(parents=True)
        if begun:
            (folder / "chat.turn1.jsonl.gz.part").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(server_validation, "validate_servers", interrupted)
    done = CliRunner().invoke(
        app, ["chat", "--url", "http://127.0.0.1:9", "--profile", "default", "--out", str(tmp_path)]
    )
    assert done.exit_code == 130
    assert done.stderr.endswith(f"{says}\n" if begun else says)
    assert (str(tmp_path / "validate-chat") in done.stderr) is begun
