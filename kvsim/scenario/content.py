"""What a request says, as far as a cache must know."""

from __future__ import annotations

from policies import Content
from workloads import Request

_PRIVATE = 1 << 50
"""Sources from here on are prompts that nobody else has."""


def content_of(request: Request) -> Content:
    """A request's prompt and, behind it, its answer."""
    prompt = request.prompt_tokens
    if not request.content:
        return Content.of_two((_PRIVATE + request.id, 0, prompt), request.answer)
    content = Content(request.content).head(prompt)
    content.extend(request.answer)
    return content
