"""Files as ``kvsim observe`` writes them, made from texts that are known: a model of the proxy without a network.

A word is four letters and a token. ``talks`` draws conversations over a few system prompts.
"""

import hashlib
import json
import random
from dataclasses import dataclass, replace

BLOCK_BYTES, BLOCK_TOKENS = 64, 16
STARTED = "2026-11-23T05:49:13.123Z"


@dataclass(frozen=True)
class Call:
    """A request, what it said and what it was answered, in words."""

    arrival_s: float
    last_s: float
    prompt: tuple[str, ...]
    answer: tuple[str, ...]

    @property
    def whole(self):
        return self.prompt + self.answer


def header(started=STARTED, **others):
    keys = {"kind": "observed", "version": 1, "started": started, "api": "llama-server", "model": "smollm2"}
    return line({**keys, "block_bytes": BLOCK_BYTES, "block_tokens": BLOCK_TOKENS, "kvsim": "0.1.0", **others})


def request(call, n=0, unit="bytes", salt=b"salt", **others):
    """The line of a call; ``others`` replace its keys."""
    said, all_said = hashes(call.prompt, unit, salt), hashes(call.whole, unit, salt)
    width = 1 if unit == "tokens" else 4
    keys = {
        **{"kind": "request", "id": n, "arrival_s": call.arrival_s, "first_s": None, "last_s": call.last_s},
        **{"status": 200, "end": "completed", "path": "/v1/chat/completions", "stream": True},
        **{"prompt_tokens": len(call.prompt), "output_tokens": len(call.answer), "counted": "server"},
        **{"cached_tokens": None, "max_tokens": None, "unit": unit, "prompt_units": width * len(call.prompt)},
        **{"blocks": said, "answer_units": width * len(call.answer), "answer_blocks": all_said[len(said) :]},
        "finish": "stop",
    }
    assert set(others) <= {*keys, "cause", "distorted", "missed"}
    return line({**keys, **others})


def counts(n, prompt_tokens, output_tokens, counted="tokenizer"):
    """The line that gives a request other counts."""
    keys = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "counted": counted}
    return line({"kind": "counts", "id": n, **keys})


def hashes(words, unit="bytes", salt=b"salt"):
    """The chained hashes of the full blocks of a text."""
    units = list(words) if unit == "tokens" else "".join(words)
    size, digest, found = (BLOCK_TOKENS if unit == "tokens" else BLOCK_BYTES), salt, []
    for end in range(size, len(units) + 1, size):
        digest = hashlib.blake2b(digest + "".join(units[end - size : end]).encode(), digest_size=8).digest()
        found.append(digest.hex())
    return found


def line(row):
    return json.dumps(row, separators=(",", ":"))


def file_of(calls, unit="bytes"):
    """A file of these calls in the order in which they ended."""
    ended = sorted(calls, key=lambda call: call.last_s)
    rows = [header(), *(request(call, n, unit) for n, call in enumerate(ended))]
    return "".join(row + "\n" for row in rows).encode()


def words(rng, n):
    return tuple("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(n))


def talks(seed, sessions=6, turns=5):
    """Calls of conversations that begin alike, overlap in time, and now and then ask for another answer."""
    rng, calls = random.Random(seed), []
    systems = [words(rng, rng.randint(1, 90)) for _ in range(2)]
    for _ in range(sessions):
        now, said = round(rng.uniform(0, 60), 3), rng.choice(systems)
        for _ in range(rng.randint(1, turns)):
            said += words(rng, rng.randint(1, 60))
            for _ in range(rng.choice((1, 1, 1, 2))):
                call = Call(now, round(now + rng.uniform(0.1, 9), 3), said, words(rng, rng.randint(1, 80)))
                calls.append(call)
                now = round(call.last_s + rng.uniform(0.5, 20), 3)
            said = call.whole
    return sorted(calls, key=lambda call: call.arrival_s)


def later(call, seconds):
    return replace(call, arrival_s=call.arrival_s + seconds, last_s=call.last_s + seconds)
