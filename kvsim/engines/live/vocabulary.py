"""Which token ids a server takes, and what its answers can be made of; or that it takes text only."""

from __future__ import annotations

import json
from pathlib import Path

from kvsim.engines.live.bounded import ServerFault
from kvsim.engines.live.client import Answer, Client, CompletionRequest
from kvsim.engines.live.prompts import WORDS, Vocabulary
from kvsim.engines.live.settings import ServerSettings

_FIRST, _END = 1000, 40000
"""Ids of ordinary words in most vocabularies: those below are bytes, signs and beginnings, those at the end special."""
_TRIED = (40000, 32000, 16000, 8000, 4000)
"""Ends of vocabularies that are tried where a server refuses what it does not have."""
_SAFE = range(300, 2000)
"""Ids that every model has."""
_ANSWERS = 16
_FEW, _MANY = 40, 80
"""Words in the two prompts whose tokens are counted."""


async def find_vocabulary(client: Client, settings: ServerSettings) -> Vocabulary:
    """Find out what to draw prompts from, by asking the server for a few short completions.

    No id is sent that may be outside of the vocabulary, unless the server has a tokenizer: vLLM without one
    (``--skip-tokenizer-init``) does not check ids, and would fail. Raises ``ServerFault`` if neither ids nor text are
    accepted.
    """
    if settings.api == "llama-server":
        return Vocabulary(_ordinary(settings.vocabulary), await _single_tokens(client))
    known = settings.vocabulary or _declared(settings.model_file)
    if known is not None:
        tried = [_ordinary(known)]
    elif await client.tokenize(WORDS[0]):
        tried = [range(_FIRST, end) for end in _TRIED]
    else:
        tried = []
    for ids in (*tried, _SAFE):
        answer = await client.ask(CompletionRequest((ids.stop - 1, ids.start, ids.start + 1, ids.start + 2), 1))
        if answer.error is None:
            return Vocabulary(ids)
        if answer.timed_out:
            raise ServerFault(f"{client.address}: {answer.error}")
    return await _words(client, str(answer.error))


def _ordinary(vocabulary: int | None) -> range:
    """Ids of ordinary words in a vocabulary of so many."""
    if vocabulary is None:
        return _SAFE
    return range(_FIRST, min(_END, vocabulary)) if vocabulary > 2 * _FIRST else range(vocabulary // 2, vocabulary)


def _declared(folder: str | None) -> int | None:
    """What a model's ``config.json`` says of its vocabulary, if it is on this machine."""
    if not folder:
        return None
    try:
        said = json.loads((Path(folder) / "config.json").read_text("utf-8"))
        size = said.get("vocab_size", said.get("text_config", {}).get("vocab_size"))
    except (OSError, ValueError, AttributeError):
        return None
    return size if type(size) is int and size > 0 else None


async def _single_tokens(client: Client) -> tuple[int, ...]:
    """Words of one token each, for answers; none if the server does not say how it divides words."""
    tried = WORDS[: 2 * _ANSWERS]
    at_once = await client.tokenize("".join(tried)) or []
    if len(at_once) == len(tried):  # Each is one, which saves asking for each.
        return tuple(dict.fromkeys(at_once))[:_ANSWERS]
    found: list[int] = []
    for word in tried:
        tokens = await client.tokenize(word) if at_once else None
        if tokens is None or len(found) == _ANSWERS:
            break
        if len(tokens) == 1 and tokens[0] not in found:
            found += tokens
    return tuple(found)


async def _words(client: Client, refusal: str) -> Vocabulary:
    """Words, and how many tokens the server counts for them. Raises ``ServerFault`` if it takes none."""
    few, many = [await _asked(client, n) for n in (_FEW, _MANY)]
    for answer in (few, many):
        if answer.error is not None:
            raise ServerFault(f"{client.address}: takes neither token ids ({refusal}) nor text ({answer.error})")
    if few.prompt_tokens is None or many.prompt_tokens is None or many.prompt_tokens <= few.prompt_tokens:
        return Vocabulary(None)
    each = (many.prompt_tokens - few.prompt_tokens) / (_MANY - _FEW)
    return Vocabulary(None, tokens_per_word=each, extra_tokens=round(few.prompt_tokens - _FEW * each))


async def _asked(client: Client, words: int) -> Answer:
    return await client.ask(CompletionRequest("".join(WORDS[:words]), 1))
