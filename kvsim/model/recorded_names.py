"""Which of our models a recording means, whose model is named as on Hugging Face."""

from __future__ import annotations

import re

from kvsim.errors import UserError, no_such
from kvsim.model.engine_shapes import is_engine_model
from kvsim.model.memory_shapes import memory_shape, model_names

_TRAINING = re.compile(r"-(hf|base|instruct|chat|it|\d{4})(?=-|$)")
"""Parts of a name that say how a model was trained further or packed, which changes nothing of its shape."""


def recorded_model(title: str) -> str:
    """The name here of the model that a recording names, such as "meta-llama/Llama-3.1-8B". Raises ``UserError``.

    Names are compared in lower case and without the publisher, then without what says how the model was trained
    further (``-Instruct``, ``-hf``), which changes nothing of its shape.
    """
    names = model_names()
    wanted = title.rstrip("/").rsplit("/", 1)[-1].lower()
    if is_engine_model(title) or wanted in names:
        return title if is_engine_model(title) else wanted
    by_repository = {_repository(memory_shape(name).source): name for name in names}
    if title.lower() in by_repository:
        return by_repository[title.lower()]
    plain = {_plain(name): name for name in names}
    plain |= {_plain(repository.rsplit("/", 1)[-1]): name for repository, name in by_repository.items()}
    if _plain(wanted) not in plain:
        raise UserError(no_such("model", title, names))
    return plain[_plain(wanted)]


def _repository(source: str) -> str:
    """The repository of a source such as "https://huggingface.co/OWNER/NAME/blob/main/config.json"."""
    found = re.search(r"huggingface\.co/([^/]+/[^/]+)", source)
    return found[1].lower() if found else ""


def _plain(name: str) -> str:
    return _TRAINING.sub("", name.lower().removeprefix("meta-"))
