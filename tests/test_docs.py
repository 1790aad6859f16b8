"""What README and pages say of commands, names and files is so, and the site needs nothing from the network."""

import re
import tomllib

import pytest
import typer

from kvsim.cli.app import app
from kvsim.scenario.named_workloads import NAMED
from kvsim.scenario.scenario import Scenario, builtin_names
from policies.presets import PRESETS
from tests.docs.pages import DOCS, PAGES, blocks, rows, sections
from tests.paths import ROOT

TEXTS = [ROOT / "README.md", *PAGES]
COMMANDS = [
    (path, " ".join(line.split("#")[0].split()))
    for path in TEXTS
    for line in re.findall(r"^ {4,}(kvsim .+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
]


def options_of(words):
    """The options that a command line of ``kvsim`` accepts; fails where there is no such command."""
    here = typer.main.get_command(app)
    for word in words:
        if not hasattr(here, "commands"):
            break
        assert word in here.commands, f"no command {word}"
        here = here.commands[word]
    return {name for parameter in here.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_there_are_commands_on_the_pages():
    assert len(COMMANDS) > 40


@pytest.mark.parametrize(("path", "line"), COMMANDS, ids=lambda value: str(getattr(value, "name", value))[:60])
def test_a_command_on_a_page_exists_with_its_options(path, line):
    for part in line.split("&&"):
        words = [word.strip("[]") for word in part.split(" : ")[0].split()]
        words = words[1 : words.index("...")] if "..." in words else words[1:]
        alternatives = re.split(r"\|", words[0])
        for first in alternatives:
            accepted = options_of([first, *words[1].split("|")[:1], *words[2:]] if len(words) > 1 else [first])
            used = [word.split("=")[0] for word in words if word.startswith("-") and len(word) > 1]
            # What follows two spaces in the list of commands explains it.
            assert {option for option in used if option != "--json"} <= accepted | {"--json"}, part


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_files_and_links_on_a_page_exist(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text):
        notebook = ROOT / "notebooks" / target.removeprefix("notebooks/").replace(".md", ".ipynb")
        assert (path.parent / target).exists() or notebook.exists(), target
    for file in re.findall(r"`((?:kvsim|policies|workloads|real_engine|benchmarks|tests|docs)/[\w./-]+)`", text):
        assert (ROOT / file).exists(), file


def test_every_policy_and_no_other_is_in_the_table():
    named = [cell.strip("`") for cell, _ in rows((DOCS / "policies.md").read_text(encoding="utf-8").split("##")[0])]
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
