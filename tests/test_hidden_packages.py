"""A folder or file of the user's own that bears the name of one of our packages ends in a line that says so."""

import sys

import pytest

import kvsim
from tests.paths import ROOT
from tests.worlds import python


def make(folder, name, kind):
    """A module, a package, or a folder that Python takes for a namespace; where it is."""
    made = folder / (f"{name}.py" if kind == "file" else name)
    if kind == "file":
        made.write_text("")
    else:
        made.mkdir(parents=True)
        if kind == "package":
            (made / "__init__.py").write_text("")
    return made


@pytest.mark.parametrize(
    ("name", "kind"), [("policies", "file"), ("policies", "package"), ("workloads", "package"), ("real_engine", "file")]
)
def test_what_hides_a_package_in_the_current_folder_is_named(name, kind, tmp_path):
    found = make(tmp_path, name, kind)
    done = python("-m", "kvsim", "policies", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"kvsim: {found} hides a package of kvsim, since Python finds it before {ROOT / name}: ")


def test_what_hides_a_package_on_the_path_is_named_in_python_too(tmp_path):
    found = make(tmp_path / "own", "workloads", "package")
    for program in ("import kvsim; kvsim.run('chat')", "from kvsim import compare"):
        done = python("-c", program, folder=tmp_path, path=[tmp_path / "own"])
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(f"ImportError: {found} hides a package of kvsim")


def test_a_folder_that_python_does_not_take_first_is_no_matter(tmp_path):
    """Of a folder without ``__init__.py`` and a package, Python takes the package."""
    make(tmp_path, "policies", "namespace")
    assert python("-m", "kvsim", "scenario", "list", folder=tmp_path).returncode == 0


def test_a_module_that_was_imported_under_the_name_is_named(monkeypatch):
    other = type(sys)("policies")
    monkeypatch.setitem(sys.modules, "policies", other)
    assert kvsim.hidden_package().startswith("a module 'policies' made by the program hides a package of kvsim")
    other.__file__ = "/home/me/policies.py"
    assert kvsim.hidden_package().startswith("/home/me/policies.py hides a package of kvsim")


def test_nothing_is_hidden_here():
    """The control."""
    assert kvsim.hidden_package() is None
