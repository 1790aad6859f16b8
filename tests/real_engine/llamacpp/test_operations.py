"""llama.cpp's cells equal the policy's after random operations; differences are detected."""

import numpy as np
import pytest

from kvsim.scenario.scenario import load_scenario
from policies import CacheConfig, Chunk, OutOfCells, Unsupported, available
from policies.layouts.multi_stream import Rejected
from policies.layouts.unified import UnifiedPolicy
from real_engine.llama_library import ContextSettings
from real_engine.llamacpp import POLICIES, Divergence, mirrored_backend
from tests.real_engine.llamacpp.conftest import WINDOW
from tests.real_engine.llamacpp.runs import backend_of, run

pytestmark = pytest.mark.llama

OPERATIONS = 1000
LONGEST = 4000


class RandomOperations:
    """Performs random operations, and counts their outcomes."""

    def __init__(self, model, policy, seed, *, sequences=4, kernel="masked", unified=True, cells=256, threshold=0.0):
        """``cells`` in each stream."""
        self.rng = np.random.default_rng(seed)
        self.sequences = sequences
        self.longest = cells // 17
        n_ubatch, n_batch = cells // 20 + 1, cells // 4
        config = CacheConfig(
            cells=cells if unified else cells * sequences,
            n_ubatch=n_ubatch,
            sequences=sequences,
            pad=256 if kernel == "tiled" else 32,
            kernel=kernel,
            threshold=threshold,
            window=WINDOW,
            unified=unified,
            n_layers=model.n_layers,
            for_any_layout=True,
        )
        settings = ContextSettings(
            cells=0,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            sequences=sequences,
            defrag_threshold=threshold or -1.0,
            show_cells=True,
        )
        self.backend = mirrored_backend(model, available()[policy](config), settings, seed)
        self.policy, self.inner = self.backend.policy, self.backend.policy.inner
        self.counts = dict.fromkeys(("decode", "together", "no slot", "rejected"), 0)
        for seq in range(sequences):
            self.backend.tokens[seq] = [int(t) for t in self.rng.integers(0, model.vocabulary, LONGEST)]

    def run(self, operations=OPERATIONS):
        """Perform the operations; return the counts by name."""
        choices = [self.decode, self.decode, self.decode, self.together, self.free, self.copy, self.keep, self.shift]
        if isinstance(self.inner, UnifiedPolicy):
            choices.append(self.compact)
        with self.backend.context:
            for _ in range(operations):
                operation = choices[int(self.rng.integers(len(choices)))]
                name = operation.__name__
                self.counts[name] = self.counts.get(name, 0) + bool(operation())
            self.backend.finish()
        return self.counts

    def ends(self, seq):
        """First and last position of a sequence, -1 if it is empty."""
        if isinstance(self.inner, UnifiedPolicy):
            arenas = [self.inner.arena]
        else:
            arenas = [streams[self.inner.stream_of(seq)] for streams in self.inner.arenas]
        return max(arena.first_position(seq) for arena in arenas), arenas[-1].last_position(seq)

    def some(self, most):
        return int(self.rng.integers(1, most + 1))

    def any_seq(self):
        return int(self.rng.integers(self.sequences))

    def part(self, seq):
        """Some of the positions of a sequence, or all."""
        last = self.ends(seq)[1]
        start = int(self.rng.integers(0, last + 2))
        return (0, None) if self.rng.random() < 0.3 else (start, start + self.some(self.longest))

    def step(self, step):
        done = ()
        try:
            done = self.policy.allocate(step)
        except OutOfCells as e:
            done = e.done
            self.counts["no slot"] += 1
        except Rejected:
            self.counts["rejected"] += 1
        self.backend.step(step, done)
        return True

    def decode(self):
        """Several sequences continue, sometimes with a gap in one."""
        seqs = self.rng.permutation(self.sequences)[: self.some(min(self.sequences, 4))].tolist()
        gap = 3 * (self.rng.random() < 0.1)
        return self.step([Chunk(seq, self.ends(seq)[1] + 1 + gap, self.some(self.longest)) for seq in seqs])

    def together(self):
        """Tokens that two sequences share; in era B both must hold equally many before."""
        first, other = (int(seq) for seq in self.rng.permutation(self.sequences)[:2])
        if self.rng.random() < 0.7:
            self.policy.free(other)
            self.policy.copy(first, other)
        return self.step([Chunk(first, self.ends(first)[1] + 1, self.some(5), (other,))])

    def free(self):
        seq = self.any_seq()
        if self.rng.random() < 0.03:
            seq = -1
            self.policy.free(seq)
        else:
            self.policy.free(seq, *self.part(seq))
        return True

    def copy(self):
        """Copy to an empty sequence."""
        src, dst = (int(seq) for seq in self.rng.permutation(self.sequences)[:2])
        self.policy.free(dst)
        whole = getattr(self.inner, "n_streams", 1) > 1 or self.rng.random() < 0.5
        self.policy.copy(src, dst, *((0, None) if whole else self.part(src)))
        return True

    def keep(self):
        if self.rng.random() < 0.8:
            return False
        self.policy.keep(self.any_seq())
        return True

    def shift(self):
        """Remove positions in the middle, and shift the rest."""
        seq = self.any_seq()
        first, last = self.ends(seq)
        if last - first < 4:
            return False
        start = int(self.rng.integers(first, last))
        n = self.some(last - start)
        try:
            self.policy.free(seq, start, start + n)
            self.policy.shift(seq, start + n, None, -n if self.rng.random() < 0.8 else 2)
        except Unsupported:
            return False
        return True

    def compact(self):
        """Make one pass of defragmentation."""
        return self.policy.compact().n_runs > 0


