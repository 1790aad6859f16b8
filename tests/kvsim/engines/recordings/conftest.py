"""Files of recordings for the tests in this folder."""

import json

import pytest


@pytest.fixture
def write(tmp_path):
    """Writes the lines of a recording, or bytes, into a file."""

    def save(content, name="server.jsonl"):
        path = tmp_path / name
        if not isinstance(content, bytes):
            content = "".join(json.dumps(line) + "\n" for line in content).encode()
        path.write_bytes(content)
        return path

    return save
