"""The notebooks run from top to bottom, are saved with their outputs, and use only the public interface."""

import ast
import json
import re
import shutil

import pytest
from IPython.core.inputtransformer2 import TransformerManager

import kvsim
from tests.paths import ROOT

OURS = {"kvsim", "policies", "workloads", "real_engine", "tests", "benchmarks"}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SIZE = 'SMALL = os.environ.get("KVSIM_NOTEBOOKS") == "small"  # the tests run a smaller version'
SHORTER = """
import functools
import IPython.core.pylabtools
import kvsim
IPython.core.pylabtools.print_figure = lambda *of, **how: "AA=="
kvsim.calibrate = functools.cache(kvsim.calibrate)
"""
"""What a kernel runs first: figures are made and not drawn, and the machine is measured once, which saves 40 %."""
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    """A saved notebook's cells of code."""
    return executable(json.loads(path.read_text(encoding="utf-8")))


def executable(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell):
    """A cell's text, which a file holds in lines."""
    return "".join(cell["source"])


def kinds(cell):
    """A cell's outputs: names of streams and types of results, in order; a stream may come in several pieces."""
    found = []
    for output in cell["outputs"]:
        kind = output.get("name") or sorted(output.get("data", {}))
        if not (isinstance(kind, str) and found[-1:] == [kind]):
            found.append(kind)
    return found


def private_imports(text):
    """Names of ours outside the public interface that a cell imports."""
    found = []
    for node in ast.walk(ast.parse(TransformerManager().transform_cell(text))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in OURS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    public = {"kvsim", *(f"kvsim.{name}" for name in kvsim.__all__), "benchmarks.llama_studies.studies"}
    return [name for name in found if name not in public]


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_a_notebook_has_a_small_size(path):
    assert SIZE in source(code_cells(path)[0]).splitlines()


@pytest.fixture(scope="module")
def kernel():
    """For one notebook after the other, since the packages that they use take seconds to load."""
    import nbformat  # Takes a second, and every process that runs tests loads this file.
    from nbclient import NotebookClient

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSIM_NOTEBOOKS", "small")
        client = NotebookClient(nbformat.v4.new_notebook(), timeout=120, kernel_name="python3")
        with client.setup_kernel():
            yield client


@pytest.mark.slow
@each_notebook
def test_a_notebook_runs_and_was_saved_with_its_outputs(path, tmp_path, kernel):
    import nbformat

    saved, kernel.nb = code_cells(path), nbformat.read(path, as_version=4)
    own = path.with_name(path.stem.partition("-")[2].removeprefix("your-"))
    if own.is_dir():  # What a notebook reads.
        shutil.copytree(own, tmp_path / own.name)
    # No name of another's is left.
    kernel.nb.cells.insert(0, nbformat.v4.new_code_cell(f"{SHORTER}\n%reset -f\n%cd -q {tmp_path}"))
    kernel.execute(cleanup_kc=False)
    assert [kinds(cell) for cell in saved] == [kinds(cell) for cell in executable(kernel.nb)[1:]]
    assert [cell["execution_count"] for cell in saved] == list(range(1, len(saved) + 1))


@each_notebook
def test_outputs_show_no_folder_or_clock_of_the_machine(path):
    for cell in code_cells(path):
        assert "execution" not in cell["metadata"]
        for output in cell["outputs"]:
            shown = [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k.startswith("text/"))]
            assert not re.search(r"/(home|root|tmp|Users|var)/|[A-Z]:\\", "\n".join(map("".join, shown)))


@each_notebook
def test_a_notebook_imports_only_the_public_interface(path):
    for cell in code_cells(path):
        assert private_imports(source(cell)) == []


def test_private_imports_are_recognised():
    """The control of the test above: private imports are reported, public ones are not."""
    text = (
        "%matplotlib inline\nimport kvsim, pandas\nimport kvsim.costs.profile\n"
        "from kvsim import load_scenario, reports\nimport policies"
    )
    assert private_imports(text) == ["kvsim.costs.profile", "kvsim.reports", "policies"]
