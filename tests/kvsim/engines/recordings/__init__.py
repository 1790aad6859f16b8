"""Helpers for tests of recordings: writing them, and making damaged or altered copies."""

import json

import pytest

from kvsim.engines.recordings.conformance import ENGINES
from kvsim.errors import UserError


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def changed(records, number, change):
    """A copy in which one record (the header is number 0) is different."""
    copy = json.loads(json.dumps(records))
    change(copy[number])
    return copy


def without(records, *keys):
    """A copy in which no record has these keys, but for the header."""
    return records[:1] + [{k: v for k, v in record.items() if k not in keys} for record in records[1:]]


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def drop(records, number, key):
    return lines(changed(records, number, lambda record: record.pop(key)))


def put(records, number, **keys):
    return lines(changed(records, number, lambda record: record.update(keys)))


def where(records, holds):
    """The number of the first record of which this holds."""
    return next(number for number, record in enumerate(records) if "op" in record and holds(record))


def check_refused(folder, engine, content, answer):
    """Check that what is no recording of an engine is refused in one line: the file, then ``answer``."""
    path = folder / "odd.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as refused:
        ENGINES[engine](path)
    message = str(refused.value)
    assert message.startswith(f"{path}: {answer}")
    assert len(message.splitlines()) == message.count(str(path)) == 1
