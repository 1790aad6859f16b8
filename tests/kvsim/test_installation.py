"""What to type to install an extra: with this environment's pip, and from where kvsim came."""

import json
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kvsim import __version__, installation
from kvsim.installation import install_extra, pip_install, quoted
from tests.paths import ROOT
from tests.worlds import command


@pytest.fixture
def off_the_path(monkeypatch):
    """An interpreter that no name finds."""
    monkeypatch.setattr(shutil, "which", lambda name: None)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Pretend that kvsim was installed into a folder of packages, from an address; None stands for an index."""

    def pretend(direct_url):
        monkeypatch.setattr(installation, "HOME", tmp_path / "site-packages" / "kvsim")
        text = None if direct_url is None else json.dumps(direct_url)
        told = type("Distribution", (), {"read_text": lambda self, name: text})()
        monkeypatch.setattr(metadata, "distribution", lambda name: told)

    return pretend


def argument(line):
    """The last word of a command line."""
    return shlex.split(line)[-1]


def test_in_a_checkout_it_installs_the_checkout(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert install_extra("llama").endswith('-m pip install -e ".[llama]"')
    monkeypatch.chdir(tmp_path)
    assert shlex.split(install_extra("llama"))[-2:] == ["-e", f"{ROOT}[llama]"]


def test_a_checkout_with_a_space_in_its_name(monkeypatch, tmp_path):
    (tmp_path / "my checkout").mkdir()
    (tmp_path / "my checkout" / "pyproject.toml").touch()
    monkeypatch.setattr(installation, "HOME", tmp_path / "my checkout" / "kvsim")
    monkeypatch.chdir(tmp_path)
    assert shlex.split(install_extra("llama"))[-3:] == ["install", "-e", "my checkout[llama]"]


@pytest.mark.parametrize(
    ("direct_url", "target"),
    [
        (None, "kvsim[llama]"),
        ({"url": "file:///gone/kvsim", "dir_info": {}}, "kvsim[llama]"),
        ({"url": ROOT.as_uri(), "dir_info": {}}, f"{ROOT}[llama]"),
        (
            {"url": "https://host/kvsim.git", "vcs_info": {"vcs": "git", "requested_revision": "v1"}},
            "kvsim[llama] @ git+https://host/kvsim.git@v1",
        ),
        ({"url": "https://host/kvsim.whl", "archive_info": {}}, "kvsim[llama] @ https://host/kvsim.whl"),
    ],
)
def test_it_installs_from_where_kvsim_came(installed, monkeypatch, tmp_path, direct_url, target):
    installed(direct_url)
    monkeypatch.chdir(tmp_path)
    assert argument(install_extra("llama")) == target


def test_without_metadata_it_is_the_name(installed, monkeypatch):
    installed(None)

    def unknown(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", unknown)
    assert argument(install_extra("llama")) == "kvsim[llama]"


def test_the_interpreter_is_named_as_it_can_be_typed(monkeypatch, tmp_path):
    bin_folder = tmp_path / "my env" / "bin"
    bin_folder.mkdir(parents=True)
    for name in ("python", "python3"):
        (bin_folder / name).symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(bin_folder / "python3"))
    monkeypatch.setenv("PATH", str(bin_folder))
    assert pip_install("x") == "python -m pip install x"
    monkeypatch.setenv("PATH", "")
    assert pip_install("x") == f'"{bin_folder}/python3" -m pip install x'
    monkeypatch.chdir(tmp_path)
    assert pip_install("x") == '"my env/bin/python3" -m pip install x'


def test_another_environments_interpreter_is_not_taken_for_this_one(monkeypatch, tmp_path):
    """Both link to the same interpreter."""
    for env in ("mine", "other"):
        (tmp_path / env / "bin").mkdir(parents=True)
        (tmp_path / env / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "mine" / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "other" / "bin"))
    monkeypatch.chdir(tmp_path / "mine")
    assert pip_install("x") == "bin/python -m pip install x"


def test_an_environment_without_pip(monkeypatch, off_the_path):
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    assert pip_install("x") == "uv pip install --python /env/bin/python x"


@pytest.mark.parametrize("text", ["a", "a b", "a$b", 'a"b', "a'b", "a[b]", ""])
def test_a_quoted_text_is_one_word(text):
    assert shlex.split(quoted(text)) == [text]


def test_the_version(monkeypatch):
    done = command("--version")
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"kvsim {__version__} from {Path(installation.HOME).parent}, core ")
    assert ", Python 3." in line
    assert line.endswith(sys.executable)
