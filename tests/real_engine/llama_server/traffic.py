"""Short scenarios that together touch the rules of llama-server: what is sent, and what the log must show."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvsim.engines.recordings.llama_server_join import SentRequest

BYTES = range(3, 259)
"""Ids of single bytes in the tiny models."""
_USER = 1
"""The token of the tiny models before a user's message, ``<|im_start|>``."""
ANSWERS = (253, 281, 260, 284, 288, 282, 327, 335, 411, 351, 347, 418, 359, 325, 384, 441)
"""Tokens that answers are made of, each of one: those of ordinary short words of SmolLM2."""
_FIRST_WORD, _LAST_WORD = 1000, 40000
"""Ids of ordinary words of SmolLM2."""


def text(name: str, n: int) -> list[int]:
    """The first n tokens of a random text; texts of different names share nothing."""
    draw = random.Random(name)
    return [draw.randrange(_FIRST_WORD, _LAST_WORD) for _ in range(n)]


@dataclass
class Scenario:
    """A server's flags and the requests it gets, phase by phase: all of a phase at once."""

    name: str
    flags: list[str]
    shows: set[str]
    """Kinds of events that must occur."""
    phases: list[list[SentRequest]] = field(default_factory=list)
    model: str = "smollm2"
    """``smollm2``, or a tiny one: ``hybrid``, ``recurrent`` or ``windowed``."""

    @property
    def requests(self) -> list[SentRequest]:
        """All requests, by id."""
        return [request for phase in self.phases for request in phase]

    def ask(self, prompt: list[int] | str, n_predict: int = 3, **params: object) -> list[int]:
        """Add a phase of one request; its prompt and its answer, for prompts that go on from it."""
        return self.burst((prompt, n_predict), **params)[0]

    def burst(self, *asked: tuple[list[int] | str, int], **params: object) -> list[list[int]]:
        """Add a phase of several requests (prompt, tokens of the answer)."""
        first = len(self.requests)
        phase = [
            SentRequest(first + i, prompt, n, answer=self._answer(first + i), params=params)
            for i, (prompt, n) in enumerate(asked)
        ]
        self.phases.append(phase)
        return [[*prompt, *[r.answer] * n] for r, (prompt, n) in zip(phase, asked, strict=True)]

    def _answer(self, number: int) -> int:
        return ANSWERS[number % len(ANSWERS)] if self.model == "smollm2" else BYTES[number % len(BYTES)]


def _chats(scenario: Scenario, system: int, turns: int = 3) -> Scenario:
    """Three users who take turns one after the other; their prompts begin with the same system prompt."""
    told = {user: text("system", system) for user in range(3)}
    for turn in range(turns):
        for user in random.Random(f"turn {turn}").sample(range(3), 3):
            new = text(f"user {user}, turn {turn}", 36 if turn == 0 else 12 + user)
            told[user] = scenario.ask(told[user] + new, 4 + user)
    return scenario


def chats() -> Scenario:
    """One slot draws all users; each finds its history in the host cache."""
    shows = {"by_lru", "by_similarity", "save", "look", "candidate", "found", "host_entry"}
    return _chats(Scenario("chats", ["-np", "4", "-c", "2048"], shows), 24)


def chats_without_host_cache() -> Scenario:
    """The same, and only the system prompt is found."""
    return _chats(Scenario("chats_cram0", ["-np", "4", "-c", "2048", "--cache-ram", "0"], {"by_similarity"}), 24)


def chats_with_automatic_slots() -> Scenario:
    """Slots left to the server: four, which share the cache and are emptied when idle."""
    return _chats(Scenario("chats_auto", ["-c", "1024"], {"clear", "save", "found"}), 16, turns=2)


def chats_by_age() -> Scenario:
    """Similarity switched off, idle slots not saved."""
    flags = ["-np", "2", "-c", "1024", "-sps", "0", "--no-cache-idle-slots"]
    return _chats(Scenario("chats_sps0", flags, {"by_lru", "save", "found"}), 24)


def small_host_cache() -> Scenario:
    """4 MiB of host memory, enough for 180 tokens; a longer prompt is not saved at all."""
    scenario = Scenario("small_host_cache", ["-np", "2", "-c", "1024", "--cache-ram", "4"], {"make_room", "too_large"})
    first = scenario.ask(text("a", 70))
    for name in "bc":
        scenario.ask(text(name, 75))
    scenario.ask(first + text("more", 12))
    scenario.ask(text("long", 190))
    scenario.ask(text("d", 40))
    scenario.ask(text("e", 50))
    return scenario


