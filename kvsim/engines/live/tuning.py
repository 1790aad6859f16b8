"""``kvsim tune``: look at a server, take its traffic, measure it, search its settings, and try what was found.

Each stage keeps in a folder what it found, with a key of all that this rests on. Called again, a stage whose key is the
same is not done again.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from kvsim.advice.memory.engine_flags import Flags, flags_dict, llamacpp_flags, vllm_flags
from kvsim.advice.recommend.finalists import VERDICTS
from kvsim.advice.recommend.recommend import asked_about, recommend
from kvsim.advice.recommend.recommendation import Recommendation
from kvsim.advice.recommend.slo import Slo, read_slo
from kvsim.advice.recommend.trials import LOWEST_LOAD, run_requests
from kvsim.costs.load_profile import load_profile
from kvsim.engines.live.calibration import calibrate_server
from kvsim.engines.live.held import Held
from kvsim.engines.live.listening import server_process
from kvsim.engines.live.processor_share import ProcessorShare
from kvsim.engines.live.served import LiveServer
from kvsim.engines.live.started_server import ServerCommand, started
from kvsim.engines.live.verification import ServerTried, first_requests, try_server
from kvsim.errors import UserError, counted
from kvsim.experiments.traffic import read_traffic
from kvsim.results import writable
from kvsim.scenario.scenario import Scenario, load_scenario

SLOWDOWN = 5
"""How many times as long a request may take as it does alone, where no service level was asked for.

A slowdown over a server without load is how service levels are set where nobody states one (SLOs-Serve,
arXiv 2504.08784, section 6).
"""
LEAST_OBSERVED = 20
"""Requests without which observed traffic says too little."""
_DIGITS = 12

Told = Callable[[str], object]
Observe = Callable[[Path], int]
"""Observes traffic into a file, until enough has come, and returns how many requests have."""


@dataclass(frozen=True)
class Budgets:
    """What each stage may take."""

    calibrate_s: float = 120.0
    search_s: float = 300.0
    requests: int = 40
    """Requests that are sent to try the settings, at most."""


@dataclass(frozen=True)
class Tuning:
    """What is asked."""

    server: LiveServer
    traffic: Mapping[str, Any] | None
    """``source``, ``trace`` or ``users``, and how a trace is read: arguments of ``recommend``; None: it is observed."""
    slo: str | None
    """None: ``SLOWDOWN``."""
    command: ServerCommand | None
    """Starts a server with the recommended settings; None: those are not tried."""
    folder: Path
    budgets: Budgets = Budgets()
    observe: Observe | None = None


class Watch(Protocol):
    """Is told how far the stages are."""

    def begin(self, title: str, total: int | None = None) -> None:
        """A stage begins."""

    def share(self, done: float, doing: str = "") -> None:
        """This share of it is done; ``doing``: what is being done."""


@dataclass(frozen=True)
class Trial:
    """What a server did with traffic."""

    requests: int
    held: Held
    first_error: str | None

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints; times in seconds."""
        return {"requests": self.requests, "first_error": self.first_error, **self.held.to_dict()}


