"""Short scenarios that together touch the rules of llama-server: what is sent, and what the log must show."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvsim.engines.recordings.llama_server_join import SentRequest

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
            SentRequest(first + i, prompt, n, answer=ANSWERS[(first + i) % len(ANSWERS)], params=params)
            for i, (prompt, n) in enumerate(asked)
        ]
        self.phases.append(phase)
        return [[*prompt, *[r.answer] * n] for r, (prompt, n) in zip(phase, asked, strict=True)]


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
)