WORLDS = {
    "one cache with defragmentation": ("A", "llama.cpp-b4666", {}),
    "of twelve sequences": ("A", "llama.cpp-b4666", {"sequences": 12}),
    "with defragmentation by threshold": ("A", "llama.cpp-b4666", {"sequences": 12, "cells": 2560, "threshold": 0.1}),
    "one cache since": ("B", "llama.cpp-b6975", {}),
    "of twelve sequences since": ("B", "llama.cpp-b6975", {"sequences": 12}),
    "of a hundred sequences since": ("B", "llama.cpp-b6975", {"sequences": 100, "cells": 512}),
    "streams": ("B", "streams", {"unified": False}),
    "twelve streams": ("B", "streams", {"unified": False, "sequences": 12}),
    "with a window": ("B", "sliding-window", {}),
    "with a window and streams": ("B", "sliding-window", {"unified": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["masked", "tiled"])
@pytest.mark.parametrize(("era", "policy", "keys"), WORLDS.values(), ids=WORLDS)
def test_cells_agree_after_random_operations(request, only, era, policy, keys, kernel):
    only(era)
    model = request.getfixturevalue("windowed" if policy == "sliding-window" else "model")
    operations = RandomOperations(model, policy, 1, kernel=kernel, **keys)
    counts = operations.run(OPERATIONS if keys.get("cells", 0) < 1000 else OPERATIONS // 2)
    assert operations.backend.compared.steps > 150
    often = {"no slot", "together", "free", "copy", "keep", "shift", "compact" if era == "A" else "rejected"}
    assert min(counts[name] for name in often) > 5


def wrong_head(policy):
    """The search begins above all used cells instead of at the first freed one."""
    for arena in arenas(policy):
        arena.head = arena.top


def wrong_position(policy):
    """The last token in the cache has another position."""
    arena = arenas(policy)[0]
    arena.position[arena.top - 1] += 1


def wrong_owner(policy):
    """The last token in the cache belongs to another sequence."""
    arena = arenas(policy)[0]
    last = arena.top - 1
    arena.owner[last] = arena.sets.index_of([0 if arena.owner[last] == arena.sets.singletons.get(1) else 1])


def arenas(policy):
    return [policy.arena] if isinstance(policy, UnifiedPolicy) else [a for streams in policy.arenas for a in streams]


def spoiled(change):
    """Makes a policy misbehave whenever it has freed cells and some are left."""

    def spoil(policy):
        free = policy.free

        def freed(*arguments):
            free(*arguments)
            if arenas(policy)[0].used > 20:
                change(policy)

        policy.free = freed

    return spoil


@pytest.fixture
def chat(library):
    """A scenario in which cells are freed and taken again."""
    keys = {"workload__requests": 30, "cache__cells": 512, "server__slot_context": 256, "server__slots": 4}
    keys |= {"cache__unified": True, "server__cache_ram": 0}  # Idle slots keep their cells.
    return load_scenario("chat", **keys, cache__kernel="masked"), POLICIES[library.era][0]


@pytest.mark.parametrize("change", [wrong_head, wrong_position, wrong_owner])
def test_wrong_bookkeeping_diverges_from_llamacpp(model, chat, change):
    backend = backend_of(model, *chat, spoiled(change))
    with pytest.raises(Divergence, match=r"in llama.cpp, .* in the policy|returned -1"):
        run(backend)
    assert backend.compared.steps > 5


@pytest.mark.slow
def test_the_same_policy_without_a_fault_does_not_diverge(model, chat):
    assert run(backend_of(model, *chat, spoiled(lambda policy: None))).requests.latencies.ended == 30


def test_a_missing_operation_in_llamacpp_diverges(model, chat):
    backend = backend_of(model, *chat)
    calls, remove = [], backend.context.remove

    def forgetful(*arguments):
        calls.append(arguments)
        return len(calls) == 10 or remove(*arguments)

    backend.context.remove = forgetful
    with pytest.raises(Divergence, match=r"in llama.cpp, .* in the policy|returned -1"):
        run(backend)


def test_an_unexpected_return_code_diverges(model, chat):
    """The policy expects that there is no slot."""
    backend = backend_of(model, *chat)
    with backend.context:
        backend.policy.allocate([Chunk(0, 0, 3)])
        backend.policy.expected = 1
        backend.tokens[0] = [1, 2, 3, 4]
        with pytest.raises(Divergence, match=r"returned 0, .* expects 1"):
            backend.step([Chunk(0, 0, 3)], ())


def test_the_last_step_is_compared_too(model, only, chat):
    """In era B cells are shown before a step, so that one more is needed."""
    only("B")
    backend = backend_of(model, *chat)
    with backend.context:
        backend.tokens[0] = [1, 2, 3, 4]
        backend.step([Chunk(0, 0, 3)], backend.policy.allocate([Chunk(0, 0, 3)]))
        wrong_position(backend.policy.inner)
        with pytest.raises(Divergence, match=r"the position in cell 2 is 2 in llama.cpp, 3 in the policy"):
            backend.finish()


def test_another_number_of_layers_diverges_at_the_limit_of_a_pass(model, only):
    """With 200 layers a pass of defragmentation ends after six moves."""
    only("A")
    config = CacheConfig(cells=256, n_ubatch=64, sequences=64, n_layers=200)
    backend = mirrored_backend(
        model, available()["llama.cpp-b4666"](config), ContextSettings(cells=256, sequences=64, n_ubatch=64), 0
    )
    with backend.context:
        step = [Chunk(seq, 0, 1) for seq in range(64)]
        for seq in range(64):
            backend.tokens[seq] = [1, 2, 3]
        backend.step(step, backend.policy.allocate(step))
        for seq in range(0, 64, 2):
            backend.policy.free(seq)
        backend.policy.compact()
        step = [Chunk(1, 1, 1)]
        with pytest.raises(Divergence, match="largest"):
            backend.step(step, backend.policy.allocate(step))
