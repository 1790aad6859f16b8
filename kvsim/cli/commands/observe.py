"""``kvsim observe``: a proxy that notes times, counts and hashes of one's own traffic, and no text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.console import print_json, warn
from kvsim.cli.options import Json
from kvsim.errors import UserError, counted
from kvsim.installation import install_extra

if TYPE_CHECKING:
    from kvsim.engines.observing.observer import Summary
    from kvsim.engines.observing.serving import Listening

app = typer.Typer(add_completion=False)

_Upstream = Annotated[
    str, typer.Option(metavar="URL", help="The server that requests are passed on to: http://127.0.0.1:8080.")
]
_Out = Annotated[Path, typer.Option(metavar="FILE.jsonl", help="The file to write; what it already has stays.")]
_Rotate = Annotated[
    str, typer.Option(metavar="SIZE", help="When the file has this size, it becomes FILE.1.jsonl and so on.")
]
_SaltFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Keep the secret of the hashes in this file (made if missing), so that prompts of several runs can be "
        "compared. Anyone with both files can test guesses of a prompt.",
    ),
]
_AllowRemote = Annotated[
    bool, typer.Option("--allow-remote", help="Allow a server, or a --host, other than this machine.")
]


@app.command()
def observe(
    upstream: _Upstream,
    out: _Out,
    port: Annotated[int, typer.Option(help="The port that clients connect to; 0: any.", min=0, max=65535)] = 8090,
    host: Annotated[str, typer.Option(help="The address that clients connect to.")] = "127.0.0.1",
    rotate: _Rotate = "100MB",
    salt_file: _SaltFile = None,
    requests: Annotated[int | None, typer.Option(help="End after this many requests that did not fail.", min=1)] = None,
    seconds: Annotated[float | None, typer.Option(help="End after this many seconds.", min=0.1)] = None,
    allow_remote: _AllowRemote = False,
    as_json: Json = False,
) -> None:
    """Record your own traffic: a proxy that keeps times, token counts and hashes, never text.

    Start it beside llama-server, vLLM or any server that speaks OpenAI's HTTP, and give your clients its address in
    place of the server's. Requests and answers pass unchanged and at once. Each POST to a path of chats or completions
    (such as /v1/chat/completions, /v1/completions, /completion and /infill) becomes a line of the file when it ends;
    all else is only passed on, /v1/responses too. Ctrl-C ends it; requests that still run have two more seconds.

    The file says when each request came, when its first token and its end came, how it ended, how many tokens prompt
    and answer had and who counted them. It has hashes of both, block by block, so that equal beginnings are known. It
    has no text, token ids, headers, keys, addresses or names of users. The hashes are made with a secret that only
    this process has, anew at each start, so that a reader of the file cannot check a guess of a prompt. Times, sizes
    and which prompts begin alike remain visible. Anyone who can send requests through the running proxy and read its
    file can compare hashes.

    If observing fails (on a full disk, say) or cannot keep up, the traffic goes on, and a line says so. What passes is
    looked at in a process of its own, which ends with this one, and when this one is killed.
    """
    from kvsim.model.storage_types import parse_size

    summary = serve(
        upstream,
        out,
        host=host,
        port=port,
        salt_file=salt_file,
        rotate_bytes=parse_size(rotate, "--rotate"),
        requests=requests,
        seconds=seconds,
        allow_remote=allow_remote,
    )
    if as_json:
        print_json(summary.to_dict())
    else:
        typer.echo(_told(summary))


def serve(upstream: str, out: Path, **options: Any) -> Summary:
    """Observe a server's traffic into a file; ``options``: further fields of ``Observation``. Raises ``UserError``."""
    try:
        from kvsim.engines.observing.serving import Observation
        from kvsim.engines.observing.serving import observe as pass_on
    except ImportError as e:
        raise UserError(
            f"kvsim observe needs a package that is not installed ({e.name}); install it with: {install_extra('serve')}"
        ) from None
    return pass_on(Observation(upstream, out, **options), _say_where, lambda line: warn([line]))


def _say_where(listening: Listening) -> None:
    typer.echo(
        f"Clients of {listening.upstream} can now use {listening.url}; {listening.out} gets times, token counts and "
        "salted hashes of their requests, and no text, ids, headers or keys. Ctrl-C ends this.",
        err=True,
    )


def _told(summary: Summary) -> str:
    """The summary as text."""
    from workloads.traces.observed_lines import CAUSES

    ends = ", ".join(f"{summary.ends[end]:,} {end}" for end in ("completed", "cancelled"))
    files = ", ".join(map(str, summary.files))
    lines = [f"{counted(summary.requests, 'request')} in {summary.seconds:,.0f} s: {ends}; in {files}"]
    if summary.failures:
        causes = ", ".join(f"{CAUSES.get(cause, cause)} ({n:,})" for cause, n in summary.failures.most_common())
        lines.append(f"{counted(summary.ends['failed'], 'request')} failed, which traces leave out: {causes}")
    ways = {"server": "by the server", "tokenizer": "by its tokenizer", "estimate": "estimated"}
    by = ", ".join(f"{summary.counted[way]:,} {text}" for way, text in ways.items() if summary.counted[way])
    lines += [f"Tokens were counted: {by}"] if by else []
    if summary.distorted:
        late = f"this proxy was late by up to {summary.lag_s * 1e3:,.0f} ms, as on a busy machine"
        lines.append(f"{counted(summary.distorted, 'request')} with distorted times: {late}")
    told = {
        "passed_on": "of other kinds only passed on",
        "without_blocks": "without hashes: too long, or not understood",
        "missed": "not looked at in full, since observing could not keep up",
        "lost": "not recorded",
    }
    lines += [f"{counted(n, 'request')} {what}" for name, what in told.items() if (n := getattr(summary, name))]
    if summary.faults:
        lines.append(f"{counted(summary.faults, 'fault')} in observing; the traffic passed all the same")
    return "\n".join(lines)
