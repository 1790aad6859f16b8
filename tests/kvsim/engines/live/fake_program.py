"""A program that listens as llama-server does, for tests that start one; it ends by itself after a minute.

It takes any option. Of its own are ``--ends CODE`` (at once, with a line on standard error), ``--never-ready``,
``--ends-after N`` completions, ``--token-s S``, ``--child FILE`` (starts a program of its own and writes the ids of
both to the file) and ``--argv FILE`` (writes what it was started with).
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from fake_server import FakeServer

LIFE_S = 60


async def _serve(server, asked):
    async def answer(reader, writer):
        await server.serve(reader, writer)
        if asked.ends_after is not None and len(server.asked) >= asked.ends_after:
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)

    async with await asyncio.start_server(answer, "127.0.0.1", asked.port):
        await asyncio.sleep(LIFE_S)


def main():
    """Do as told."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--ends", type=int)
    parser.add_argument("--ends-after", type=int)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--child", type=Path)
    parser.add_argument("--argv", type=Path)
    asked, _ = parser.parse_known_args()
    if asked.argv is not None:
        asked.argv.write_text(json.dumps(sys.argv[1:]))
    if asked.child is not None:
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LIFE_S})"])
        asked.child.write_text(json.dumps([os.getpid(), child.pid]))
    print("loading", file=sys.stderr, flush=True)
    if asked.ends is not None:
        print("error: no such model\n", file=sys.stderr, flush=True)
        sys.exit(asked.ends)
    if asked.never_ready:
        asyncio.run(asyncio.sleep(LIFE_S))
    asyncio.run(_serve(FakeServer(token_s=asked.token_s), asked))


if __name__ == "__main__":
    main()