def burst() -> Scenario:
    """More requests than slots, prompts longer than a batch; the context is no multiple of 256."""
    flags = ["-np", "3", "-c", "1000", "-b", "64", "-ub", "32", "--cache-ram", "0"]
    scenario = Scenario("burst", flags, {"defer", "pop"})
    said = scenario.burst(*((text(f"text {i}", 24 + 13 * i), 3 + i % 4) for i in range(8)))
    scenario.burst(*((said[i] + text(f"more {i}", 9 + i), 3) for i in range(0, 8, 2)))
    return scenario


def overflow() -> Scenario:
    """A small shared pool, no host cache: batches are halved until all requests fail; then idle slots are purged."""
    flags = ["-np", "4", "-c", "256", "--kv-unified", "--cache-ram", "0"]
    scenario = Scenario("overflow", flags, {"no_room", "failed", "error", "purge"})
    scenario.burst(*((text(f"text {i}", 70 + 5 * i), 8) for i in range(4)))
    for i in range(4):
        scenario.ask(text(f"alone {i}", 84 + i))
    return scenario


def pool() -> Scenario:
    """A shared pool with host cache: idle slots are saved and emptied."""
    scenario = Scenario("pool", ["-np", "3", "-c", "512", "--kv-unified"], {"save", "clear", "found", "by_lru"})
    said = [scenario.ask(text(f"text {i}", 60 + 9 * i)) for i in range(3)]
    scenario.ask(said[0] + text("more 0", 11))
    scenario.burst((said[1] + text("more 1", 12), 5), (said[2] + text("more 2", 13), 4), (text("new", 41), 6))
    return scenario


def full_slots() -> Scenario:
    """Prompts that are empty, about as long as a slot, or longer; answers of no tokens, and cut by a full slot."""
    flags = ["-np", "2", "-c", "512", "--cache-ram", "0"]
    scenario = Scenario("full_slots", flags, {"empty", "error", "full", "one_at_least"})
    scenario.ask([])
    said = scenario.ask(text("a", 30))
    scenario.ask("")
    scenario.ask(text("a", 30))
    scenario.ask(text("a", 25))
    scenario.ask(said + text("b", 4), cache_prompt=False)
    scenario.ask(said + text("b", 4))
    scenario.ask(text("c", 9), 0)
    scenario.ask(text("d", 10), 1)
    for n in (256, 300, 255):
        scenario.ask(text("long", n), 4)
    scenario.ask(text("long", 247), 30)
    return scenario


def refusals() -> Scenario:
    """Empty texts and prompts that are too long among others: rounds of the server's loop with nothing to compute."""
    scenario = Scenario("refusals", ["-np", "3", "-c", "700", "--cache-ram", "0"], {"empty", "error"})
    for i in range(4):
        asked = [
            ("", 3),
            (text("long", 790), 3),
            (text("a", 12), 2),
            ("", 2),
            (text("long", 800), 3),
            (text("b", 9), 1),
        ]
        scenario.burst(*random.Random(i).sample(asked, len(asked)))
    return scenario


def context_shift() -> Scenario:
    """Slots that run full and go on, each with another ``n_keep`` and ``n_discard``; two at once at the end."""
    flags = ["-np", "2", "-c", "512", "--context-shift", "--cache-ram", "0"]
    scenario = Scenario("context_shift", flags, {"shift"})
    scenario.ask(text("a", 250), 14)
    scenario.ask(text("a", 246), 16, n_keep=20)
    scenario.ask(text("a", 244), 60, n_keep=5, n_discard=20)
    scenario.ask(text("a", 251), 12, n_keep=-1)
    scenario.burst((text("a", 240), 24), (text("a", 100), 20))
    return scenario


def reuse() -> Scenario:
    """Paragraphs in changing order, shifted into place where they are long enough."""
    flags = ["-np", "2", "-c", "1024", "--cache-reuse", "16", "--cache-ram", "0"]
    scenario = Scenario("reuse", flags, {"reuse"})
    paragraphs = [text(f"paragraph {i}", n) for i, n in enumerate((30, 22, 18, 12, 40))]
    for i, order in enumerate([(0, 1, 2, 3, 4), (0, 2, 4), (0, 4, 1), (0, 3, 1, 2), (0, 2, 3, 4)]):
        prompt = [token for k in order for token in paragraphs[k]]
        scenario.ask(prompt + text(f"question {i}", 5 + i))
    return scenario


def message(name: str, n: int) -> list[int]:
    """A user's message of n tokens, of the tiny models."""
    draw = random.Random(name)
    return [_USER, *(draw.choice(BYTES) for _ in range(n - 1))]


