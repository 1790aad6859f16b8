"""The content of requests, as prefix caches see it."""

from __future__ import annotations

from typing import Final

from policies import Content
from workloads import Request

PRIVATE: Final = 1 << 50
"""The first source number of prompts that share no text with others."""


def content_of(request: Request) -> Content:
    """The content of a request: its prompt, followed by its answer."""
    prompt = request.prompt_tokens
    if not request.content:
        return Content.of_two((PRIVATE + request.id, 0, prompt), request.answer)
    content = Content(request.content).head(prompt)
    content.extend(request.answer)
    return content
