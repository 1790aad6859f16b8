"""Hashes of the blocks of a text, under a secret salt: equal beginnings have equal hashes, and nothing else is told.

Each hash is BLAKE2b, 8 bytes long and keyed with the salt, of the hash before it and of the block, so that it stands
for everything up to the end of its block. Two that differ may agree by chance, once in 2**64. BLAKE2b takes a key by
itself (RFC 7693, section 2.9), so that no other construction is needed.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from kvsim.errors import UserError

Unit = Literal["bytes", "tokens"]
"""What a text is made of: bytes of UTF-8, or token ids."""

BLOCK_BYTES = 64
"""Bytes in a block of text."""
BLOCK_TOKENS = 16
"""Token ids in a block of a prompt that was given as ids."""
SALT_BYTES = 32
"""As long as no search of all salts ever ends."""
_HASH_BYTES = 8
_ID_BYTES = 8


def new_salt() -> bytes:
    """A salt for one run."""
    return secrets.token_bytes(SALT_BYTES)


def salt_of(path: Path) -> bytes:
    """The salt that a file holds; where there is none, a new one is written, for its owner's eyes alone.

    Raises ``UserError`` if the file cannot be used.
    """
    try:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if os.name == "posix" and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UserError(f"--salt-file: {path}: others may read it; chmod 600 keeps it from them") from None
            salt = path.read_bytes()
        else:
            salt = new_salt()
            with open(file, "wb") as new:
                new.write(salt)
    except OSError as e:
        raise UserError(f"--salt-file: {path}: {e.strerror or e}") from None
    if len(salt) != SALT_BYTES:
        raise UserError(f"--salt-file: {path} has {len(salt)} bytes; a salt has {SALT_BYTES}. Name a file that is new")
    return salt


@dataclass
class BlockChain:
    """The hashes of a text that is added piece by piece. Only full blocks get one."""

    salt: bytes = field(repr=False)
    unit: Unit = "bytes"
    hashes: list[str] = field(default_factory=list)
    """16 hexadecimal digits for each full block."""
    _bytes: int = 0
    _rest: bytes = field(default=b"", repr=False)
    _last: bytes = field(default=b"", repr=False)

    @property
    def units(self) -> int:
        """Bytes or tokens added so far, those of a last block that is not full among them."""
        return self._bytes if self.unit == "bytes" else self._bytes // _ID_BYTES

    def add(self, text: bytes | bytearray) -> None:
        """Add bytes of text, or of ids as ``ids_as_bytes`` makes them."""
        size = BLOCK_BYTES if self.unit == "bytes" else BLOCK_TOKENS * _ID_BYTES
        self._bytes += len(text)
        data = self._rest + text
        whole = len(data) - len(data) % size
        last, salt, person = self._last, self.salt, self.unit.encode()
        for start in range(0, whole, size):
            block = last + data[start : start + size]
            last = blake2b(block, digest_size=_HASH_BYTES, key=salt, person=person).digest()
            self.hashes.append(last.hex())
        self._last, self._rest = last, bytes(data[whole:])


def ids_as_bytes(ids: Sequence[int]) -> bytes:
    """Token ids in a row, each in 8 bytes. Raises ``OverflowError`` where one is too large to be one."""
    return b"".join(token.to_bytes(_ID_BYTES, "little", signed=True) for token in ids)