DELIMITERS = [{"role": "user", "delimiter": "<|im_start|>", "tokens": [_USER]}]
"""What a chat template says of where a user's messages begin; the tokens are for us, the server finds them itself."""


def _edited(scenario: Scenario, *, told: bool, sizes: tuple[int, ...] = (40, 55, 30, 70)) -> Scenario:
    """Chats in which answers are generated again, the last message is edited, and branches go on from earlier turns."""
    params = {"message_delimiters": DELIMITERS} if told else {}
    history, turns = message("system", 24), []
    for turn, n in enumerate(sizes):
        turns.append(history + message(f"turn {turn}", n))
        history = scenario.ask(turns[-1], 4 + turn, **params)
        scenario.ask(turns[-1], 5, **params)
    scenario.ask(turns[1] + message("another", 33), 4, **params)
    scenario.ask(turns[-1][:-20] + message("edited", 25), 4, **params)
    scenario.ask(history + message("on", 12), 4, **params)
    scenario.ask(turns[0], 3, **params)
    scenario.ask(history[: len(turns[2]) + 3], 3, **params)
    scenario.ask(message("unrelated", 90), 3, **params)
    scenario.ask(history + message("back", 21), 3, **params)
    scenario.ask(turns[0] + message("cut", 200), 3, **params)
    scenario.ask(turns[0] + message("cut", 120), 3, cache_prompt=False, **params)
    return scenario


_FOUND = {"checkpoint", "restored_checkpoint", "invalid_checkpoint", "look_at_checkpoint"}


def hybrid_chats() -> Scenario:
    """A hybrid model with checkpoints as by default, told of messages."""
    flags = ["-np", "2", "-c", "2048", "-ub", "32"]
    shows = {*_FOUND, "same_checkpoint", "host_entry"}
    return _edited(Scenario("hybrid_chats", flags, shows, model="hybrid"), told=True)


def hybrid_completions() -> Scenario:
    """The same, not told of messages, without host cache."""
    flags = ["-np", "2", "-c", "2048", "-ub", "32", "--cache-ram", "0"]
    return _edited(Scenario("hybrid_completions", flags, _FOUND, model="hybrid"), told=False)


def hybrid_few_checkpoints() -> Scenario:
    """Three checkpoints in each slot, at least 20 tokens apart."""
    flags = ["-np", "1", "-c", "2048", "-ub", "16", "-b", "64", "--ctx-checkpoints", "3", "--checkpoint-min-step", "20"]
    shows = {*_FOUND, "no_checkpoint", "old_checkpoint", "close_checkpoint"}
    return _edited(Scenario("hybrid_few", flags, shows, model="hybrid"), told=True, sizes=(40, 75, 90, 130, 60))


def hybrid_without_checkpoints() -> Scenario:
    """No checkpoints: whatever does not go on from the very end is computed again."""
    flags = ["-np", "2", "-c", "2048", "--ctx-checkpoints", "0"]
    return _edited(Scenario("hybrid_none", flags, {"no_checkpoint"}, model="hybrid"), told=True)


def hybrid_burst() -> Scenario:
    """Several prompts in one batch, each of which ends early for a checkpoint; a small shared cache."""
    flags = ["-np", "3", "-c", "512", "--kv-unified", "-b", "64", "-ub", "32", "--checkpoint-min-step", "30"]
    scenario = Scenario("hybrid_burst", flags, {"checkpoint", "restored_checkpoint", "defer"}, model="hybrid")
    told = {"message_delimiters": DELIMITERS}
    asked = [message(f"text {i}", 24 + 13 * i) for i in range(6)]
    said = scenario.burst(*((prompt, 3 + i % 4) for i, prompt in enumerate(asked)), **told)
    scenario.burst(*((said[i] + message(f"more {i}", 9 + i), 3) for i in range(0, 6, 2)), **told)
    scenario.burst(*((asked[i][:-2] + message(f"other {i}", 11 + i), 3) for i in range(6)), **told)
    return scenario


def recurrent_chats() -> Scenario:
    """A model without any attention."""
    flags = ["-np", "2", "-c", "2048", "-ub", "32", "--checkpoint-min-step", "50"]
    return _edited(Scenario("recurrent_chats", flags, _FOUND, model="recurrent"), told=True)


def windowed_chats() -> Scenario:
    """A model with a sliding window in half of its layers."""
    flags = ["-np", "2", "-c", "2048", "-ub", "32"]
    return _edited(Scenario("windowed_chats", flags, {*_FOUND, "host_entry"}, model="windowed"), told=True)


