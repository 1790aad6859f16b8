"""Pages that Linux maps: the text is that of a recomputation, and as many pages are mapped as the policy says."""

import sys
from functools import cache

import numpy as np
import pytest

from kvsim.errors import UserError
from kvsim.model.engine_shapes import SHAPES
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy
from real_engine import Transformer
from real_engine.virtual_memory import MappedStore, VirtualEngine
from tests.real_engine.recomputed import generate_without_cache
from tests.worlds import scenario

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are mapped on Linux only")

MODEL = Transformer.random(SHAPES["tiny"], seed=5)
WORLD = scenario(
    seed=5,
    workload={
        "kind": "poisson",
        "rate": 300.0,
        "requests": 6,
        "prompt_tokens": {"kind": "empirical", "quantiles": [4, 40, 90]},
        "output_tokens": {"kind": "fixed", "value": 12},
    },
    server__scheduler="vllm",
    server__slots=3,
    server__slot_context=128,
    server__n_batch=24,
    cache__cells=160,
    cache__page_tokens=32,
)


@cache
def text_without_cache(prompt, n):
    return generate_without_cache(MODEL, list(prompt), n)


def served(engine_class=VirtualEngine):
    """The engine and the policy behind it, and how many texts are wrong."""
    policy, recorder = build_policy(WORLD, "vattention"), Recorder()
    engine = engine_class(MODEL, policy.groups, 5, page_tokens=32, slots=3, max_tokens=128)
    drive(WORLD, policy, engine, recorder, None)
    jobs = [job for job in recorder.requests.jobs if job.status == "completed"]
    assert len(jobs) == 6
    wrong = 0
    for job in jobs:
        prompt = list(engine.prompt(job.request))
        said = engine.texts[job.request.id][len(prompt) :][: job.generated]
        wrong += said != text_without_cache(tuple(prompt), job.generated)
    return engine, policy, wrong


@pytest.mark.slow
def test_the_text_is_that_of_a_recomputation_and_only_pages_that_are_not_there_are_mapped():
    engine, policy, wrong = served()
    pages = policy.blocks.pages
    assert wrong == 0
    assert engine.n_mapped == pages.n_mapped
    assert pages.n_found > 0
    assert policy.blocks.pool.n == 5 < pages.n_mapped, "pages are taken away from other slots"


class MapsOnce(VirtualEngine):
    """Leaves every page where it was mapped first."""

    def _map_page(self, slot, number, page):
        if page not in self._place:
            super()._map_page(slot, number, page)


def test_a_page_that_is_not_mapped_anew_garbles_the_text():
    assert served(MapsOnce)[2] > 0


def test_what_is_written_to_cells_is_seen_in_the_range():
    store = MappedStore(2, 128, 32, page_tokens=32, slots=2, slot_pages=2)
    numbers = np.random.default_rng(0).standard_normal((2, 64, 32)).astype(np.float32)
    assert not store.read(slice(0, 128)).any()
    store.map_page(1, 0, 3)
    store.map_page(1, 1, 0)
    store.write(np.r_[96:128, 0:32], numbers)
    assert np.array_equal(store.read(slice(64, 128)), numbers)
    store.unmap_page(1, 0)
    assert not store.read(slice(64, 96)).any()


def test_pages_must_be_whole_pages_of_linux():
    with pytest.raises(UserError, match=r"cache.page_tokens: a page of Linux holds 32 tokens of a head"):
        MappedStore(2, 128, 32, page_tokens=16, slots=1, slot_pages=1)
