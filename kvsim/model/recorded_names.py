"""Which of our models a recording means, whose model is named as on Hugging Face."""

from __future__ import annotations

import re

from kvsim.errors import UserError, no_such
from kvsim.model.config_shapes import shipped_configs
from kvsim.model.engine_shapes import is_engine_model

_TRAINING = re.compile(r"-(hf|base|instruct|chat|it|\d{4})(?=-|$)")
"""Parts of a name that say how a model was trained further or packed, which changes nothing of its shape."""
_SERVED = {
    r"fp8(?:-dynamic|-block|-kv)?": "fp8",
    r"(?:nv)?fp4": "nvfp4",
    r"(?:quantized\.)?w8a\d+|(?:gptq-)?int8|gptq-8bit": "int8",
    r"(?:quantized\.)?w4a16|(?:awq|gptq)(?:-int4|-4bit)?|int4": "int4",
}
"""Types of weights by how the names of repositories for engines on GPUs end."""
_QUANTIZATION = re.compile(
    rf"[.-]((?:ud-)?i?q\d\w*|b?f16|f32|mxfp4|{'|'.join(_SERVED)})$",
    re.IGNORECASE,
)
"""The end of the name of a GGUF file, or of a repository, that says how the weights are stored."""
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def recorded_model(title: str) -> str:
    """The name here of the model that a recording names, such as "meta-llama/Llama-3.1-8B". Raises ``UserError``.

    Names are compared in lower case and without the publisher, then without what says how the model was trained
    further (``-Instruct``, ``-hf``), which changes nothing of its shape.
    """
    names = list(shipped_configs())
    wanted = title.rstrip("/").rsplit("/", 1)[-1].lower()
    if is_engine_model(title) or wanted in names:
        return title if is_engine_model(title) else wanted
    by_repository = _repositories()
    if title.lower() in by_repository:
        return by_repository[title.lower()]
    plain = {_plain(name): name for name in names}
    plain |= {_plain(repository.rsplit("/", 1)[-1]): name for repository, name in by_repository.items()}
    if _plain(wanted) not in plain or _QUANTIZATION.search(wanted):
        raise UserError(no_such("model", title, names))
    return plain[_plain(wanted)]


def _repositories() -> dict[str, str]:
    """The names here by the repositories that they are from."""
    return {_repository(fields["source"]): name for name, fields in shipped_configs().items()}


def _repository(source: str) -> str:
    """The repository of a source such as "https://huggingface.co/OWNER/NAME/blob/main/config.json"."""
    found = re.search(r"huggingface\.co/([^/]+/[^/]+)", source)
    return found[1].lower() if found else ""


def _plain(name: str) -> str:
    return _TRAINING.sub("", name.lower().removeprefix("meta-"))


def model_of_file(file: str) -> str | None:
    """The name here of a model file's model; None if it is not known."""
    try:
        return recorded_model(_QUANTIZATION.sub("", _SHARD.sub("", file.removesuffix(".gguf"))))
    except UserError:
        return None


def _kind(said: str) -> str:
    """The type of weights that the end of a name means."""
    kinds = (kind for ends, kind in _SERVED.items() if re.fullmatch(ends, said, re.IGNORECASE))
    return next(kinds, said.lower().removeprefix("ud-"))


def model_and_weights(title: str) -> tuple[str | None, str | None]:
    """The name here of a model, and the type of its weights, as far as a title says them.

    A title is a file's name, a repository with or without a type (``owner/name-GGUF:Q4_K_M``) or a tag of Ollama
    (``llama3.1:8b``). Files that are there are left to ``memory_shape``.
    """
    path, _, tag = title.partition(":")
    for repository, known in _repositories().items():
        # A folder's name is not said to be another publisher's.
        owner, _, own = path.lower().rstrip("/").rpartition("/")
        if own.removeprefix("meta-") == repository.rsplit("/", 1)[-1] and (
            owner.startswith(("/", ".", "~")) or owner in ("", repository.rsplit("/", 1)[0])
        ):
            return known, None
    name = re.sub(r"-gguf$", "", path.rstrip("/").rsplit("/", 1)[-1], flags=re.IGNORECASE)
    stem = _SHARD.sub("", name.removesuffix(".gguf"))
    found = _QUANTIZATION.search(stem) or _QUANTIZATION.search(f"-{tag}")
    kind = _kind(found[1]) if found else None
    model = model_of_file(name)
    if model is None and tag:
        size = _QUANTIZATION.sub("", f"-{tag}").removeprefix("-")
        tags = {re.sub(r"\W", "", known): known for known in shipped_configs()}
        model = tags.get(re.sub(r"\W", "", _plain(f"{stem}-{size}")))
    return model, kind or ("q4_k_m" if tag or path != title or re.search("gguf", title, re.IGNORECASE) else None)