def windowed_few_checkpoints() -> Scenario:
    """The same in one cache for all slots, with few checkpoints."""
    flags = [
        "-np",
        "2",
        "-c",
        "2048",
        "-ub",
        "32",
        "--kv-unified",
        "--ctx-checkpoints",
        "3",
        "--checkpoint-min-step",
        "9",
    ]
    scenario = Scenario("windowed_few", flags, {*_FOUND, "no_checkpoint", "old_checkpoint"}, model="windowed")
    return _edited(scenario, told=False, sizes=(60, 120, 90, 200))


def hybrid_shift_and_reuse() -> Scenario:
    """A hybrid whose slots run full and go on, and whose prompts have their paragraphs in changing order."""
    flags = [
        "-np",
        "1",
        "-c",
        "256",
        "--context-shift",
        "--cache-reuse",
        "8",
        "-ub",
        "16",
        "--checkpoint-min-step",
        "20",
    ]
    scenario = Scenario("hybrid_shift", flags, {"shift", "reuse", "checkpoint"}, model="hybrid")
    paragraphs = [message(f"paragraph {i}", n) for i, n in enumerate((30, 22, 18, 12, 40))]
    for i, order in enumerate([(0, 1, 2, 3, 4), (0, 2, 4), (0, 4, 1), (0, 3, 1, 2), (0, 2, 3, 4)]):
        prompt = [token for k in order for token in paragraphs[k]]
        scenario.ask(prompt + message(f"question {i}", 5 + i))
    said = scenario.ask(message("long", 240), 30)
    scenario.ask(said[:200] + message("more", 30), 40, n_keep=10)
    scenario.ask(message("long", 240), 6)
    return scenario


def drawn(model: str, seed: int) -> Scenario:
    """Chats that go on, branch, are edited or asked again, several at a time, under flags that are drawn too."""
    draw = random.Random(f"{model} {seed}")
    slots, told = draw.randint(1, 4), draw.random() < 0.7
    flags = ["-np", str(slots), "-c", str(draw.choice([1024, 2048])), "-ub", str(draw.choice([8, 32, 128]))]
    flags += ["-b", str(draw.choice([64, 256])), "--ctx-checkpoints", str(draw.choice([1, 2, 4, 32]))]
    flags += ["--checkpoint-min-step", str(draw.choice([0, 10, 60, 8192])), *draw.choice([[], ["--kv-unified"]])]
    flags += draw.choice([[], ["--cache-ram", "0"], ["--no-cache-idle-slots"], ["-sps", "0.5"]])
    scenario = Scenario(f"drawn_{model}_{seed}", flags, {"checkpoint"}, model=model)
    params = {"message_delimiters": DELIMITERS} if told else {}
    chats = [message("system", 20)]
    for phase in range(10):
        asked = []
        for part in range(draw.randint(1, min(slots, 3))):
            chat = draw.choice(chats[-8:])
            chat = chat[: draw.randint(1, len(chat))] if draw.random() < 0.4 else chat
            new = message(f"{model} {seed} {phase} {part}", draw.randint(2, 60))
            asked.append(((chat if draw.random() < 0.9 else []) + (new if draw.random() < 0.85 else []) or new)[:230])
        if draw.random() < 0.1:
            params = {**params, "cache_prompt": draw.random() < 0.5}
        chats += scenario.burst(*((prompt, draw.randint(1, 9)) for prompt in asked), **params)
    return scenario


def drawn_hybrid() -> Scenario:
    """Chats of a hybrid model that are drawn."""
    return drawn("hybrid", 1)


def drawn_recurrent() -> Scenario:
    """Chats of a recurrent model that are drawn."""
    return drawn("recurrent", 2)


def drawn_windowed() -> Scenario:
    """Chats of a model with windows that are drawn."""
    return drawn("windowed", 3)


SCENARIOS: tuple[Callable[[], Scenario], ...] = (
    chats,
    chats_without_host_cache,
    chats_with_automatic_slots,
    chats_by_age,
    small_host_cache,
    burst,
    overflow,
    pool,
    full_slots,
    refusals,
    context_shift,
    reuse,
    hybrid_chats,
    hybrid_completions,
    hybrid_few_checkpoints,
    hybrid_without_checkpoints,
    hybrid_burst,
    hybrid_shift_and_reuse,
    recurrent_chats,
    windowed_chats,
    windowed_few_checkpoints,
    drawn_hybrid,
    drawn_recurrent,
    drawn_windowed,
)
