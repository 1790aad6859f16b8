"""``why`` where llama-server's host cache takes much of the time."""

import pytest

from kvsim.advice.why.diagnosis import why
from kvsim.advice.why.remedies import REMEDIES
from tests.chats import chats

COPIES = [remedy for remedy in REMEDIES["transfers"] if remedy.host_cache]


def test_copies_to_and_from_the_host_are_found_and_remedied():
    found = why(chats(machine__host_gb_s=0.02), "contiguous")
    assert "copies to and from the host" in found.sentence
    work = found.across.server_work
    assert max(work, key=work.get) == "transfers_s"
    assert sum(work.values()) == pytest.approx(1)
    assert [remedy.what for remedy in found.remedies][: len(COPIES)] == [remedy.what for remedy in COPIES]
    options = " ".join(remedy.engine("llama.cpp-b6975") for remedy in found.remedies)
    for option in ("--cache-ram 0", "--no-cache-idle-slots", "--slot-prompt-similarity"):
        assert option in options
    assert not any("prefetch" in remedy.kvsim for remedy in found.remedies)


def test_a_fast_host_is_not_blamed():
    """The control."""
    found = why(chats(machine__host_gb_s=50.0), "contiguous")
    assert not {remedy.what for remedy in found.remedies} & {remedy.what for remedy in COPIES}
    assert found.requests["transfers_s"].sum() < 0.01 * found.requests["e2e_s"].sum()


@pytest.mark.parametrize(
    "change", [{"server__cache_ram": 0}, {"server__cache_idle_slots": False}, {"server__slot_prompt_similarity": 0.5}]
)
def test_each_remedy_makes_fewer_seconds_of_copies(change):
    before, after = (why(world, "contiguous").requests["transfers_s"].sum() for world in (chats(), chats(**change)))
    assert after < 0.98 * before


def test_remedies_are_those_of_the_tier_that_the_server_has():
    """Where it is not known which it has, both are named; the server of early 2025 has no host cache."""
    suited = {known: [r for r in REMEDIES["transfers"] if r.suits("paged", known)] for known in (True, False, None)}
    assert suited[True] == COPIES
    of_vllm = [r for r in REMEDIES["transfers"] if r.suits("vllm", False) and not r.suits("paged", False)]
    assert of_vllm
    assert [*suited[True], *suited[False], *of_vllm] == [*suited[None], *of_vllm] == list(REMEDIES["transfers"])
    assert COPIES[0].engine("llama.cpp-b4666") == ""
    assert COPIES[1].engine("llama.cpp-b4666") == ""
    assert COPIES[1].engine("llama.cpp-b6975") == "llama-server --no-cache-idle-slots (builds since 2026)"
