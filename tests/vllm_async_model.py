"""A plain implementation of vLLM's asynchronous scheduler and of the loop of its engine, for recordings of our own.

Like ``tests/vllm_model.py`` it shares no code with ``policies`` or ``kvsim``: it has the counts that vLLM has, and sees
a step's outcome when the engine does.
"""

import random
from collections import deque

from tests.vllm_model import Manager, ModelRequest, Scheduler, prompts, record_scheduler, token


class AsyncScheduler(Scheduler):
    """Composes steps before the outcome of up to ``depth - 1`` others is known."""

    def __init__(self, manager, *, depth=2, **keys):
        super().__init__(manager, **keys)
        self.depth = depth
        self.under_way = deque()
        self.samples = {}
        """By step: the requests that generate a token in it."""

    def outstanding(self, request):
        to_come = request.placeholders
        if to_come and request.computed + 2 - to_come >= self.prompt(request) + request.output:
            return 0
        return self.known(request) + to_come - request.computed

    def prompt(self, request):
        return self.known(request) - request.generated

    def schedule(self):
        step, samples = super().schedule(), []
        for request, n in step.items():
            request.computed += n
            request.flying += n
            if request.computed >= self.known(request) + request.placeholders:
                request.placeholders += 1
                samples.append(request)
        self.under_way.append((step, samples))
        return step

    def take(self, step):
        _, samples = self.under_way[-1]
        return [request.name for request in samples], self.see_outcome() if len(self.under_way) == self.depth else []

    def see_outcome(self):
        """Names of the requests that end with the oldest step."""
        step, samples = self.under_way.popleft()
        ended = []
        for request, n in step.items():
            request.flying -= n
            stale = request.stale > 0
            request.stale -= n if stale else 0
            if request not in self.running and request not in self.waiting:
                continue
            if request not in samples:
                continue
            self.manager.tokens[request.name].append(token(3_000_000 + request.number, request.generated))
            request.generated += 1
            request.placeholders -= not stale
            if request in self.running:
                self.manager.cache(request.name, request.computed - request.placeholders)
            if request.generated == request.output or self.known(request) >= self.most:
                (self.running if request in self.running else self.waiting).remove(request)
                self.end(request)
                ended.append(request.name)
        return ended


def record_async(seed, depth=2, **keys):
    """A recording of the asynchronous scheduler, as ``record_scheduler`` makes them of the other."""

    def build(manager, **options):
        return AsyncScheduler(manager, depth=depth, **options)

    records = record_scheduler(seed, build=build, **keys)
    effective = records[0]["effective"]
    effective |= {"async_scheduling": True, "max_concurrent_batches": 2, "max_in_flight": 2 * records[0]["budget"]}
    records[0] |= {"depth": depth} if depth != 2 else {}
    return records


