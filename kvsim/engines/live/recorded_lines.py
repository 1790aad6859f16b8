"""The lines of recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvsim.engines.live.prompts import Piece
from kvsim.engines.live.recording_journal import kept_result
from kvsim.engines.live.traffic import Exchange
from kvsim.engines.recordings.llama_server_join import SentRequest, recording, recording_without_log
from kvsim.engines.recordings.llama_server_log import ServerLog
from workloads.request import SOURCES

Record = dict[str, Any]
_MS = 1e3


def llama_server_records(
    exchanges: Sequence[Exchange], meta: Mapping[str, Any], log: ServerLog | None = None
) -> list[Record]:
    """A recording of llama-server; with its log, also every step and decision. Raises ``UserError``."""
    sent = [_sent(exchange) for exchange in exchanges]
    return recording_without_log(sent, meta) if log is None else recording(log, sent, meta)


def openai_records(exchanges: Sequence[Exchange], meta: Mapping[str, Any]) -> list[Record]:
    """A recording of a server that speaks OpenAI's protocol."""
    wall_s = max((exchange.answer.done_s for exchange in exchanges), default=0.0)
    answers = [exchange.answer for exchange in exchanges if exchange.answer.error is None]
    output = sum(answer.output_tokens for answer in answers)
    summary: Record = {"n_requests": len(exchanges), "wall_s": round(wall_s, 3)}
    if wall_s > 0:
        summary |= {
            "requests_per_s": round(len(answers) / wall_s, 4),
            "output_tokens_per_s": round(output / wall_s, 2),
        }
    summary["output_tokens"] = output
    return recording_without_log(map(_sent_by_pieces, exchanges), {**meta, **summary, **latencies(exchanges)})


def latencies(exchanges: Sequence[Exchange]) -> Record:
    """TTFT and TPOT in milliseconds, of answers in full; without those that no answer has."""
    answers = [exchange.answer for exchange in exchanges if exchange.answer.error is None]
    measured = {"ttft_ms": [a.ttft_s for a in answers], "tpot_ms": [a.tpot_s for a in answers]}
    found: Record = {}
    for name, seconds in measured.items():
        ms = [s * _MS for s in seconds if s is not None]
        if ms:
            statistics = {"p50": np.percentile(ms, 50), "p90": np.percentile(ms, 90), "mean": np.mean(ms)}
            found[name] = {statistic: round(float(value), 2) for statistic, value in statistics.items()}
    return found


def _sent(exchange: Exchange) -> SentRequest:
    request, prompt, answer = exchange.request, exchange.prompt, exchange.answer
    params = {k: v for k, v in prompt.completion_request(request).params.items() if k != "mirostat_tau"}
    return SentRequest(
        id=request.id,
        prompt=prompt.said,
        n_predict=request.output_tokens,
        answer=prompt.answer,
        params=params,
        group="" if request.session is None else f"session{request.session}",
        due_s=round(exchange.due_s, 6),
        after=exchange.after,
        think_s=request.think_s,
        mark=prompt.mark,
        send_s=round(answer.sent_s, 6),
        headers_s=round(answer.headers_s or 0.0, 6),
        token_s=[round(t, 6) for t in answer.token_s],
        tokens=answer.output,
        done_s=round(answer.done_s, 6),
        status=answer.status or 0,
        result=kept_result(answer.result) or None,
        error=answer.error,
    )


def _sent_by_pieces(exchange: Exchange) -> SentRequest:
    """A request whose prompt is told by its pieces, and with what other servers than llama-server say."""
    request, answer = exchange.request, exchange.answer
    return replace(
        _sent(exchange),
        pieces=[_segment(piece) for piece in exchange.prompt.pieces],
        prompt_tokens=request.prompt_tokens if answer.prompt_tokens is None else answer.prompt_tokens,
        result=None if answer.cached_tokens is None else {"cache_n": answer.cached_tokens},
        error=exchange.error,
    )


def _segment(piece: Piece) -> tuple[int | str, int, int]:
    """A piece as recordings have it: answers are named by their request."""
    source, start, n = piece
    return f"out:{source - SOURCES}" if SOURCES <= source < 2 * SOURCES else source, start, n
