"""What passes are charged for, and how their work is counted."""

import numpy as np

from kvsim.costs.pass_layout import PassLayout, Sample, Work, regime_of
from kvsim.costs.profile import Coefficient

LAYOUT = PassLayout(kernels=("gather", "tiled"), matmul_knots=(1, 4, 16), attention_knots=(1, 2), causal=True)


def sample(*works, kernel="gather"):
    first, *further = works
    return Sample(**dict(first), kernel=kernel, further=tuple(further), seconds=1.0, origin=0)


def work(*scans, runs=None):
    return Work(tokens=sum(n for n, _ in scans), scans=scans, chunks=len(scans), runs=runs or len(scans))


def test_the_regime_of_a_pass():
    assert regime_of(work((1, 9), (1, 5))) == "decode"
    assert regime_of(work((1, 9), (2, 5))) == "mixed"


def test_columns_are_segments_of_tokens_then_each_kernels():
    assert LAYOUT.width == 2 + 2 * 5
    row = LAYOUT.design([sample(work((1, 10), (5, 20), runs=3))])[0]
    # Six tokens: three in the first segment, two in the second. The chunk of five reads two cells less on the mean, and
    # four of its tokens come after its first.
    assert row.tolist() == [3, 2, 1, 28, 72, 2, 3, 0, 0, 0, 0, 0]
    other = LAYOUT.design([sample(work((1, 10), (5, 20), runs=3), kernel="tiled")])[0]
    assert other.tolist() == [3, 2, 0, 0, 0, 0, 0, 1, 28, 72, 2, 3]


def test_passes_that_were_timed_together_are_charged_together():
    one, two = work((1, 10), runs=2), work((9, 40))
    together = LAYOUT.design([sample(one, two), sample(one)])
    apart = LAYOUT.design([sample(two), sample(one)])
    assert together[0].tolist() == (apart[0] + apart[1]).tolist()


def test_of_a_regime_only_its_passes_are_charged():
    steps = [sample(work((1, 10)), work((9, 40))), sample(work((1, 7), (1, 8)))]
    plain, mixed = (LAYOUT.design(steps, regime) for regime in ("decode", "mixed"))
    assert (plain + mixed).tolist() == LAYOUT.design(steps).tolist()
    assert mixed[1].tolist() == [0] * LAYOUT.width
    assert plain[0].tolist() == LAYOUT.design([sample(work((1, 10)))])[0].tolist()


def test_where_every_chunk_is_one_run_runs_are_not_charged():
    assert LAYOUT.design([sample(work((1, 10), (1, 12)))])[0, 6] == 0


def test_coefficients_are_put_back_by_name():
    each = [Coefficient(value=float(i), low=0.0, high=99.0) for i in range(LAYOUT.width)]
    costs = LAYOUT.costs(each)
    assert [c.value for c in costs.matmul_slopes_s] == [0, 1]
    tiled = costs.kernels["tiled"]
    assert (tiled.base_s.value, tiled.per_cell_s.value, tiled.further_token_s[0].value) == (7, 8, 9)
    assert (tiled.per_chunk_s.value, tiled.per_run_s.value, tiled.causal) == (10, 11, True)


def test_the_rows_of_many_samples_are_those_of_each():
    rng = np.random.default_rng(1)
    steps = [sample(work(*((int(n), int(n) + 3) for n in rng.integers(1, 9, 3)), runs=5)) for _ in range(20)]
    assert LAYOUT.design(steps).tolist() == [LAYOUT.design([each])[0].tolist() for each in steps]
