"""Time of finding cells in a fragmented cache: a decode step of 64 sequences, by size of the cache.

Run with ``make bench``; the ratio of the medians is printed.
"""

import statistics
import time

import pytest

from policies import CacheConfig, Chunk, Policy, available

SEQUENCES = 64
SMALL, LARGE = 4_096, 131_072
ROUNDS = 200


class FragmentedCache:
    """A cache full but for every fourth extent of ``piece`` cells and 256 cells at the end, so that a search from the
    low end skips hole after hole."""

    def __init__(self, name: str, cells: int, piece: int = 8):
        config = CacheConfig(cells=cells, n_ubatch=512, sequences=SEQUENCES, max_tokens=cells)
        self.policy: Policy = available()[name](config)
        self.lengths = dict.fromkeys(range(SEQUENCES), 0)
        filled = 0
        while filled + piece <= cells - 256:
            seq = (filled // piece) % SEQUENCES
            self.policy.allocate([Chunk(seq, self.lengths[seq], piece)])
            self.lengths[seq] += piece
            filled += piece
        # Every fourth sequence ends, and with it every fourth piece.
        for seq in range(0, SEQUENCES, 4):
            self.policy.free(seq)
            self.lengths[seq] = 0

    def step(self) -> None:
        """Allocate one token for each sequence."""
        self.policy.allocate([Chunk(seq, n, 1) for seq, n in self.lengths.items()])

    def undo(self) -> None:
        """Free the step's tokens."""
        for seq, n in self.lengths.items():
            self.policy.free(seq, n)

    def seconds(self) -> float:
        began = time.perf_counter()
        self.step()
        took = time.perf_counter() - began
        self.undo()
        return took


@pytest.mark.parametrize("name", ["contiguous", "llama.cpp-b6975"])
def test_decode_step_in_a_fragmented_cache(benchmark, capsys, name):
    """Both sizes alternate, so that other load affects both alike."""
    small, large = FragmentedCache(name, SMALL), FragmentedCache(name, LARGE)
    took: dict[str, list[float]] = {"small": [], "large": []}

    def pair() -> None:
        took["small"].append(small.seconds())
        took["large"].append(large.seconds())

    benchmark.pedantic(pair, rounds=ROUNDS, warmup_rounds=5)
    medians = {size: statistics.median(times) for size, times in took.items()}
    ratio = medians["large"] / medians["small"]
    benchmark.extra_info |= {"ratio": ratio, **medians}
    sizes = [f"{medians[size] * 1e6:,.0f} us in {n:,} cells" for size, n in (("small", SMALL), ("large", LARGE))]
    with capsys.disabled():
        print(f"\n{name}: {', '.join(sizes)}: {ratio:.1f} times as long")
