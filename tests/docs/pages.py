"""Reads the pages of the documentation: their sections, tables and blocks of code."""

import re

from tests.paths import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def sections(page):
    """The text under each heading of the second level, by its title."""
    parts = re.split(r"^## (.+)$", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text):
    """The first two cells of each row of the tables in a text, without their heads."""
    lines = re.findall(r"^\| (.+?) \| (.+?) \|", text, flags=re.MULTILINE)
    return [line for line in lines if not set(line[0]) <= set("- :") and line[0] != "key"]


def blocks(page, language):
    """The blocks of code of a page in one language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
