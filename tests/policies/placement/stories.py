"""Random lives of a few sequences in a policy whose decoding sequences are rows of its rule."""

from random import Random

from hypothesis import strategies as st

from policies import CacheConfig, Chunk, SequencePlan, available
from tests.policies.placement.harness import Twins

SEQUENCES = 4


EVENTS = ("prompt", "prompt", "prompt", "steps", "steps", "steps", "free", "leave", "draft")
SEEDS = st.integers(0, 1 << 32)
"""What a story is drawn by: thus it is long, whatever a failing test is reduced to."""


def begun(name, prompts, **config):
    """Twins of a preset with these prompts, all of which are rows."""
    config = CacheConfig(**config)
    most = config.max_tokens
    twins = Twins(lambda: available()[name](config))
    for seq, prompt in enumerate(prompts):
        for cache in twins.both():
            cache.open(seq, SequencePlan(prompt, most, most))
        assert twins.step([Chunk(seq, 0, prompt)])
    assert twins.join(range(len(prompts))) == list(range(len(prompts)))
    return twins


def story(seed, *, events=40, tokens=20, drafts=3):
    """What happens one after another: an event, a sequence, and a number of tokens or steps.

    ``drafts``: the most tokens that a row is given in a step.
    """
    draw = Random(seed)
    for _ in range(draw.randint(1, events)):
        what = draw.choice(EVENTS)
        yield what, draw.randrange(SEQUENCES), draw.randint(1, drafts if what == "draft" else tokens)


def live(
    make, events, *, most=60, prepare=lambda twins: None, plan=SequencePlan, reserves=False, check=lambda twins: None
):
    """Let all that happen, and compare after every step; sequences have at most ``most`` tokens.

    ``make``: makes the policy, as for ``Twins``. ``prepare``: what to do to the twins before. ``plan``: of the tokens
    of a prompt, and twice the most of a sequence. ``reserves``: room is reserved for one sequence after another.
    ``check``: what else to look at after each step.
    """
    twins, drafted = Twins(make), {}
    twins.rule.places_whole_steps = not reserves
    prepare(twins)

    def step(beside=()):
        done = _step(twins, most, beside, reserves=reserves)
        check(twins)
        return done

    for what, seq, n in events:
        held = twins.lengths.get(seq, 0)
        if what == "prompt" and held + n <= most:
            if not held:
                for cache in twins.both():
                    cache.open(seq, plan(n, most, most))
            if seq in twins.rule.by_seq:
                twins.rule.leave(seq)
            step([Chunk(seq, held, n)])
            _join(twins, drafted)
        elif what == "steps" and held:
            _join(twins, drafted)
            for _ in range(n):
                if not step():
                    break
        elif what == "draft":
            drafted[seq] = n
        elif what == "leave" and seq in twins.rule.by_seq:
            twins.rule.leave(seq)
            step()
        elif what == "free":
            for cache in twins.both():
                cache.free(seq)
            twins.lengths.pop(seq, None)
            assert seq not in twins.rule.by_seq
            twins.compare()


def _join(twins, drafted):
    """Let all that hold tokens be rows, with the tokens in each step that they are to have."""
    twins.join(sorted(twins.lengths))
    for row in twins.rule.rows:
        twins.rule.give(row.seq, drafted.get(row.seq, 1))


def _step(twins, most, beside, *, reserves):
    """Take a step; where there is no room, or a row would have too many tokens, drop the last row."""
    while True:
        over = [row.seq for row in twins.rule.rows if row.length + row.n > most]
        if not over:
            if (not reserves or _reserve(twins, beside)) and twins.step(beside):
                return True
            over = [row.seq for row in twins.rule.rows][-1:]
        if not over:
            return False
        for seq in over:
            for cache in twins.both():
                cache.free(seq)
            del twins.lengths[seq]


def _reserve(twins, beside):
    """Reserve room for a step; False where there is none for some sequence."""
    rows = [Chunk(row.seq, int(row.length), int(row.n)) for row in twins.rule.rows]
    found = all(map(twins.asked.reserve, rows))
    if not rows or twins.rule.reserve():
        assert found, "the policy finds no room"
    else:
        # Room may be made if each is asked for by itself.
        assert all(map(twins.ruled.reserve, rows)) == found
    if found:
        found = all(map(twins.asked.reserve, beside))
        assert all(map(twins.ruled.reserve, beside)) == found
    return found
