"""Turns the notebooks into pages of the documentation site, with the outputs that they were saved with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a Markdown page for each notebook, and its pictures beside it."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text, resources = page_of(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, picture in resources["outputs"].items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def page_of(path: Path) -> tuple[str, dict[str, Any]]:
    """A notebook as Markdown, and the pictures in it by file name."""
    notebook = nbformat.read(path, as_version=4)
    exporter = MarkdownExporter()
    text, resources = exporter.from_notebook_node(notebook, {"unique_key": path.stem})
    return text, resources