class Engine:
    """The loop of the engine, and what it records: times in milliseconds, steps that take between 1 and 9."""

    def __init__(self, seed, scheduler, arrivals):
        self.rng, self.scheduler = random.Random(seed), scheduler
        self.arrivals = deque(arrivals)
        """Pairs (time, request, segments), ascending."""
        self.now, self.free_at, self.told = 0.0, 0.0, True
        """The time; when the model has computed all that it was given; whether all that ended was made known."""
        self.steps, self.hits, self.seen = [], {}, {}
        self.queue = deque()
        """Steps that were scheduled: when they are computed, and their records."""

    def run(self):
        scheduler, asynchronous = self.scheduler, isinstance(self.scheduler, AsyncScheduler)
        while True:
            if not (self.arrivals or scheduler.running or scheduler.waiting or self.queue or not self.told):
                return
            if not (scheduler.running or scheduler.waiting or self.queue or not self.told):
                self.now = max(self.now, self.arrivals[0][0])
            while self.arrivals and self.arrivals[0][0] <= self.now:
                _, request, segments = self.arrivals.popleft()
                scheduler.add(request, segments)
            if scheduler.running or scheduler.waiting or not self.told:
                step = self.schedule()
                more = step or scheduler.running or scheduler.waiting
                if asynchronous and len(self.queue) < 2 and more:
                    continue
            self.see_outcome(asynchronous)

    def schedule(self):
        scheduler = self.scheduler
        record = {"type": "step", "s": len(self.steps), "t": round(self.now, 3)}
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        before = {request: request.computed for request in scheduler.running}
        step = scheduler.schedule()
        calls, scheduler.calls, self.told = scheduler.calls, [], True
        hits = {call[1]: call[2] for call in calls if call[0] == "L"}
        rows = [[r.number, n, before[r] if r in before else hits[r.name]] for r, n in step.items()]
        new = [request for request in step if request not in before and not request.preemptions]
        self.hits |= {request.number: hits[request.name] for request in new}
        lists = {
            "new": [request.number for request in new],
            "res": [request.number for request in step if request not in before and request.preemptions],
            "pre": [int(call[1][1:]) for call in calls if call[0] == "P"],
        }
        record |= {"run": [running, len(scheduler.running)], "wait": [waiting, len(scheduler.waiting)], "n": rows}
        record |= {"free": len(scheduler.manager.pool.queue)} | {key: value for key, value in lists.items() if value}
        self.steps.append(record)
        self.free_at = max(self.free_at, self.now) + (self.rng.uniform(1, 9) if step else 0.0)
        self.queue.append((self.free_at, record, step))
        self.now += 0.01
        return step

    def see_outcome(self, asynchronous):
        ready, record, step = self.queue.popleft()
        self.now = max(self.now, ready) + 0.01
        ended = self.scheduler.see_outcome() if asynchronous else self.scheduler.finish_step(step)[1]
        self.scheduler.calls = []
        if ended:
            record["fin"], self.told = [int(name[1:]) for name in ended], False


def record_server(seed, n=40, blocks=16, size=4, *, asynchronous=False, caching=True, mode="server", **keys):
    """A recording of a server: a first line, ``n`` requests that sometimes continue an answer, and all steps."""
    rng = random.Random(seed)
    keys = {"budget": 24, "slots": 5, "most": 10**6, **keys}
    scheduler = (AsyncScheduler if asynchronous else Scheduler)(Manager(blocks, size, caching=caching), **keys)
    arrivals, rows, at, room = [], [], 0.0, min((blocks - 1) * size, keys["most"])
    for number in range(n):
        at += rng.expovariate(1 / 25)
        segments = prompts(rng, size)
        if rows and rng.random() < 0.3:
            earlier = rng.choice(rows)
            segments = [*earlier["prompt"], [f"out:{earlier['r']}", 0, earlier["n_out"]], segments[-1]]
        if sum(n for _, _, n in segments) >= room - 1:
            segments = [[7000 + number, 0, 3]]
        prompt = sum(n for _, _, n in segments)
        output = rng.randint(1, min(room - prompt, 25))
        rows.append({"type": "request", "r": number, "prompt": segments, "n_prompt": prompt, "n_out": output})
        rows[-1]["engine"] = round(at, 3)
        own = [[3_000_000 + int(source[4:]) if isinstance(source, str) else source, s, n] for source, s, n in segments]
        arrivals.append((rows[-1]["engine"], ModelRequest(f"r{number}", own, output, 0, at), own))
    engine = Engine(seed, scheduler, arrivals)
    engine.run()
    for row, (_, request, _) in zip(rows, arrivals, strict=True):
        row |= {"hit": engine.hits[row["r"]], "pre": request.preemptions}
    flags = {"mode": mode, "block_size": size, "num_blocks": blocks, "max_model_len": keys["most"]}
    flags |= {"max_num_seqs": keys["slots"], "max_num_batched_tokens": keys["budget"], "prefix_caching": caching}
    flags |= {"async_scheduling": True} if asynchronous else {}
    return [{"type": "meta", "vllm": "a model", "engine": flags}, *rows, *engine.steps]
