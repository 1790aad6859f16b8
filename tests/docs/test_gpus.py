"""The page about GPUs has the figures of the profiles that ship."""

import re

from kvsim.costs.device_profiles import device_profiles
from kvsim.costs.load_profile import load_profile
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.shipped import is_shipped
from policies import Group
from policies.placement.rule import PassReads
from tests.docs.pages import DOCS, sections

HEAD = (
    "| device | engine | from | profiles of | decode: median | P95 | mixed: median | P95 |",
    "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
)


def profile_rows():
    """The rows of the table of profiles, as they must be: one for a device, an engine and a source."""
    together = {}
    for profile in map(load_profile, filter(is_shipped, device_profiles())):
        source = re.match(r"(LLMServingSim|NVIDIA)'s", profile.source.title)[1]
        together.setdefault((profile.device, profile.engine, source), []).append(profile)
    rows = []
    for key in sorted(together):
        own = together[key]
        models = ", ".join(sorted({profile.model for profile in own}))
        held = [[profile.held_out[regime] for profile in own] for regime in ("decode", "mixed")]
        errors = [f"{max(v):.1%}" for e in held for v in ([x.error_median for x in e], [x.error_p95 for x in e])]
        rows.append(
            f"| {' | '.join(['`' + key[0] + '`', *key[1:], models])} | {' | '.join(errors).replace('%', ' %')} |"
        )
    return rows


def test_the_table_of_profiles_is_that_of_the_files():
    text = sections("gpus.md")["What is measured"]
    assert [line for line in text.splitlines() if line.startswith("| `")] == profile_rows()


def test_what_attention_takes_on_an_rtx_4090_is_what_the_profile_says():
    price = PassPrice(load_profile("rtx4090-llama-3.1-8b"), "gather", (Group(0),))

    def attention_ms(prompt, decodes, cells):
        scans = [(prompt, prompt)] * (prompt > 0) + [(1, decodes * cells)] * (decodes > 0)
        work = PassReads.counted(prompt + decodes, decodes + (prompt > 0), 0, scans)
        return 1e3 * price.attention_of(work, runs_are_holes=False).useful_s

    alone, beside = attention_ms(0, 32, 1024), attention_ms(512, 32, 1024) - attention_ms(512, 0, 0)
    said = re.sub(r"\s+", " ", sections("gpus.md")["What a pass costs"])
    assert f"take {alone:.1f} ms of attention in a decode pass, and {beside:.1f} ms more" in said


def test_every_note_of_the_package_is_on_the_page():
    page = re.sub(r"\s+", " ", (DOCS / "gpus.md").read_text(encoding="utf-8"))
    notes = " ".join(load_profile("h100_sxm-llama-3.1-8b").source.notes)
    figures = re.findall(r"\d\.\d\d", notes)
    assert figures
    assert all(figure in page for figure in figures)