@dataclass(frozen=True)
class Tuned:
    """What was found for a server."""

    server: str
    """Engine, address and model."""
    assumed: tuple[str, ...]
    """What the server does not say and its steps do not show, one line each."""
    flags: Flags
    """What sets a server as the one that runs."""
    slo: Slo
    slowdown: bool
    """Whether the service level is ``SLOWDOWN``, since none was asked for."""
    profile: str
    """The profile in words."""
    refused: str | None
    """Why the profile is not to be relied on; None if it is."""
    advice: Mapping[str, Any]
    """The recommendation as it is saved."""
    tried: Mapping[str, Trial]
    """``now`` and ``then``: the server that runs, and one with the recommended settings; empty if none was tried."""
    folder: Path
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each stage took; of those that were done before, nothing."""

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The best setting; None if nothing can be recommended."""
        return self.advice["best"][0] if self.advice["best"] else None

    @property
    def now(self) -> Mapping[str, Any] | None:
        """How the server that runs was judged; None if it could not be."""
        return next((each for each in self.advice["fixed"] if each["name"] == "now"), None)

    @property
    def gain(self) -> Mapping[str, float | None] | None:
        """How many times the load the best sustains that the server does which runs, with its interval."""
        return None if self.now is None else self.now["gain"]

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        """Options that differ: the option, its value now and its value then; ``–`` where it is not typed."""
        if self.best is None:
            return []
        now, then = flags_dict(self.flags), self.best["flags"]
        both = [name for name in {**now, **then} if name in then and now.get(name) != then.get(name)]
        return [(name, _value(now.get(name)), _value(then.get(name))) for name in both]

    @property
    def predicted_better(self) -> bool:
        """Whether the recommended settings should be better: they meet the service level more surely, sustain surely
        more, or stay further within it at the present load.
        """
        if self.best is None or self.now is None or not self.changes:
            return False
        if (now := self.now["verdict"]) != (then := self.best["verdict"]):
            return VERDICTS.index(then) < VERDICTS.index(now)
        if self.gain is not None and not _end(self.gain, "low") <= 1 <= _end(self.gain, "high"):
            return _end(self.gain, "low") > 1
        worst = self.now["worst"]["measure"]
        at_now, at_then = (each["measures"].get(worst, {}) for each in (self.now, self.best))
        return _end(at_then, "high") < _end(at_now, "low")

    @property
    def measured_better(self) -> bool | None:
        """Whether the recommended settings came closer to the service level when tried; None if they were not."""
        if "then" not in self.tried or self.starved:
            return None
        now, then = (self.slo.worst(self.tried[name].held.measured)[1] for name in ("now", "then"))
        return then < now

    @property
    def starved(self) -> bool:
        """Whether other work kept a server from its processors when it was tried, so that the trial tells nothing."""
        return any(each.held.starved for each in self.tried.values())

    @property
    def better(self) -> bool | None:
        """Whether the recommended settings are better; None where that is not known.

        It is not known if prediction and trial disagree, or if there was no trial and the times could not be fitted.
        """
        if self.best is None or not self.changes:
            return False
        if self.measured_better is None:
            return None if self.refused else self.predicted_better
        return self.predicted_better if self.predicted_better == self.measured_better else None

    @property
    def missed(self) -> bool:
        """Whether the recommended server was tried, and did not meet the service level."""
        return "then" in self.tried and self.tried["then"].held.met is False

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints; times in seconds."""
        return {
            "server": self.server,
            "assumed": list(self.assumed),
            "flags": flags_dict(self.flags),
            "slo": self.slo.text,
            "slo_asked": not self.slowdown,
            "profile": self.profile,
            "profile_refused": self.refused,
            "better": self.better,
            "changes": [{"option": name, "now": now, "then": then} for name, now, then in self.changes],
            "typed": None if self.best is None else self.best["typed"],
            "recommendation": dict(self.advice),
            "tried": {name: each.to_dict() for name, each in self.tried.items()},
            "seconds": dict(self.seconds),
            "folder": str(self.folder),
        }


def _end(interval: Mapping[str, float | None], end: Literal["low", "high"]) -> float:
    """An end of a saved interval; where it is not known, as far away as can be."""
    known = interval.get(end)
    return known if known is not None else math.inf if end == "high" else -math.inf


def _value(value: str | bool | None) -> str:
    return "–" if value is None else "on" if value is True else str(value)


def tune(asked: Tuning, watch: Watch, told: Told = lambda line: None) -> Tuned:
    """Go through all stages that have not been done yet; ``told`` hears what is done and how long it will take.

    Raises ``UserError``; what the stages before have found is kept. ``KeyboardInterrupt`` ends it likewise.
    """
    stages = _Stages(writable(asked.folder), watch, told)
    server = asked.server
    traffic = asked.traffic or {"trace": stages.observed(asked)}
    profile = stages.profile(asked)
    served = _with_traffic(server, traffic, profile)
    text = asked.slo or _slowdown(served)
    slo = read_slo(text)
    advice = stages.recommended(asked, traffic, profile, text)
    tried = stages.tried(asked, served, advice, slo)
    measured = load_profile(str(profile))
    return Tuned(
        f"{server.engine} at {server.address}, {server.model}",
        measured.assumed,
        _present_flags(server, advice["engine"]),
        slo,
        asked.slo is None,
        measured.describe(),
        measured.refused,
        advice,
        tried,
        asked.folder,
        stages.seconds,
    )


def _present_flags(server: LiveServer, engine: str) -> Flags:
    """What sets a server as the one that runs."""
    present = server.served.scenario
    if engine == "vllm":
        return vllm_flags(present)
    return (*llamacpp_flags(present), ("--threads", str(server.served.threads)))


def _with_traffic(server: LiveServer, traffic: Mapping[str, Any], profile: Path) -> Scenario:
    """The server that runs, with the traffic that it gets."""
    return load_scenario(
        load_scenario(asked_about(**traffic)),
        **server.served.keys,
        model__name=server.model,
        machine__profile=str(profile),
    )


def _slowdown(served: Scenario) -> str:
    """The service level: no more than ``SLOWDOWN`` times of what requests take alone on the server that runs."""
    traffic = read_traffic(served, 1, None, 1.0, most=100)
    alone, requests = traffic.part(served, 0, 1.0, LOWEST_LOAD)
    done = run_requests(alone, requests, open_loop=False)
    if done.error:
        raise UserError(f"the traffic cannot be served by the server that runs: {done.error}")
    measures = done.measures
    bounds = [(name, value) for name in ("ttft_p95", "tpot_p95") if (value := measures.get(name))]
    return ",".join(f"{name}<{_rounded(SLOWDOWN * value)}" for name, value in bounds)


def _rounded(seconds: float) -> str:
    """Seconds with two digits, as a service level has them."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1000, "ms")
    return f"{float(f'{value:.2g}'):.10g}{unit}"


