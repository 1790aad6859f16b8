"""Text to tokens and back, with the vocabulary of a GGUF file."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer
from tokenizers.pre_tokenizers import Sequence as PreTokenizerSequence

from kvsim.errors import UserError
from kvsim.model.gguf_file import GgufHeader

PRE_TOKENIZERS = ("gpt-2", "smollm")
"""Supported pre-tokenisers, by GGUF's names."""
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Token types."""
_START, _END = "<|im_start|>", "<|im_end|>"
"""Tokens around each message of a chat (ChatML)."""


class Message(NamedTuple):
    """One turn of a chat."""

    role: str
    """system, user or assistant."""
    text: str


class Tokenizer:
    """GPT-2's byte-level byte-pair encoding (Radford et al., 2019; Sennrich et al., arXiv 1508.07909)."""

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        types: Sequence[int],
        pre: str = "gpt-2",
        ends: Iterable[int] = (),
        begin: int | None = None,
        template: str = "",
    ):
        """``tokens``: the text of each id, in GPT-2's alphabet of bytes. ``merges``: two tokens separated by a space,
        in order of priority. ``types``: GGUF's type of each token. ``ends``: ids that end an answer. ``begin``: the id
        that every text begins with. ``template``: the chat template. Raises ``ValueError`` if they are inconsistent.
        """
        ids = {token: id for id, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            raise ValueError("a token occurs twice")
        if len(types) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens, {len(types)} types of them")
        pairs = [tuple(merge.split(" ")) for merge in merges]
        if any(len(pair) != 2 or not ids.keys() >= {*pair, "".join(pair)} for pair in pairs):
            raise ValueError("a merge does not join two tokens into a third")
        self.ends = frozenset(ends) | {ids[name] for name in (_END, "<|endoftext|>") if name in ids}
        """Ids that end an answer."""
        self._ids, self._begin, self._template = ids, begin, template
        self._encoder = Encoder(BPE(ids, pairs))  # type: ignore[arg-type]
        self._encoder.pre_tokenizer = _pre_tokenizer(pre)
        of_type = [(token, types[id]) for token, id in ids.items()]
        self._encoder.add_special_tokens([AddedToken(t, normalized=False) for t, kind in of_type if kind == _CONTROL])
        self._encoder.add_tokens([AddedToken(t, normalized=False) for t, kind in of_type if kind == _USER_DEFINED])
        # A user's text stays text, even where it looks like a control token.
        self._encoder.encode_special_tokens = True
        byte_of = {symbol: byte for byte, symbol in enumerate(_alphabet())}
        self._bytes = [
            bytes(byte_of[symbol] for symbol in token)
            if kind == _NORMAL and byte_of.keys() >= set(token)
            else b""
            if kind == _CONTROL
            else token.encode()
            for token, kind in of_type
        ]

    @property
    def chats(self) -> bool:
        """Whether the vocabulary can encode chat messages."""
        return _START in self._ids and _END in self._ids

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, including the one that every text begins with. Raises ``UserError``.

        Bytes that the vocabulary lacks are left out (SmolLM2 has no token for some control characters).
        """
        return ([] if self._begin is None else [self._begin]) + self._encode(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a chat up to where the assistant's answer begins. Raises ``UserError``.

        If the first message is not a system message, the default one of the file's template is put before it.
        """
        if not self.chats:
            raise UserError(f"the model has no chat format; its vocabulary would have {_START} and {_END}")
        if not messages or messages[0].role != "system":
            default = re.search(re.escape(_START) + r"system\n([^{}]*?)" + re.escape(_END), self._template)
            messages = [*([Message("system", default[1])] if default else []), *messages]
        tokens = [] if self._begin is None else [self._begin]
        for role, text in messages:
            tokens += [self._ids[_START], *self._encode(f"{role}\n{text}"), self._ids[_END], *self._encode("\n")]
        return [*tokens, self._ids[_START], *self._encode("assistant\n")]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of the tokens, without control tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._bytes[token] for token in tokens).decode(errors="replace")

    def streaming_decoder(self) -> StreamingDecoder:
        """A decoder for tokens that arrive one at a time."""
        return StreamingDecoder(self._bytes)

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise UserError(f"the text has an invalid character ({text[e.start]!r}); Unicode is expected") from None
        return list(self._encoder.encode(text, add_special_tokens=False).ids)


class StreamingDecoder:
    """Decodes tokens one at a time; a character is emitted when its last byte has arrived."""

    def __init__(self, of_token: Sequence[bytes]):
        self._bytes = of_token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, token: int) -> str:
        """Characters that the token completes, possibly none."""
        return self._decoder.decode(self._bytes[token])

    def flush(self) -> str:
        """U+FFFD for a character that was never completed, else an empty text."""
        return self._decoder.decode(b"", final=True)


def read_tokenizer(header: GgufHeader, vocabulary: int) -> Tokenizer | None:
    """The tokenizer of a GGUF file for a model with ``vocabulary`` tokens; None if its kind is not supported.

    Raises ``UserError`` if it is damaged.
    """
    fields = header.fields
    if fields.get("tokenizer.ggml.model") != "gpt2" or fields.get("tokenizer.ggml.pre") not in PRE_TOKENIZERS:
        return None

    def items(key: str, kind: type) -> list[Any]:
        found = fields.get(f"tokenizer.ggml.{key}")
        if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
            raise UserError(f"{header.path}: tokenizer.ggml.{key} is not a list of {kind.__name__}")
        return found

    def token(key: str) -> int | None:
        found = fields.get(f"tokenizer.ggml.{key}")
        if found is not None and not (isinstance(found, int) and 0 <= found < vocabulary):
            raise UserError(f"{header.path}: tokenizer.ggml.{key} is {found!r:.40}; a token is expected")
        return found

    tokens = items("tokens", str)
    if len(tokens) != vocabulary:
        raise UserError(f"{header.path}: {len(tokens)} tokens and {vocabulary} embeddings; equal numbers are expected")
    types = items("token_type", int) if "tokenizer.ggml.token_type" in fields else [_NORMAL] * vocabulary
    ends = {token("eos_token_id"), token("eot_token_id")} - {None}
    begin = token("bos_token_id") if fields.get("tokenizer.ggml.add_bos_token") is True else None
    template = str(fields.get("tokenizer.chat_template", ""))
    pre = str(fields["tokenizer.ggml.pre"])
    try:
        return Tokenizer(tokens, items("merges", str), types, pre, ends, begin, template)  # type: ignore[arg-type]
    except UserError:
        raise
    except ValueError as e:
        raise UserError(f"{header.path}: damaged vocabulary: {e}") from None


def _pre_tokenizer(pre: str) -> PreTokenizer:
    """Splits a text into words; bytes are merged only within a word."""
    words = ByteLevel(add_prefix_space=False)
    return PreTokenizerSequence([Digits(individual_digits=True), words]) if pre == "smollm" else words


def _alphabet() -> list[str]:
    """GPT-2's character for each byte: itself if printable, else one from code point 256 on."""
    prints = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]
