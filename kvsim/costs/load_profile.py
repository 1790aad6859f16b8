"""Profiles by name: those that ship, those in files, and estimates."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from kvsim.costs.estimate import adapted, estimated
from kvsim.costs.profile import FORMAT, Profile
from kvsim.costs.served import ADAPTED, ESTIMATE, Served
from kvsim.costs.shipped import is_shipped, shipped_names, shipped_text
from kvsim.errors import UserError, choices
from kvsim.results import MEGABYTE, text_of

_MOST_BYTES = 16 * MEGABYTE
"""Largest file that is read as a profile; those that ship have at most 70 kB."""


def load_profile(name: str, folder: Path = Path()) -> Profile:
    """A shipped profile by name, one from a file, an estimate or an adapted one by its name. Raises ``UserError``."""
    if name.startswith(ESTIMATE):
        return estimated(Served.named(name))
    if (named := ADAPTED.fullmatch(name)) is not None:
        return adapted(load_profile(named[1], folder), named[2], named[3])
    try:
        text = shipped_text(name) if is_shipped(name) else text_of(folder / Path(name).expanduser(), _MOST_BYTES)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError):
        raise UserError(f"{name}: no such file, and not a shipped profile; {choices(name, shipped_names())}") from None
    try:
        profile = Profile.model_validate_json(text)
    except ValidationError as e:
        if _of_device_before_tables(text):
            raise UserError(f"{name}: an earlier version made this profile of a device; make it again") from None
        first = e.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        if first["type"] != "value_error":
            said = f"{where or 'file'}: {said.lower()}"
        raise UserError(f"{name}: not a machine profile: {said}") from None
    if profile.format != FORMAT:
        raise UserError(f"{name}: profile format {profile.format}; this version reads format {FORMAT}")
    return profile


def _of_device_before_tables(text: str) -> bool:
    """Whether a file is the profile of a device as it was before devices had tables."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("device") is not None and "tables" not in found
