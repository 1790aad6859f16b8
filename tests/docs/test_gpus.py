"""The page about GPUs has the figures of the profiles that ship."""

import re

from kvsim.costs.device_profiles import device_profiles
from kvsim.costs.profile import load_profile
from kvsim.costs.shipped import is_shipped
from tests.docs.pages import DOCS, sections

HEAD = (
    "| profile | engine | from | decode: median | P95 | mixed: median | P95 |",
    "| --- | --- | --- | ---: | ---: | ---: | ---: |",
)


def profile_rows():
    """The rows of the table of profiles, as they must be."""
    rows = []
    for name in sorted(filter(is_shipped, device_profiles())):
        profile = load_profile(name)
        source = re.match(r"(LLMServingSim|NVIDIA)'s", profile.source.title)[1]
        both = [held(profile, regime) for regime in ("decode", "mixed")]
        errors = [f"{e:.1%}" for one in both for e in (one.error_median, one.error_p95)]
        rows.append(f"| `{name}` | {profile.engine} | {source} | {' | '.join(errors).replace('%', ' %')} |")
    return rows


def held(profile, regime):
    return profile.held_out[regime]


def test_the_table_of_profiles_is_that_of_the_files():
    text = sections("gpus.md")["What is measured"]
    assert [line for line in text.splitlines() if line.startswith("| `")] == profile_rows()


def test_what_a_cell_costs_on_an_rtx_4090_is_what_the_profile_says():
    profile = load_profile("rtx4090-llama-3.1-8b")
    decode = profile.kernels["gather"].per_cell_s.value * 1e6
    by_chunks = profile.mixed.kernels["gather"].cell_by_chunks_s
    mixed = [c.value * 1e6 for n, c in zip(profile.mixed.chunk_knots, by_chunks, strict=True) if n >= 9]
    said = re.sub(r"\s+", " ", sections("gpus.md")["What a pass costs"])
    assert f"costs {decode:.3f} µs in decode passes" in said
    assert f"costs {min(mixed):.2f} to {max(mixed):.2f} µs where nine sequences or more run" in said


def test_every_note_of_the_package_is_on_the_page():
    page = re.sub(r"\s+", " ", (DOCS / "gpus.md").read_text(encoding="utf-8"))
    notes = " ".join(load_profile("h100_sxm-llama-3.1-8b").source.notes)
    figures = re.findall(r"\d\.\d\d", notes)
    assert figures
    assert all(figure in page for figure in figures)
