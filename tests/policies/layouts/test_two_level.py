"""Two-level pages: stories with the numbers of pages; with one kind of page, the same decisions as a paged cache."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CacheConfig, Chunk, Content, OutOfCells, SequencePlan, available
from policies.layouts.two_level import LayerGroup, PageKind, TwoLevelPolicy

FULL, WINDOW = 0, 1
SAME = Content([(0, 0, 200)])


def two_level(pages, *, name="two-level-pages", full_layers=1, window_layers=2, **config):
    """A cache of that many large pages besides the first, each with 2 blocks of layers with full attention or 1 of the
    others; a block has 4 tokens, a window 6."""
    cells = -(-(pages + 1) * 8 * full_layers * window_layers // (2 * (full_layers + window_layers)))
    defaults = {"n_ubatch": 64, "max_tokens": 200, "prefix_cache": False}
    return available()[name](
        CacheConfig(
            **defaults | config,
            cells=cells,
            block_size=4,
            window=6,
            full_layers=full_layers,
            window_layers=window_layers,
        )
    )


def begin(policy, seq, content, tokens):
    """Run the beginning of a text; returns how much of it was found."""
    hit = policy.match(seq, content, tokens)
    policy.open(seq, SequencePlan(tokens, 200, tokens, content))
    policy.allocate([Chunk(seq, hit, tokens - hit)])
    return hit


def owners(policy):
    """The kind that has each large page but the first."""
    return list(policy.pages.owner)[1:]


def blocks(policy, kind, seq):
    return policy.parts[kind].tables[seq].blocks


def test_a_large_page_is_cut_into_blocks_of_one_kind():
    policy = two_level(6)
    assert policy.pages.n == 7
    policy.allocate([Chunk(0, 0, 5)])
    # Two blocks of either kind: one page holds both of full attention, the others one each.
    assert owners(policy) == [FULL, WINDOW, WINDOW, -1, -1, -1]
    assert (blocks(policy, FULL, 0), blocks(policy, WINDOW, 0)) == ([2, 3], [2, 3])
    policy.free(0)
    assert owners(policy) == [-1] * 6


def test_pages_behind_the_window_serve_layers_with_full_attention():
    policy = two_level(6)
    for start in range(0, 24, 4):
        policy.allocate([Chunk(0, start, 4)])
    # Full attention has 6 blocks in 3 pages; the last 4 tokens saw those from position 15 on, which are in 3 blocks.
    assert sorted(owners(policy)) == [FULL] * 3 + [WINDOW] * 3
    assert blocks(policy, WINDOW, 0)[:3] == [0, 0, 0]
    assert policy.usage().stored == (24 + 2 * 12) // 3
    # The next sees those from 19 on, so that a page becomes free; the four behind it need three.
    with pytest.raises(OutOfCells, match="no room for 5 tokens: 1 of 6 large pages are free"):
        policy.allocate([Chunk(0, 24, 5)])


def test_sequences_begin_pages_of_their_own():
    policy = two_level(8)
    policy.allocate([Chunk(0, 0, 4), Chunk(1, 0, 4)])
    policy.allocate([Chunk(0, 4, 4), Chunk(1, 4, 4)])
    assert [block // 2 for block in blocks(policy, FULL, 0)] == [1, 1]
    assert [block // 2 for block in blocks(policy, FULL, 1)] == [2, 2]


def test_the_first_kind_leaves_the_others_what_they_need():
    """Two sequences share a page of full attention rather than take the last page, which the window needs."""
    policy = two_level(3)
    policy.allocate([Chunk(0, 0, 4)])
    policy.allocate([Chunk(1, 0, 4)])
    assert sorted(owners(policy)) == [FULL, WINDOW, WINDOW]
    assert [block // 2 for block in blocks(policy, FULL, 1)] == [block // 2 for block in blocks(policy, FULL, 0)]


def test_a_prefix_is_found_as_far_as_all_kinds_have_what_the_next_token_sees():
    policy = two_level(20, prefix_cache=True)
    assert begin(policy, 0, SAME, 25) == 0
    policy.free(0)
    assert policy.match(1, SAME, 25) == 24
    # The next token sees 5 more: the last two blocks of the window.
    full, window = (part.pool for part in policy.parts)
    window.forget(next(block for block, key in enumerate(window.keys) if key == SAME.keys(4, 6)[4]))
    assert policy.match(1, SAME, 25) == 16
    full.forget(next(block for block, key in enumerate(full.keys) if key == SAME.keys(4, 6)[2]))
    assert policy.match(1, SAME, 25) == policy.cached_tokens(SAME, 25) == 8
    assert begin(policy, 1, SAME, 25) == 8
    assert policy.usage().stored == 25


def test_a_window_needs_only_its_last_blocks():
    policy = two_level(20, prefix_cache=True)
    for start in range(0, 24, 4):
        policy.open(0, SequencePlan(25, 200, 25, SAME))
        policy.allocate([Chunk(0, start, 4)])
    window = policy.parts[WINDOW].pool
    for key in SAME.keys(4, 6)[:4]:
        window.forget(window.find(key))
    assert policy.match(1, SAME, 25) == 24
    assert begin(policy, 1, SAME, 25) == 24
    assert blocks(policy, WINDOW, 1)[:4] == [0] * 4


def test_the_page_that_was_idle_longest_is_evicted_whichever_kind_has_it():
    policy = two_level(6, prefix_cache=True)
    begin(policy, 0, SAME, 8)
    policy.free(0)
    # Full attention's page and two of the window stay idle; three have no owner.
    assert (owners(policy), len(policy.pages.idle)) == ([FULL, WINDOW, WINDOW, -1, -1, -1], 3)
    assert policy.usage().cached == 8
    oldest = next(iter(policy.pages.idle))
    begin(policy, 1, Content([(1, 0, 200)]), 12)
    # It needs two pages of full attention and three of the window: two more than nobody had.
    assert oldest not in policy.pages.idle
    assert len(policy.pages.idle) == 1
    assert policy.match(2, SAME, 9) == 0


@pytest.mark.parametrize(
    ("full_layers", "window_layers", "per_page"), [(1, 5, [5, 1]), (1, 1, [1, 1]), (2, 3, [3, 2]), (10, 52, [26, 5])]
)
def test_a_large_page_holds_the_least_common_multiple(full_layers, window_layers, per_page):
    policy = two_level(10, full_layers=full_layers, window_layers=window_layers)
    assert [kind.per_page for kind in policy.pages.kinds] == per_page


@pytest.mark.parametrize(
    ("full_layers", "window_layers", "kinds"),
    [
        (8, 40, [(1, 0)] * 6),
        (10, 52, [(5, 0)] * 6 + [(1, 4)]),
        (23, 23, [(1, 0)] * 2),
        (4, 5, [(4, 1), (5, 0)]),
        (3, 1, [(1, 0)] * 4),
    ],
)
def test_groups_of_layers_are_as_vllm_makes_them(full_layers, window_layers, kinds):
    """The numbers are those of ``kvsim plan`` for Gemma 3 12B and 27B and Gemma 2 27B, in the smallest ratio."""
    config = CacheConfig(9999, full_layers=full_layers, window_layers=window_layers)
    policy = available()["layer-groups"](config)
    assert [(kind.layers, kind.padding) for kind in policy._layout.kinds] == kinds
    assert {kind.per_page for kind in policy.pages.kinds} == {1}
    assert sum(group.share for group in policy.groups) == pytest.approx(1)


@pytest.mark.parametrize("name", ["two-level-pages", "layer-groups", "uniform-pages"])
@pytest.mark.parametrize("rows", [False, True])
def test_a_sequence_that_is_to_return_finds_its_own_blocks(name, rows):
    """Also those that it filled as a row, of a text that no other says."""
    policy, content = two_level(40, name=name, prefix_cache=True), Content.of_two((7, 0, 18), (8, 0, 12))
    begin(policy, 0, content, 18)
    rule = policy.placement_rule()
    assert rule.join(0, 20, 0)
    for _ in range(5):
        assert rule.take_step()
    if not rows:
        rule.leave(0)
    policy.will_return(0)
    policy.free(0)
    assert policy.match(1, content, 24) == 20
    assert begin(policy, 1, content, 24) == 20


STEPS = st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), max_size=4), max_size=12)


@given(STEPS, st.booleans())
@settings(max_examples=20, deadline=None)
def test_uniform_pages_are_a_paged_cache(steps, prefix_cache):
    """All decisions are the same; only layers with a window read less."""
    config = CacheConfig(120, n_ubatch=16, max_tokens=60, block_size=4, window=6, prefix_cache=prefix_cache)
    paged, uniform = available()["paged"](config), available()["uniform-pages"](config)
    length = dict.fromkeys(range(4), 0)
    for step in steps:
        wanted = {seq: n for seq, n in step if length[seq] + n <= 60}
        for seq, n in step:
            if length[seq] + n > 60:
                paged.free(seq), uniform.free(seq)
                length[seq] = 0
                wanted.pop(seq, None)
        chunks = [Chunk(seq, length[seq], n) for seq, n in wanted.items()]
        placed = []
        for policy in (paged, uniform):
            try:
                placed.append(policy.allocate(chunks))
            except OutOfCells:
                placed.append(None)
        assert (placed[0] is None) == (placed[1] is None)
        if placed[0] is not None:
            length |= {seq: length[seq] + n for seq, n in wanted.items()}
            for one, other in zip(*placed, strict=True):
                full, window = other.places
                assert full.reads.scanned.tolist() == one.reads.scanned.tolist()
                assert (window.reads.scanned <= full.reads.scanned).all()
        for field in ("capacity", "stored", "allocated", "placeable"):
            assert getattr(paged.usage(), field) == getattr(uniform.usage(), field)


def test_layers_read_the_same_whatever_their_pages_keep():
    config = CacheConfig(400, n_ubatch=16, max_tokens=200, block_size=4, window=6, prefix_cache=False)
    narrow, wide = available()["two-level-pages"](config), available()["uniform-pages"](config)
    for start, n in [(0, 10), (10, 1), (11, 7), (18, 1), (19, 1), (20, 13)]:
        placed = [policy.allocate([Chunk(0, start, n)])[0].places for policy in (narrow, wide)]
        for one, other in zip(*placed, strict=True):
            assert [array.tolist() for array in one.reads[:4]] == [array.tolist() for array in other.reads[:4]]


def test_what_can_never_fit_is_refused_with_the_sizes():
    policy = two_level(40, max_tokens=400)
    # The window of 6 and a micro-batch of 64 tokens are in at most 19 blocks; 21 pages hold 42 of full attention.
    assert policy.max_sequence_tokens == 168
    assert policy.refusal(SequencePlan(100, 400, 168)) is None
    assert policy.refusal(SequencePlan(100, 400, 169)) == (
        "the request needs 41 large pages (100 prompt tokens, 169 in all), the cache has 40"
    )


def test_a_cache_without_a_page_is_refused_in_a_line():
    with pytest.raises(ValueError, match="20 cells make 0 large pages of 16 x 130 layers, and the first is never"):
        available()["two-level-pages"](CacheConfig(20, full_layers=10, window_layers=52))


def test_a_waiting_sequence_leaves_the_watermark_free():
    policy = two_level(19, watermark=0.5)
    assert not policy.reserve(Chunk(0, 0, 28), waits=True)
    assert policy.reserve(Chunk(0, 0, 28))


def test_kinds_may_have_windows_only():
    config = CacheConfig(100, block_size=4, max_tokens=200)
    policy = TwoLevelPolicy("mine", config, [PageKind((LayerGroup(1, 4),)), PageKind((LayerGroup(1, 8),))])
    for start in range(0, 40, 4):
        policy.allocate([Chunk(0, start, 4)])
    assert [group.window for group in policy.groups] == [4, 8]
    assert policy.can_truncate(0, 10) == 0
