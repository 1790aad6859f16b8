"""From what was noted of a request to its line in the file: counts, hashes, times; and no text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvsim.engines.observing.answers import Answer
from kvsim.engines.observing.fingerprints import BlockChain, Unit, ids_as_bytes
from kvsim.engines.observing.prompts import Prompt, message_text
from kvsim.engines.observing.token_counts import COUNTED, Counted, Tokenizer, estimated
from kvsim.engines.observing.watch import Watch


@dataclass(frozen=True)
class Hashes:
    """The hashed blocks of a prompt and of the answer that goes on from it."""

    unit: Unit = "bytes"
    prompt_units: int = 0
    """Bytes or tokens that were hashed or are in a last block that is not full; 0 where the prompt is not known."""
    blocks: tuple[str, ...] = ()
    answer_units: int = 0
    answer_blocks: tuple[str, ...] = ()
    """Hashes of the blocks that become full by the answer, the rest of the prompt first."""


@dataclass(frozen=True)
class Counts:
    """Tokens of a request, and who counted them; of several ways, the least sure."""

    prompt_tokens: int
    output_tokens: int
    counted: Counted


def record_of(watch: Watch, began: float, hashes: Hashes, counts: Counts, prompt: Prompt | None) -> dict[str, Any]:
    """The line of a request. Times in it are seconds since ``began``.

    Only where they apply: ``cause`` of a failure, ``distorted`` by how many seconds the proxy was late while it ran,
    ``missed`` how many bytes of its texts were not looked at, so that counts and hashes may lack them.
    """
    answer = watch.reader.answer if watch.reader is not None else Answer()
    noted = watch.noted
    said = {
        "kind": "request",
        "id": watch.id,
        "arrival_s": round(noted.arrival - began, 6),
        "first_s": None if watch.first is None else round(watch.first - began, 6),
        "last_s": round(noted.last - began, 6),
        "status": noted.status,
        "end": noted.end,
        "path": noted.path,
        "stream": noted.stream or (prompt is not None and prompt.stream),
        **asdict(counts),
        "cached_tokens": answer.cached_tokens,
        "max_tokens": None if prompt is None else prompt.max_tokens,
        **asdict(hashes),
        "finish": answer.finish,
    }
    more = {"cause": noted.cause, "distorted": round(noted.lag, 4), "missed": noted.missed}
    return said | {key: value for key, value in more.items() if value}


def amendment_of(watch: Watch, counts: Counts) -> dict[str, Any]:
    """The line that gives a request of this run counts which were not known at its end."""
    return {"kind": "counts", "id": watch.id, **asdict(counts)}


def hash_texts(salt: bytes, prompt: Prompt, answer: Answer) -> Hashes:
    """Hash a prompt, and the answer to it as the client will send it back. Raises ``OverflowError`` for absurd ids."""
    chain = BlockChain(salt, "bytes" if prompt.ids is None else "tokens")
    chain.add(prompt.text if prompt.ids is None else ids_as_bytes(prompt.ids))
    n_blocks, units = len(chain.hashes), chain.units
    if prompt.continues and answer.whole:
        chain.add(_continuation(prompt, answer))
    blocks = tuple(chain.hashes)
    return Hashes(chain.unit, units, blocks[:n_blocks], chain.units - units, blocks[n_blocks:])


def _continuation(prompt: Prompt, answer: Answer) -> bytes | bytearray:
    """What the next prompt will have after this one, if it goes on from the answer."""
    if prompt.ids is not None:
        return ids_as_bytes(answer.ids) if answer.all_ids else b""
    if not prompt.chat:
        return answer.text
    calls = answer.tool_calls()
    return message_text(answer.role, answer.text, calls) if answer.text or calls else b""


def count_tokens(watch: Watch, prompt: Prompt | None, answer: Answer, tokenizer: Tokenizer | None) -> Counts:
    """Tokens of a prompt and its answer: the server's own count, else that of its tokenizer, else an estimate.

    ``tokenizer`` is None where the server is not to be asked.
    """
    output, by_output = _output_tokens(watch, prompt, answer, tokenizer)
    asked, by_prompt = _prompt_tokens(watch, prompt, answer, tokenizer)
    return Counts(asked, output, max(by_output, by_prompt, key=COUNTED.index))


def _prompt_tokens(
    watch: Watch, prompt: Prompt | None, answer: Answer, tokenizer: Tokenizer | None
) -> tuple[int, Counted]:
    if answer.prompt_tokens is not None:
        return answer.prompt_tokens, "server"
    if prompt is None:
        return estimated(watch.noted.body_bytes), "estimate"
    if prompt.ids is not None:
        return len(prompt.ids), "tokenizer"
    if tokenizer is not None:
        messages = prompt.messages if prompt.chat else None
        found = tokenizer.count(prompt.text, model=prompt.model, messages=messages)
        if found is not None:
            return found, "tokenizer"
    return estimated(len(prompt.text)), "estimate"


def _output_tokens(
    watch: Watch, prompt: Prompt | None, answer: Answer, tokenizer: Tokenizer | None
) -> tuple[int, Counted]:
    noted = watch.noted
    if answer.output_tokens is not None:
        return answer.output_tokens, "server"
    if noted.missed or not answer.bytes_of_text:
        unread = noted.missed or (watch.reader is not None and not answer.whole)
        if noted.end == "failed" or not unread:
            return 0, "server"
        return noted.events or estimated(noted.answer_bytes), "estimate"
    all_text = answer.whole and len(answer.text) == answer.bytes_of_text
    if tokenizer is not None and all_text:
        model = None if prompt is None else prompt.model
        found = tokenizer.count(answer.text, model=model, answer=True)
        if found is not None:
            return found, "tokenizer"
    return answer.text_events if noted.stream else estimated(answer.bytes_of_text), "estimate"
