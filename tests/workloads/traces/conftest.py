"""What the tests of each reader share."""

import pytest


@pytest.fixture
def read(request, write):
    """A function that writes a file and reads it, by the reader and the name in the module's ``READS``."""
    reader, usual = request.module.READS

    def write_and_read(content, name=usual, **options):
        return reader(write(content, name), **options)

    return write_and_read
