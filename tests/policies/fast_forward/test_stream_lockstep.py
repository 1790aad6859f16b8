"""Sequences with a stream each in lockstep, against a twin that places every step by itself."""

from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CacheConfig, Chunk, Policy
from policies.cells.split_batch import consecutive
from policies.cells.stream_arenas import CacheSpec
from policies.fast_forward.tile_growth import TileGrowth
from policies.layouts.multi_stream import MultiStreamPolicy

SLOTS = 6


def twins(window: int | None) -> list[MultiStreamPolicy]:
    """Two policies with a stream for each slot; ``window``: with a second group, which has few cells."""
    config = CacheConfig(cells=SLOTS * 700, n_ubatch=64, sequences=SLOTS)
    caches = [CacheSpec(700)] if window is None else [CacheSpec(700, share=0.5), CacheSpec(128, 64, window, 0.5)]
    return [MultiStreamPolicy("streams", config, caches, n_streams=SLOTS, kernel="tiled") for _ in range(2)]


def read_by(policy: Policy, step: list[Chunk]) -> list[list[tuple[int, int, int]]]:
    """Scores, scores against visible cells, and runs of each pass of a step, by group, as ``allocate`` has them."""
    return [
        [
            (int(r.tokens @ r.scanned), int(r.tokens @ r.useful), int(r.runs.sum()))
            for r in (place.reads for place in batch.places)
        ]
        for batch in policy.allocate(step)
    ]


def added_up(passes: list[list[tuple[int, int, int]]]) -> list[tuple[int, ...]]:
    """All passes together, by group."""
    return [tuple(map(sum, zip(*group, strict=True))) for group in zip(*passes, strict=True)]


def placed(batch, step: list[Chunk]) -> list[tuple[int, ...]]:
    """The same of a step in lockstep, all passes together."""
    passes = []
    summaries = batch.place(step)
    for chunks, (_, reads) in zip(summaries, batch.members_by_pass(), strict=True):
        passes.append(
            [
                (
                    own.scanned + sum(n * scanned for n, scanned, _ in each.chunk_reads),
                    (own.useful or 0) + sum(n * u for (n, _, _), u in zip(each.chunk_reads, each.useful, strict=True)),
                    own.runs + sum(runs for _, _, runs in each.chunk_reads),
                )
                for own, each in zip(
                    (reads, *(reads.further or [reads] * len(chunks.further))), (chunks, *chunks.further), strict=True
                )
            ]
        )
    if (alone := batch.passes_alone()) is not None:
        for _, groups in alone.passes(0, lambda size: size):
            passes.append([(g.total_scanned(1), g.total_useful(1), g.total_runs(1)) for g in groups])
    batch.take_step()
    return added_up(passes)


@settings(max_examples=15, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 200), min_size=1, max_size=SLOTS - 1),
    order=st.permutations(range(SLOTS)),
    steps=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 40)), min_size=1, max_size=2),
    window=st.sampled_from([None, 16, 64]),
)
def test_lockstep_is_one_step_after_another(prompts, order, steps, window):
    """Each of ``steps``: how many are taken at once, and the tokens of a prompt placed beside the step after them."""
    together, alone = twins(window)
    batch = together.lockstep_batch()
    held = dict(zip(order, prompts, strict=False))
    for seq, n in held.items():
        for policy in (together, alone):
            policy.allocate([Chunk(seq, 0, n)])
        assert batch.join(seq)
    newcomer, length = order[-1], 0
    for n, prompt in steps:
        while n:
            forecast = batch.forecast(n)
            if forecast is None:
                taken, found = 1, placed(batch, [])
            else:
                taken = forecast.steps
                passes = forecast.passes(0, lambda size: size)
                sums = [
                    [(g.total_scanned(taken), g.total_useful(taken), g.total_runs(taken)) for g in groups]
                    for _, groups in passes
                ]
                each = sum(g[0].each_scanned(taken) for _, g in passes), sum(g[0].each_useful(taken) for _, g in passes)
                found = added_up(sums)
                assert (int(each[0].sum()), int(each[1].sum())) == found[0][:2]
                usages = batch.states().usages(taken)
                batch.take_steps(forecast, taken)
                assert batch.states().usage().free_extents == usages.free_extents[-1]
            expected = []
            for _ in range(taken):
                expected += read_by(alone, [Chunk(seq, held[seq], 1) for seq in batch.seqs])
                held = {seq: at + 1 for seq, at in held.items()}
            assert found == added_up(expected)
            n -= taken
        if prompt:
            chunk = Chunk(newcomer, length, prompt)
            expected = read_by(alone, [*(Chunk(seq, held[seq], 1) for seq in batch.seqs), chunk])
            assert placed(batch, [chunk]) == added_up(expected)
            held, length = {seq: at + 1 for seq, at in held.items()}, length + prompt
        assert together.usage() == alone.usage()
    batch.write_all()
    for group in range(len(together.groups)):
        mine, other = together.occupancy(group), alone.occupancy(group)
        assert (mine.position == other.position).all()
        assert mine.owners == other.owners
    assert [arena.head for arenas in together.arenas for arena in arenas] == [
        arena.head for arenas in alone.arenas for arena in arenas
    ]


def test_a_sequence_that_finds_a_hole_fills_it_and_goes_on():
    together, alone = twins(None)
    batch = together.lockstep_batch()
    for policy in (together, alone):
        policy.allocate([Chunk(2, 0, 600)])
        policy.free(2, 100, 400)
        policy.shift(2, 400, None, -300)
    assert batch.join(2)
    at, in_lockstep = 300, 0
    while at < 700:
        forecast = batch.forecast(1000)
        if forecast is None:
            batch.place(())
            batch.take_step()
            taken = 1
        else:
            taken = in_lockstep = forecast.steps
            batch.take_steps(forecast, taken)
        for k in range(taken):
            alone.allocate([Chunk(2, at + k, 1)])
        at += taken
    assert in_lockstep > 90
    assert (together.occupancy().position == alone.occupancy().position).all()


@given(
    seqs=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 300), st.booleans()), max_size=8),
    before=st.integers(0, 200),
    n=st.integers(1, 300),
)
def test_tiles_follow_from_the_count_of_steps(seqs, before, n):
    """Each of ``seqs``: its phase, its tiles if it does not grow, and whether it grows."""
    growth = TileGrowth()
    for phase, tiles, grows in seqs:
        growth.add(phase if grows else None, tiles, 1)

    def tiles_after(steps):
        return sum((steps + phase) // 64 if grows else tiles for phase, tiles, grows in seqs)

    later = [tiles_after(before + k) for k in range(1, n + 1)]
    forecast = growth.forecast(before)
    assert growth.after(before) == tiles_after(before)
    assert forecast.each(n).tolist() == later
    assert forecast.total(n) == sum(later)
    assert forecast.runs == len(seqs)


def test_consecutive_sequences_go_together_in_their_order():
    assert consecutive([3, 1, 4, 2, 5], 9) == [[3, 4, 5], [1, 2]]
    assert consecutive([3, 1, 4, 2, 5], 2) == [[3, 4], [1, 2], [5]]
    assert consecutive([2, 1], 9) == [[2], [1]]
