"""Which profile ``validate --url`` takes where none is named."""

import os
from dataclasses import dataclass

from kvsim.cli.server_calibration import _saved_here
from kvsim.scenario.scenario import Scenario, load_scenario
from tests.kvsim.engines.recordings.stepped_servers import KNOWN


@dataclass
class _Served:
    scenario: Scenario


@dataclass
class _Server:
    """What is asked of a server that was found."""

    engine: str
    model: str
    served: _Served
    served_as: tuple = ("a.gguf", "alias")


def server(**changes):
    types = {"type_k": KNOWN.type_k, "type_v": KNOWN.type_v}
    return _Server(
        **{"engine": KNOWN.engine, "model": KNOWN.model, **changes}, served=_Served(load_scenario({"cache": types}))
    )


def save(name, at, **changes):
    KNOWN.model_copy(update={"name": name, **changes}).save(f"{name}.profile.json")
    os.utime(f"{name}.profile.json", (at, at))


def test_the_latest_one_of_this_server_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _saved_here(server()) is None
    save("mine", 2_000)
    save("older", 1_000)
    save("other", 3_000, engine="llama-server of another version")
    (tmp_path / "no.profile.json").write_text("{}")
    assert _saved_here(server()).name == "mine"
    assert _saved_here(server(engine="vllm 1")) is None
    assert _saved_here(server(model="another")) is None


def test_one_that_was_made_of_this_server_is_taken_whatever_the_model_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("mine", 1_000, model="/elsewhere/b.gguf", served_as=("alias",))
    assert _saved_here(server(model="another")).name == "mine"
    assert _saved_here(server(model="another", served_as=("other",))) is None
