"""A machine whose pace drifts twofold within seconds, on a clock of its own: nothing here takes real time."""

from typing import get_args

import numpy as np

from kvsim.calibration.numpy_engine import draw_trials, reference_passes_on, serve, traffic, whole_pass
from kvsim.calibration.subject import passes_in
from kvsim.calibration.trials import CELLS
from kvsim.costs.cost_model import CostModel
from kvsim.costs.load_profile import load_profile
from kvsim.simulation.backend import PassByPass
from policies import Group, Kernel
from policies.placement.rule import PassReads
from tests.paths import DATA

TRUTH = load_profile(str(DATA / "profile-without-pace.json"))
"""What everything costs at the usual pace; a profile from before the pace was looked at."""


class DriftingClock:
    """Advances by the seconds of the work that is done, times the machine's pace at that moment."""

    def __init__(self, drifts=True, noise=0.03):
        self.now_s = 0.0
        self._drifts = drifts
        self._rng = np.random.default_rng(5)
        self._noise = noise

    def __call__(self):
        return self.now_s

    def pace(self):
        """Between 0.65 and 1.55 of the usual, in waves of some seconds and in sudden steps."""
        if not self._drifts:
            return 1.0
        t = self.now_s
        waves = 0.6 * np.sin(2 * np.pi * t / 1.9) + 0.3 * np.sin(2 * np.pi * t / 0.9)
        return 2 ** (0.5 * (waves + (0.35 if int(t / 7) % 2 else -0.35)))

    def work(self, seconds):
        """Do what takes so many seconds at the usual pace, and return what it took."""
        took = seconds * self.pace() * np.exp(self._noise * self._rng.standard_normal())
        self.now_s += took
        return took


class PretendedEngine(PassByPass):
    """Takes for a pass what a profile says, on the machine's clock."""

    wants_views = False

    def __init__(self, costs, kernel, clock):
        self.kernel, self.groups, self.tokens = kernel, (Group(CELLS),), {}
        self._costs, self._clock = costs, clock
        self._price = costs.pass_price(kernel)

    def begin(self, seq, request, *, again=False):
        pass

    def discard(self, seq, start, stop):
        pass

    def forward(self, batch):
        return self._clock.work(self._price.seconds(PassReads.of(batch)))

    def move(self, moves):
        return self._clock.work(self._costs.moves(moves))

    def rotate(self, shift):
        return self._clock.work(self._costs.shift(shift, self.groups[0]))

    def copy(self, copies):
        return self._clock.work(sum(self._costs.host_copies(copy) for copy in copies))

    def transfer(self, transfers):
        return self._clock.work(self._costs.transfers(transfers))


def at_pace(profile, pace):
    """The profile of a machine that takes ``pace`` times as long for everything."""

    def scaled(value):
        if isinstance(value, dict):
            times = pace if set(value) == {"value", "low", "high"} else None
            return {key: times * inner if times else scaled(inner) for key, inner in value.items()}
        return [scaled(inner) for inner in value] if isinstance(value, list) else value

    return type(profile).model_validate(scaled(profile.model_dump(mode="json")))


class DriftingSubject:
    """An engine that costs what a profile says, on a machine whose pace drifts."""

    engine, model, type_k, type_v, threads, shifts_all, skipping = "numpy", "tiny", "f32", "f32", 1, False, ()

    def __init__(self, clock, slowness=1.0):
        self.clock = clock
        costs = CostModel(at_pace(TRUTH, slowness))
        self.engines = {kernel: PretendedEngine(costs, kernel, clock) for kernel in get_args(Kernel)}
        decode, prompt = whole_pass(2, 1536, prompt=False), whole_pass(32, 512, prompt=True)
        self.reference_passes = reference_passes_on(self.engines["sliced"])
        price = costs.pass_price("sliced")
        self.reference_s = tuple(price.seconds(PassReads.of(batch)) for batch in (decode, prompt))
        """Seconds of the reference passes at the usual pace."""

    @property
    def kinds(self):
        return len(self.engines)

    def sizes(self, seconds):
        """By the time of a decode, as for the real engine."""
        decodes = seconds / 2 / len(self.engines) / self.reference_s[0]
        return passes_in(decodes / 18), 1

    def draw(self, each, rng):
        return draw_trials(self.engines, each, rng)

    def serve(self, kind, turn, origin, rng, recorder):
        engine = list(self.engines.values())[kind]
        serve(engine, traffic("tiny", "f32", "f32", turn, rng), origin, recorder)

    def spent(self):
        return self.clock.now_s, self.clock.now_s

    def close(self):
        pass
