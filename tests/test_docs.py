"""What README and pages say of commands, names and files is so, and the site needs nothing from the network."""

import re
import tomllib
from functools import cache

import pytest

from kvsim.experiments.sweep_file import plan_sweep
from kvsim.scenario.named_workloads import NAMED
from kvsim.scenario.scenario import Scenario, builtin_names
from policies.presets import PRESETS
from tests.docs.pages import DOCS, PAGES, blocks, rows, sections
from tests.paths import ROOT
from tests.worlds import command

TEXTS = [ROOT / "README.md", ROOT / "kvsim" / "advice" / "questions.md", *PAGES]
COMMANDS = sorted(
    {
        " ".join(re.split(r"#|  +(?=[a-z])", line)[0].split())
        for path in TEXTS
        for line in re.findall(r"(?:^ {4,}|`)(kvsim [^`\n]+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if "COMMAND" not in line
    }
)
"""Command lines on the pages, without what explains them."""


@cache
def options_of(*words):
    """The options that the help of a command names; fails where there is no such command."""
    done = command(*words, "--help")
    assert done.returncode == 0, f"no command {words}"
    return set(re.findall(r"--?[a-z][\w-]*", done.stdout))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_there_are_commands_on_the_pages():
    assert len(COMMANDS) > 40


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_on_a_page_exists_with_its_options(line, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for part in line.split("&&"):
        # What stands in quotation marks has options of other programs.
        _, first, *rest = [word.strip("[]") for word in re.sub(r'"[^"]*"', "...", part).split()]
        for name in first.split("|"):
            group = name in ("scenario", "workload", "profile")
            for inner in rest[0].split("|") if group else [None]:
                accepted = options_of(*filter(None, (name, inner)))
                asked = {word.split("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
                assert asked <= accepted | {"--json"}, (name, asked - accepted)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_files_and_links_on_a_page_exist(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text):
        notebook = ROOT / "notebooks" / target.removeprefix("notebooks/").replace(".md", ".ipynb")
        assert (path.parent / target).exists() or notebook.exists(), target
    for file in re.findall(r"`((?:kvsim|policies|workloads|real_engine|benchmarks|tests|docs)/[\w./-]+)`", text):
        assert (ROOT / file).exists(), file


def test_every_policy_and_no_other_is_in_the_table():
    first = (DOCS / "policies.md").read_text(encoding="utf-8").split("##")[0]
    text = first + sections("policies.md")["Ideas from papers"]
    named = [cell.strip("`") for cell, _ in rows(text)]
    assert [name for name in named if name != "name"] == [preset.name for preset in PRESETS]


def test_every_built_in_scenario_is_in_the_table():
    named = {cell.strip("`") for cell, _ in rows(sections("scenarios.md")["Built-in scenarios"])} - {"name"}
    assert named == {*builtin_names()}


def test_every_named_workload_is_on_the_page():
    assert all(name in sections("traces.md")["Named workloads"] for name in NAMED)


@pytest.mark.parametrize("page", ["scenarios.md", "prefix-cache.md"])
def test_a_scenario_on_a_page_is_one(page):
    for text in blocks(page, "toml"):
        found = tomllib.loads(text)
        Scenario.model_validate(found if "workload" in found else {"workload": found})


def test_the_files_on_the_page_about_llama_server_can_be_run():
    text = (DOCS / "llama-server.md").read_text(encoding="utf-8")
    files = dict(re.findall(r'^```toml title="(.+?)"\n(.*?)^```', text, flags=re.MULTILINE | re.DOTALL))
    assert set(files) == {"chats.toml", "flags.toml"}
    chats = Scenario.model_validate(tomllib.loads(files["chats.toml"]))
    assert (chats.server.slots, chats.unified, chats.slot_context) == (4, False, 2048)
    points = plan_sweep(tomllib.loads(files["flags.toml"])).points
    assert len(points) == 12
    assert not any(point.fault for point in points)


@pytest.mark.slow
def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path, monkeypatch):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.chdir(ROOT)
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    loads = re.compile(r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(https?:)?//|<link[^>]*\shref=["']?(https?:)?//""")
    elsewhere = re.compile(r"""url\(["']?(https?:)?//|@import\s+["'](https?:)?//""")
    pages = [*tmp_path.rglob("*.html")]
    assert len(pages) > 30
    for page in pages:
        assert not loads.search(page.read_text(encoding="utf-8")), page.name
    for style in tmp_path.rglob("*.css"):
        assert not elsewhere.search(style.read_text(encoding="utf-8")), style.name