class _Stages:
    """What the stages have found so far, in a folder."""

    def __init__(self, folder: Path, watch: Watch, told: Told):
        self._folder, self._watch, self._told = folder, watch, told
        self._file = folder / "tune.json"
        self.seconds: dict[str, float] = {}
        try:
            read = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            read = {}
        self._done: dict[str, Any] = read if isinstance(read, dict) else {}

    def observed(self, asked: Tuning) -> Path:
        """The traffic that was observed."""
        path = self._folder / "traffic.jsonl"
        if self._done.get("observe") != asked.server.address.url:
            assert asked.observe is not None
            with self._timed("observe"):
                came = self._done.get("observed", 0) + asked.observe(path)
            self._keep("observed", came)
            if came < LEAST_OBSERVED:
                raise UserError(
                    f"{counted(came, 'request')} came, and at least {LEAST_OBSERVED} are needed: the same command "
                    "observes on, or name your traffic by --trace, --scenario or --users"
                )
            self._keep("observe", asked.server.address.url)
        return path

    def profile(self, asked: Tuning) -> Path:
        """The server's times."""
        path, scenario = self._folder / "server.profile.json", asked.server.served.scenario
        seconds = asked.budgets.calibrate_s
        key = _digest(asked.server.engine, asked.server.model, scenario.server, scenario.cache, seconds)
        if self._done.get("calibrate") == key and path.exists():
            return path
        self._watch.begin(f"measuring {asked.server.address}", 100)
        journal = path.with_name(f"{path.name}.part")
        with self._timed("calibrate"):
            done = calibrate_server(
                asked.server,
                seconds=seconds,
                name="server",
                report=self._watch.share,
                notice=self._told,
                journal=journal,
            )
            done.profile.model_copy(update={"refused": done.refusal()}).save(path)
            journal.unlink(missing_ok=True)
        self._keep("calibrate", key)
        return path

    def recommended(self, asked: Tuning, traffic: Mapping[str, Any], profile: Path, slo: str) -> dict[str, Any]:
        """The best settings, as they are saved."""
        folder, scenario = self._folder / "recommendation", asked.server.served.scenario
        content = [Path(traffic["trace"]).read_bytes()] if "trace" in traffic else []
        key = _digest(profile.read_bytes(), *content, sorted(traffic.items()), slo, scenario.server, scenario.cache)
        saved = folder / "recommendation.json"
        if self._done.get("recommend") != key or not saved.exists():
            with self._timed("recommend"):
                self._search(asked, {**traffic, "slo": slo, "profile": str(profile)}).save(folder)
            self._keep("recommend", key)
        read: dict[str, Any] = json.loads(saved.read_text(encoding="utf-8"))
        return read

    def _search(self, asked: Tuning, options: Mapping[str, Any]) -> Recommendation:
        """Search settings as long as the budget allows."""
        self._watch.begin("searching settings", 100)
        most_s = asked.budgets.search_s
        until = time.monotonic() + most_s

        def progress(done: int, total: int, failed: int) -> None:
            if time.monotonic() > until:
                raise KeyboardInterrupt  # By which a search ends with what is known by then.
            self._watch.share(done / max(total, 1))

        # A scenario may be of another model; what is searched is for the one that is served.
        model, now = asked.server.model, asked.server.served.keys
        try:
            found = recommend(**options, model=model, now=now, progress=progress)
        except KeyboardInterrupt:
            if time.monotonic() > until:
                raise UserError(f"--search: {most_s:g} s are over, and no setting was tried; give it more") from None
            raise
        assert isinstance(found, Recommendation)  # The profile is of this model.
        return found

    def tried(self, asked: Tuning, served: Scenario, advice: Mapping[str, Any], slo: Slo) -> dict[str, Trial]:
        """What the server that runs took, and what one with the recommended settings did with the same requests."""
        server, command = asked.server, asked.command
        best: Mapping[str, Any] | None = advice["best"][0] if advice["best"] else None
        then = None if best is None else load_scenario(str(self._folder / "recommendation" / best["scenario"]))
        scenario = served if then is None else load_scenario(served, workload=then.workload)
        sent = first_requests(scenario.build_workload(), asked.budgets.requests)
        key = _digest(self._done.get("recommend"), asked.budgets.requests)

        def sends(to: ServerTried, scenario: Scenario) -> Trial:
            self._watch.begin(f"sending {counted(sent.n_requests, 'request')} to {to.address}", 100)
            tried = try_server(to, scenario, sent, slo.bounds, self._told, self._watch.share)
            return Trial(len(tried.exchanges), tried.held, tried.first_error)

        def now() -> Trial:
            process = server_process(server.address)
            return sends(ServerTried(server.address, server.settings, process, server.key), scenario)

        found = {"now": self._once("now", key, slo, now)}
        if then is not None and best is not None and command is not None and best["command"]:
            flags = tuple(_flags(best["flags"]))

            def recommended() -> Trial:
                with started(command, flags) as (settings, process):
                    return sends(ServerTried(command.address, settings, process), then)

            found["then"] = self._once("then", _digest(key, command.words), slo, recommended)
        return found

    def _once(self, name: str, key: str, slo: Slo, work: Callable[[], Trial]) -> Trial:
        """A trial, done now unless it was done before."""
        kept = self._done.get(name)
        if kept is not None and kept["key"] == key:
            return _trial(kept, slo)
        with self._timed(name):
            trial = work()
        self._keep(name, {"key": key, **_saved(trial)})
        return trial

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[stage] = round(time.monotonic() - began, 1)

    def _keep(self, name: str, value: Any) -> None:
        self._done[name] = value
        part = self._file.with_suffix(".part")
        try:
            part.write_text(json.dumps(self._done, indent=1), encoding="utf-8")
            part.replace(self._file)
        except OSError as e:
            raise UserError(f"{self._file}: cannot write: {e.strerror}") from None


def _saved(trial: Trial) -> dict[str, Any]:
    held = trial.held
    seen = None if held.processors is None else held.processors.to_dict()
    kept = {name: dict(getattr(held, name)) for name in ("predicted", "measured", "at_pace")}
    return {**kept, "requests": trial.requests, "first_error": trial.first_error, "pace": held.pace, "processors": seen}


def _trial(saved: Mapping[str, Any], slo: Slo) -> Trial:
    seen = saved["processors"]
    processors = None if seen is None else ProcessorShare(**seen)
    held = Held(saved["predicted"], saved["measured"], saved["at_pace"], saved["pace"], processors, slo.bounds)
    return Trial(saved["requests"], held, saved["first_error"])


def _flags(saved: Mapping[str, str | bool]) -> Iterator[tuple[str, str]]:
    return ((name, "" if value is True else str(value)) for name, value in saved.items())


def _digest(*parts: Any) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part if isinstance(part, bytes) else repr(part).encode())
        whole.update(b"\0")
    return whole.hexdigest()[:_DIGITS]
