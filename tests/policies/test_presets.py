"""The names of presets: the current ones are listed, the former ones still answer."""

from dataclasses import replace

import pytest

import kvsim
from kvsim.errors import UserError
from kvsim.scenario.serving_sections import CacheSection
from kvsim.simulation.set_up import build_policy
from policies import CacheConfig, PluginWarning, available, current_name, plugins
from policies.layouts.ring import RingOptions
from policies.presets import ALIASES, PRESETS
from real_engine.loading import build_policy as built_by_the_engine
from tests.policies.invariants.subjects import FakeEntryPoint
from tests.worlds import command


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_means_the_preset_of_its_current_name(alias, name):
    assert current_name(alias) == current_name(name) == name
    assert name in available()
    assert alias not in available()
    small = {"workload__requests": 5}
    by_file = kvsim.load("chat", cache__policy=alias, **small)
    assert by_file.cache.policy == name
    assert kvsim.run(by_file, detail="requests").policy == name
    assert kvsim.run(kvsim.load("chat", **small), alias, detail="requests").policy == name
    assert build_policy(by_file, alias).name == name
    assert built_by_the_engine(alias, CacheConfig(cells=256, max_tokens=100), "anything").name == name


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_preset_takes_the_options_that_it_lists_and_refuses_others_in_a_line(preset):
    stated = CacheSection().model_dump(include={*preset.parameters}, exclude_none=True)
    assert preset(CacheConfig(cells=1024, **stated)).capacity > 0
    with pytest.raises(ValueError, match=r"^no option 'holes' in this layout; (there are|it has none)") as refused:
        preset(CacheConfig(cells=1024, holes=3))
    assert all(key in str(refused.value) for key in {*stated} - {"pad"})
    assert preset(CacheConfig(cells=1024, holes=3, for_any_layout=True)).capacity > 0


def test_options_are_stated_one_by_one_or_changed_later():
    config = replace(CacheConfig(64, options={"window": 9}, sinks=1).with_options(sinks=2), cells=32)
    assert (config.cells, config.options) == (32, {"window": 9, "sinks": 2})
    assert config.read(RingOptions) == RingOptions(window=9, sinks=2)
    assert config.without_options() == CacheConfig(32)


def test_an_alias_and_its_current_name_are_compared_once():
    scenario = kvsim.load("chat", workload__requests=5)
    compared = kvsim.compare(scenario, ["split-regions", "prompt-decode-regions", "llama.cpp-2024"], snapshots=False)
    assert [result.policy for result in compared.results] == ["prompt-decode-regions", "llama.cpp-b4666"]


@pytest.mark.parametrize("keys", [{"policies": ["llama.cpp-today"]}, {"axes": {"cache.policy": ["llama.cpp-today"]}}])
def test_a_sweep_reports_current_names(keys, tmp_path):
    base = {"workload": {"kind": "batch", "requests": 3}}
    found = kvsim.sweep({"name": "aliases", "base": base, **keys}, out=tmp_path / "a.sqlite", workers=1)
    assert set(found.table["policy"]) == {"llama.cpp-b6975"}
    assert set(found.table.get("cache.policy", ["llama.cpp-b6975"])) == {"llama.cpp-b6975"}


def test_the_command_line_takes_aliases():
    done = command("policies", "split-regions", "--json")
    assert done.returncode == 0, done.stderr
    assert '"name": "prompt-decode-regions"' in done.stdout
    done = command("run", "chat", "--requests", "5", "-p", "llama.cpp-2024", "--json")
    assert done.returncode == 0, done.stderr
    assert '"policy": "llama.cpp-b4666"' in done.stdout


def test_an_unknown_policy_is_refused_with_the_current_names():
    with pytest.raises(UserError, match="no policy called 'split'") as refused:
        kvsim.run("chat", "split")
    assert "prompt-decode-regions" in str(refused.value)
    assert not any(alias in str(refused.value) for alias in ALIASES)


def test_a_plug_in_cannot_take_the_name_of_an_alias(monkeypatch):
    taken = FakeEntryPoint("split-regions", PRESETS[0])
    monkeypatch.setattr(plugins, "entry_points", lambda group: [taken])
    with pytest.warns(PluginWarning, match="'split-regions' is the name of a built-in policy"):
        available()
    assert list(available()) == [preset.name for preset in PRESETS]


def test_vllm_without_its_prefix_cache_finds_no_prefixes():
    """The scenario's ``prefix_cache`` counts under ``vllm`` as under ``paged``, as ``--no-enable-prefix-caching``."""
    chats = {"workload": {"kind": "sessions", "sessions": 12}, "server": {"scheduler": "vllm"}}
    cached, computed = (
        kvsim.run(kvsim.load_scenario({**chats, "cache": {"prefix_cache": on}}), "vllm", detail="requests").summary[
            "prefix"
        ]
        for on in (True, False)
    )
    assert cached["found"] > 0
    assert computed["found"] == 0
