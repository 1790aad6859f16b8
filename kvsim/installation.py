"""How this copy of kvsim was installed, and what to type to install more beside it."""

from __future__ import annotations

import platform
import sys
from importlib.util import find_spec
from pathlib import Path

from policies.compiled import STATE

NAME = "kvsim"
HOME = Path(__file__).resolve().parent
"""The folder of the package."""

# Every command imports this module but few use it, so that functions import what takes long to import.


def described() -> str:
    """The version of kvsim and of Python, where both are, and whether the core is compiled, in a line."""
    from kvsim import __version__

    python = f"Python {platform.python_version()} at {sys.executable}"
    return f"{NAME} {__version__} from {HOME.parent}, core {STATE}, {python}"


def install_extra(extra: str) -> str:
    """The command that installs an extra into this environment, from where kvsim itself came."""
    return pip_install(_target(extra))


def pip_install(arguments: str) -> str:
    """The command that has this environment's own pip install something; ``arguments`` are ready for a shell."""
    python = _python()
    if find_spec("pip") is None:  # uv makes environments without pip.
        return f"uv pip install --python {python} {arguments}"
    return f"{python} -m pip install {arguments}"


def quoted(text: str) -> str:
    """The text as one word of a shell: in double quotes where it needs any, which Windows understands too."""
    if text and all(letter.isalnum() or letter in "/\\._-:=+@" for letter in text):
        return text
    if any(letter in text for letter in '"$`!'):
        import shlex

        return shlex.quote(text)
    return f'"{text}"'


def _python() -> str:
    """The interpreter, as short as it can be typed here: by name if that finds it, else by its path."""
    import shutil

    path = Path(sys.executable)
    for name in ("python", "python3"):
        found = shutil.which(name)
        # Environments link to the same interpreter, so the folder tells them apart.
        if found is not None and Path(found).parent.resolve() == path.parent.resolve():
            return name
    return quoted(_from_here(path))


def _target(extra: str) -> str:
    """What pip must be given to install kvsim with an extra: a checkout, an address, or the name."""
    if (HOME.parent / "pyproject.toml").is_file():
        return f"-e {_quoted_extra(_from_here(HOME.parent), extra)}"
    address = _origin()
    folder = _local_path(address)
    if folder is not None:
        # A folder that is gone cannot be installed from again.
        return _quoted_extra(_from_here(folder) if folder.exists() else NAME, extra)
    return quoted(f"{NAME}[{extra}] @ {address}") if address else _quoted_extra(NAME, extra)


def _quoted_extra(what: str, extra: str) -> str:
    return quoted(f"{what}[{extra}]")  # Brackets need quotes: they are patterns in a shell.


def _origin() -> str:
    """The address that kvsim was installed from, as pip takes it; empty if it came from an index (PEP 610)."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        recorded = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        return ""
    if not recorded:
        return ""
    told = json.loads(recorded)
    vcs = told.get("vcs_info", {})
    if not vcs:
        return str(told["url"])
    revision = f"@{vcs['requested_revision']}" if "requested_revision" in vcs else ""
    return f"{vcs['vcs']}+{told['url']}{revision}"


def _local_path(address: str) -> Path | None:
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    parts = urlsplit(address)
    return Path(url2pathname(parts.path)) if parts.scheme == "file" else None


def _from_here(path: Path) -> str:
    """The path, relative to the current folder if it is in there."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
