"""A second, plain implementation of vLLM's cache manager and scheduler, written from their description.

Random runs of it are recorded in the format of the recordings of the real vLLM. It shares no code with ``policies`` or
``kvsim``: tokens are numbers, a block's name is a digest of its tokens, every search is exhaustive.
"""

import hashlib
import json
import random
import zlib


def crc(value):
    return zlib.crc32(json.dumps(value, separators=(",", ":")).encode())


def token(seed, i):
    x = (seed * 2654435761 + i * 40503 + i * i * 97 + 12345) % 2**32
    x ^= x >> 15
    return (x * 2246822519 % 2**32) >> 13 & 0x7FFF


def text(*segments):
    return [token(seed, start + k) for seed, start, n in segments for k in range(n)]


def ceil(a, b):
    return -(-a // b)


class Pool:
    """Blocks 1 to n - 1; the first of the queue is allocated next."""

    def __init__(self, n):
        self.refs = [0] * n
        self.ids = [None] * n
        self.queue = list(range(1, n))
        self.cached = []
        """Blocks with an id, in the order in which they got it."""
        self.evicted = []

    def find(self, name):
        return next((block for block in self.cached if self.ids[block] == name), None)

    def take(self, n):
        taken, self.queue = self.queue[:n], self.queue[n:]
        for block in taken:
            self.drop(block)
            self.refs[block] = 1
        return taken

    def drop(self, block):
        if self.ids[block] is not None:
            self.evicted.append([block, self.ids[block]])
            self.cached.remove(block)
            self.ids[block] = None

    def touch(self, blocks):
        for block in blocks:
            if self.refs[block] == 0:
                self.queue.remove(block)
            self.refs[block] += 1

    def release(self, blocks):
        gone = []
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                gone.append(block)
        plain = [block for block in gone if self.ids[block] is None]
        self.queue = plain + self.queue + [block for block in gone if self.ids[block] is not None]

    def state(self):
        blocks = [[refs, name or 0] for refs, name in zip(self.refs[1:], self.ids[1:], strict=True)]
        state = {"nf": len(self.queue), "fq": list(self.queue), "fqc": crc(self.queue), "st": crc(blocks)}
        state["nc"] = len({name for name in self.ids if name is not None})
        if self.evicted:
            state["ev"], self.evicted = self.evicted, []
        return state


class Manager:
    """Block tables of requests, which are named by strings."""

    def __init__(self, blocks, size, *, caching=True, watermark=0.0, window=None):
        self.pool = Pool(blocks)
        self.size = size
        self.caching = caching
        self.kept = int(watermark * blocks)
        self.window = window
        self.tokens = {}
        self.tables = {}
        self.named = {}
        """By request: number of leading blocks that have their ids."""

    def names(self, request, n):
        """Ids of its first n blocks."""
        names, parent = [], "root"
        for at in range(n):
            block = self.tokens[request][at * self.size : (at + 1) * self.size]
            digest = hashlib.blake2b(f"{parent}|{','.join(map(str, block))}".encode(), digest_size=6)
            parent = digest.hexdigest()
            names.append(parent)
        return names

    def lookup(self, request):
        """The cached blocks of the longest known prefix (with a window: of its end)."""
        if not self.caching:
            return []
        found = [self.pool.find(name) for name in self.names(request, (len(self.tokens[request]) - 1) // self.size)]
        if self.window is None:
            first_miss = found.index(None) if None in found else len(found)
            return found[:first_miss]
        need, run = ceil(self.window - 1, self.size), 0
        for at in range(len(found) - 1, -1, -1):
            run = 0 if found[at] is None else run + 1
            if run == need:
                return [0] * at + found[at : at + need]
        return found[:run]

    def allocate(
        self, request, computed, new, hit, *, look=0, whole=False, others=False, running=False, most=10**9, flying=0
    ):
        """The new blocks, or None if they do not fit; ``hit``: blocks that the look-up before it found; ``flying``: of
        the computed tokens, those that are still being computed."""
        table = self.tables.setdefault(request, [])
        if self.window is not None:
            # The next token to compute sees no further back than this.
            past = min(max(computed + self.size * len(hit) - flying - self.window + 1, 0) // self.size, len(table))
            out = [block for block in table[:past] if block]
            table[:past] = [0] * past
            self.pool.release(out[::-1])
        kept = self.kept if others and not running else 0
        leaving = sum(1 for block in hit if block and self.pool.refs[block] == 0)
        free = len(self.pool.queue) - kept
        start = computed + self.size * len(hit)
        slots = min(start + new + look, most)

        def missing(tokens):
            return max(ceil(tokens, self.size) - len(table) - len(hit), 0)

        if whole and missing(len(self.tokens[request])) + leaving > free:
            return None
        if missing(slots) + leaving > free:
            return None
        fresh = missing(slots)
        self.pool.touch(block for block in hit if block)
        if hit:
            self.named[request] = len(hit)
        taken = self.pool.take(fresh)
        table += [*hit, *taken]
        self.cache(request, start + new)
        return taken

    def cache(self, request, tokens):
        """Give those blocks their ids that the first tokens fill and whose tokens are known."""
        if self.caching:
            table, full = self.tables[request], min(tokens, len(self.tokens[request])) // self.size
            names = self.names(request, full)
            for at in range(self.named.get(request, 0), full):
                if table[at] and self.pool.ids[table[at]] is None:
                    self.pool.ids[table[at]] = names[at]
                    self.pool.cached.append(table[at])
            self.named[request] = max(full, self.named.get(request, 0))

    def free(self, request):
        self.pool.release([block for block in self.tables.pop(request, [])[::-1] if block])
        self.named.pop(request, None)


def prompts(rng, size):
    """Segments of a prompt: often a shared prefix, then new text."""
    segments = []
    if rng.random() < 0.7:
        segments.append([100 + rng.randrange(3), 0, rng.choice([size, 2 * size + 1, 3 * size])])
    segments.append([1000 + rng.randrange(10**6), 0, rng.randint(1, 3 * size)])
    return segments


class ManagerRecorder:
    """Makes random calls of a manager, and records them."""

    def __init__(self, seed, blocks, size, look, full, **keys):
        self.rng = random.Random(seed)
        self.manager = Manager(blocks, size, **keys)
        self.blocks, self.look, self.full = blocks, look, full
        self.computed, self.number = {}, 0
        self.records = []

    def note(self, op, **fields):
        self.records.append({"op": op, **fields, "i": len(self.records), **self.manager.pool.state()})

    def allocate(self, name, hit, first):
        manager, computed, rng = self.manager, self.computed, self.rng
        tokens = len(manager.tokens[name])
        done = manager.size * len(hit) if first else computed[name]
        new, ahead = rng.randint(1, tokens - done), rng.choice(self.look)
        others = any(other != name for other in computed)
        keys = {"nct": 0 if first else computed[name], "new": new, "hit": manager.size * len(hit), "look": ahead}
        keys |= {"ff": self.full and first, "hs": others, "stt": int(not first), "first": first, "infl": 0}
        out = manager.allocate(
            name, keys["nct"], new, hit, look=ahead, whole=keys["ff"], others=others, running=not first
        )
        self.note("alloc", r=name, **keys, out=out, tbl=list(manager.tables[name]))
        if out is not None:
            computed[name] = done + new
        elif first:
            manager.free(name)
            self.note("free", r=name)

    def add(self):
        name, self.number = f"r{self.number}", self.number + 1
        segments = prompts(self.rng, self.manager.size)
        self.manager.tokens[name] = text(*segments)
        self.note("add", r=name, prompt=segments)
        hit = self.manager.lookup(name)
        self.note("lookup", r=name, hit=self.manager.size * len(hit), blocks=hit)
        self.allocate(name, hit, True)

    def append(self, name):
        segment = [5000 + self.number, self.rng.randrange(99), self.rng.randint(1, 3)]
        self.manager.tokens[name] += text(segment)
        self.note("append", r=name, seg=segment)
        self.allocate(name, [], False)

    def reset(self):
        pool = self.manager.pool
        ok = not any(pool.refs)
        if ok:
            pool.ids, pool.cached = [None] * self.blocks, []
        self.note("reset", ok=ok)

    def evict(self):
        ids = self.rng.sample(range(1, self.blocks), 2)
        for block in ids:
            self.manager.pool.drop(block)
        self.note("evict", ids=ids)

    def random_call(self):
        computed, tokens, rng = self.computed, self.manager.tokens, self.rng
        done = [name for name in computed if computed[name] == len(tokens[name])]
        begun = [name for name in computed if name not in done]
        odds = {"new": 4, "go on": 6, "append": 9, "free": 1.5, "preempt": 0.5, "reset": 0.3, "evict": 0.3}
        what = rng.choices(list(odds), list(odds.values()))[0]
        if what == "new":
            self.add()
        elif what == "go on" and begun:
            self.allocate(rng.choice(begun), [], False)
        elif what == "append" and done:
            self.append(rng.choice(done))
        elif what in ("free", "preempt") and computed:
            name = rng.choice(list(computed))
            del computed[name]
            self.manager.free(name)
            self.note(what, r=name)
        elif what == "reset":
            self.reset()
        elif what == "evict":
            self.evict()


def record_manager(
    seed, ops=400, blocks=20, size=4, *, look=(0,), window=None, watermark=0.0, caching=True, full=False
):
    """A recording of random calls of the manager: a header, ``ops`` calls and a footer."""
    recorder = ManagerRecorder(seed, blocks, size, look, full, caching=caching, watermark=watermark, window=window)
    header = {"type": "header", "kind": "manager", "vllm": "a model", "num_blocks": blocks, "block_size": size}
    header |= {"caching": caching, "watermark": watermark} | ({"window": window} if window else {})
    while len(recorder.records) < ops:
        recorder.random_call()
    return [header, *recorder.records, {"type": "footer", "ops": ops}]


class ModelRequest:
    """A request in the model's scheduler."""

    def __init__(self, name, segments, output, priority, arrival):
        self.name, self.output, self.priority, self.arrival = name, output, priority, arrival
        self.number = int(name[1:])
        self.computed = self.generated = self.preemptions = 0
        self.flying = self.stale = self.placeholders = 0
        """Tokens in steps that are under way, those of them from before a preemption, and outputs to come of them."""
        self.urgency = (priority, arrival)


class Scheduler:
    """A scheduler that composes steps and logs its calls of the manager."""

    def __init__(
        self, manager, *, budget, slots, most, priority=False, whole=True, chunked=True, threshold=0, careful=False
    ):
        """``careful``: unlike vLLM, blocks that a request got in the step that preempts it lose their ids, since their
        contents were never computed."""
        self.careful = careful
        self.manager, self.budget, self.slots, self.most = manager, budget, slots, most
        self.priority, self.whole, self.chunked, self.threshold = priority, whole, chunked, threshold
        self.running, self.waiting, self.calls = [], [], []

    def known(self, request):
        return len(self.manager.tokens[request.name])

    def add(self, request, segments):
        self.manager.tokens[request.name] = text(*segments)
        self.waiting.append(request)
        self.sort()

    def sort(self):
        if self.priority:
            self.waiting.sort(key=lambda request: (*request.urgency, request.number))

    def abort(self, request):
        (self.running if request in self.running else self.waiting).remove(request)
        self.end(request)

    def end(self, request):
        self.manager.free(request.name)
        self.calls.append(["F", request.name])

    def outstanding(self, request):
        return self.known(request) - request.computed

    def most_tokens(self):
        """Most tokens of one request in a step: limited if there are other requests."""
        alone = len(self.running) + len(self.waiting) <= 1
        return self.threshold if self.threshold and not alone else 10**9

    def schedule(self):
        """Tokens of each scheduled request, in order."""
        budget, limit, at, preempted, step = self.budget, self.most_tokens(), 0, False, {}
        while at < len(self.running) and budget:
            request = self.running[at]
            n = min(self.outstanding(request), limit, budget, self.most - 1 - request.computed)
            if n <= 0:
                at += 1
                continue
            out, keys = None, {"running": True, "most": self.most, "flying": request.flying}
            while out is None:
                out = self.manager.allocate(request.name, request.computed, n, [], others=len(self.running) > 1, **keys)
                self.calls.append(["A", request.name, request.computed, n, 0, out])
                if out is None:
                    preempted = True
                    victim = max(self.running, key=lambda r: r.urgency) if self.priority else self.running[-1]
                    if victim in step:
                        budget += step.pop(victim)
                        at -= 1
                    self.running.remove(victim)
                    if self.careful:
                        self.forget_uncomputed_blocks(victim)
                    self.manager.free(victim.name)
                    self.calls.append(["P", victim.name])
                    victim.computed, victim.stale, victim.placeholders = 0, victim.flying, 0
                    victim.preemptions += 1
                    self.waiting.insert(0, victim)
                    self.sort()
                    if victim is request:
                        break
            else:
                step[request] = n
                budget -= n
                at += 1
        while not preempted and budget and len(self.running) < self.slots:
            request = next((request for request in self.waiting if not request.stale), None)
            if request is None:
                break
            hit = self.manager.lookup(request.name)
            self.calls.append(["L", request.name, len(hit) * self.manager.size, hit])
            held = len(hit) * self.manager.size
            n = min(self.known(request) - held, limit)
            if n > budget and not self.chunked:
                break
            n = min(n, budget)
            out = self.manager.allocate(
                request.name, 0, n, hit, whole=self.whole, others=bool(self.running), most=self.most
            )
            self.calls.append(["A", request.name, 0, n, held, out])
            if out is None:
                break
            self.waiting.remove(request)
            self.running.append(request)
            request.computed = held
            step[request] = n
            budget -= n
        return step

    def forget_uncomputed_blocks(self, request):
        pool, size = self.manager.pool, self.manager.size
        for at in range(request.computed // size, self.manager.named.get(request.name, 0)):
            block = self.manager.tables[request.name][at]
            if pool.refs[block] == 1 and pool.ids[block] is not None:
                pool.cached.remove(block)
                pool.ids[block] = None

    def finish_step(self, step):
        """Names of the requests that generated a token, and of those that ended."""
        emitted, ended = [], []
        for request, n in step.items():
            request.computed += n
            if request.computed == self.known(request):
                self.manager.tokens[request.name].append(token(3_000_000 + request.number, request.generated))
                request.generated += 1
                emitted.append(request.name)
                if request.generated == request.output or self.known(request) >= self.most:
                    self.running.remove(request)
                    self.end(request)
                    ended.append(request.name)
        return emitted, ended

    def take(self, step):
        """Let a step run; names of the requests that generate a token, and of those that have ended by then."""
        return self.finish_step(step)


def record_scheduler(seed, steps=250, blocks=16, size=4, build=Scheduler, **keys):
    """A recording of ``steps`` scheduler steps with random arrivals and a few cancellations."""
    rng = random.Random(seed)
    own = {key: keys.pop(key) for key in ("caching", "watermark", "window") if key in keys}
    keys = {"budget": 24, "slots": 5, "most": 10**6, **keys}
    scheduler = build(Manager(blocks, size, **own), **keys)
    header = {"type": "header", "kind": "scheduler", "vllm": "a model", "num_blocks": blocks, "block_size": size}
    header |= {"caching": own.get("caching", True), "watermark": own.get("watermark", 0.0)}
    header |= {"budget": keys["budget"], "max_seqs": keys["slots"], "max_model_len": keys["most"]}
    header |= {"chunked": scheduler.chunked, "long_thr": scheduler.threshold}
    header |= {"policy": "priority" if scheduler.priority else "fcfs"}
    header |= {"window": own["window"]} if "window" in own else {}
    header["effective"] = {"async_scheduling": False, "max_in_flight": keys["budget"], "reserve_full": scheduler.whole}
    records, number, room = [header], 0, (blocks - 1) * size
    for i in range(steps):
        record = {"op": "step", "i": i}
        if rng.random() < 0.4 and len(scheduler.waiting) < 4:
            record["add"] = []
            for _ in range(rng.randint(1, 2)):
                segments = prompts(rng, size)
                prompt = sum(n for _, _, n in segments)
                output = rng.randint(1, max(1, min(room - prompt, 25)))
                if prompt < min(keys["most"], room) and (scheduler.chunked or prompt <= keys["budget"]):
                    row = [f"r{number}", segments, output, rng.randrange(3), float(number + 1)]
                    scheduler.add(ModelRequest(*row), segments)
                    record["add"].append(row)
                    number += 1
        everyone = [*scheduler.running, *scheduler.waiting]
        if everyone and rng.random() < 0.02:
            gone = rng.choice(everyone)
            scheduler.abort(gone)
            record["abort"] = [gone.name]
        step = scheduler.schedule()
        record["nst"] = [[request.name, n] for request, n in step.items()]
        tables = [[request.name, list(scheduler.manager.tables[request.name])] for request in step]
        record["emit"], record["fin"] = scheduler.take(step)
        record["tables"] = [[name, table if rng.random() < 0.5 else crc(table)] for name, table in tables]
        record["run"] = [request.name for request in scheduler.running]
        record["wait"] = [request.name for request in scheduler.waiting]
        record["calls"], scheduler.calls = scheduler.calls, []
        records.append(record | scheduler.manager.pool.state())
    return [*records, {"type": "footer", "steps": steps}]
