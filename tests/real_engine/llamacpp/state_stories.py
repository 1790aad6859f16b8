"""Random stories of sequences with states, on the real llama.cpp: recordings for ``kvsim conform llamacpp``.

Write those that are shipped anew with ``python -m tests.real_engine.llamacpp.state_stories FOLDER``.
"""

import os
import struct
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from kvsim.engines.recordings.recording_files import write_recording
from real_engine.llama_library import Context, ContextSettings, Library, LlamaModel
from tests.real_engine.llamacpp.models import write_hybrid, write_recurrent

CELLS = 256
"""Of each stream."""


class Story(NamedTuple):
    """Who acts, on what."""

    model: str
    """``hybrid``, ``windowed`` (a hybrid with windows) or ``recurrent``."""
    unified: bool = True
    snapshots: int = 0
    sequences: int = 4
    operations: int = 60
    seed: int = 0


STORIES = {
    "hybrid": Story("hybrid"),
    "hybrid-streams": Story("hybrid", unified=False, sequences=3),
    "hybrid-snapshots": Story("hybrid", snapshots=3),
    "hybrid-window": Story("windowed"),
    "hybrid-window-streams": Story("windowed", unified=False, sequences=3),
    "recurrent": Story("recurrent", sequences=5),
}
WINDOW = 16


def write_model(name, path):
    """Write the model of a story."""
    if name == "recurrent":
        return write_recurrent(path)
    return write_hybrid(path, WINDOW if name == "windowed" else None)


class Teller:
    """Lets random operations happen to a context, and records each with what llama.cpp shows after it."""

    def __init__(self, model: LlamaModel, story: Story):
        self.story, self.rng = story, np.random.default_rng(story.seed)
        self.n_ubatch = CELLS // 20 + 1
        settings = ContextSettings(
            cells=CELLS if story.unified else CELLS * story.sequences,
            n_batch=CELLS // 4,
            n_ubatch=self.n_ubatch,
            sequences=story.sequences,
            unified=story.unified,
            snapshots=story.snapshots,
        )
        self.context = Context(model, settings)
        self.records: list[dict] = []

    def tell(self) -> list[dict]:
        """The whole recording."""
        acts = [self.decode] * 4 + [self.remove] * 2 + [self.copy, self.keep, self.shift]
        if not self.story.unified:
            # It takes the states of all others, but not their cells in other streams, whose positions then repeat.
            acts.remove(self.keep)
        if self.story.snapshots:
            # The state of all sequences cannot be looked at while one that shares its state has taken tokens back.
            acts.remove(self.copy)
        with self.context:
            self.note({"op": "init"})
            while len(self.records) < self.story.operations + 1:
                acts[int(self.rng.integers(len(acts)))]()
        return [self.header(), *self.records]

    def header(self) -> dict:
        """What there is."""
        windowed, sizes = self.story.model == "windowed", self.context.sizes
        caches = [{"size": n, "n_pad": 1, "n_swa": WINDOW * (at == 1)} for at, n in enumerate(sizes)]
        assert len(caches) == {"recurrent": 0, "hybrid": 1, "windowed": 2}[self.story.model], windowed
        return {
            "era": "B",
            "n_cells": CELLS,
            "n_ctx": self.context.settings.cells,
            "n_seq_max": self.story.sequences,
            "n_batch": self.context.settings.n_batch,
            "n_ubatch": self.n_ubatch,
            "defrag_thold": -1.0,
            "n_layer": self.context.model.n_layers,
            "n_stream": 1 if self.story.unified else self.story.sequences,
            "snapshots": self.story.snapshots,
            "caches": caches,
            "engine": f"llama-cpp-python {self.context.library.version}",
        }

    def note(self, record: dict) -> None:
        """Record an operation, and what there is after it."""
        context, n = self.context, self.story.sequences
        held, states = read_state(context.state_of(-1).tobytes(), len(context.sizes))
        ends = [[context.first_position(seq), context.last_position(seq)] for seq in range(n)]
        self.records.append({**record, "ends": ends, "held": held, "states": states})

    # What may happen

    def decode(self) -> None:
        """Some sequences go on, at times two of them together, and now and then where they do not end."""
        n = self.story.sequences
        seqs = self.rng.permutation(n)[: self.some(n)].tolist()
        batch = []
        for seq in seqs:
            gap = 2 * (self.rng.random() < 0.03)
            batch.append([[seq], self.context.last_position(seq) + 1 + gap, self.some(20)])
        if self.rng.random() < 0.15:
            batch[0][0] = [seqs[0], int(self.rng.choice([s for s in range(n) if s not in seqs] or [seqs[0]]))]
            batch[0][0] = sorted(set(batch[0][0]), key=batch[0][0].index)
        rows = [
            (int(self.rng.integers(3, 250)), first + i, i == count - 1, tuple(own))
            for own, first, count in batch
            for i in range(count)
        ]
        if len(rows) <= self.context.settings.n_batch:
            self.note({"op": "decode", "batch": batch, "ret": self.context.decode(rows)[0]})

    def remove(self) -> None:
        """Take the end of a sequence, all of it, or a part in the middle."""
        seq = self.seq()
        last = self.context.last_position(seq)
        start, stop = int(self.rng.integers(0, last + 2)), -1
        kind = self.rng.random()
        if kind < 0.3:
            start = max(last - int(self.rng.integers(0, 5)), 0)
        elif kind < 0.5:
            start = 0
        elif kind < 0.6:
            stop = start + self.some(5)
        self.note({"op": "seq_rm", "args": [seq, start, stop], "ret": int(self.context.remove(seq, start, stop))})

    def copy(self) -> None:
        """Let an emptied sequence begin as another."""
        src, dst = (int(seq) for seq in self.rng.permutation(self.story.sequences)[:2])
        self.note({"op": "seq_rm", "args": [dst, 0, -1], "ret": int(self.context.remove(dst, 0, -1))})
        self.context.copy(src, dst, 0, -1)
        self.note({"op": "seq_cp", "args": [src, dst, 0, -1]})

    def keep(self) -> None:
        """Once in a while all but one sequence go."""
        if self.rng.random() < 0.15:
            seq = self.seq()
            self.context.keep(seq)
            self.note({"op": "seq_keep", "args": [seq]})

    def shift(self) -> None:
        """A context shift."""
        seq = self.seq()
        last = self.context.last_position(seq)
        first = 0 if self.story.model != "windowed" else last
        if last - first < 6 or self.story.model == "recurrent":
            return
        start = int(self.rng.integers(1, last - 3))
        n = self.some(last - start - 1)
        done = int(self.context.remove(seq, start, start + n))
        self.note({"op": "seq_rm", "args": [seq, start, start + n], "ret": done})
        self.context.shift(seq, start + n, -1, -n)
        self.note({"op": "seq_add", "args": [seq, start + n, -1, -n]})

    def some(self, most: int) -> int:
        return int(self.rng.integers(1, most + 1))

    def seq(self) -> int:
        return int(self.rng.integers(self.story.sequences))


def read_state(data: bytes, caches: int) -> tuple[list, list]:
    """What llama.cpp writes of all sequences: runs of tokens in each stream of each cache, and the states."""
    at = 8  # A magic number and a sequence.

    def take(form: str):
        nonlocal at
        found = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return found

    def take_cells(n: int) -> list:
        found = []
        for _ in range(n):
            position, several = take("iI")
            found.append([position, list(take(f"{several}i"))])
        return found

    held = []
    for _ in range(caches):
        streams = []
        for _ in range(take("I")[0]):
            (n,) = take("I")
            streams.append(_runs(take_cells(n)))
            if not n:
                continue
            transposed, layers = take("II")
            for of_values in [False] * layers + [True] * layers:
                if of_values and transposed:
                    _, size, width = take("iII")
                    row = size * width
                else:
                    _, row = take("iQ")
                at += row * n
        held.append(streams)
    (n,) = take("I")
    return held, take_cells(n)


def _runs(cells: list) -> list:
    """Tokens as runs ``[length, [seqs], first position]``, positions rising by one."""
    runs: list = []
    for position, seqs in cells:
        if runs and runs[-1][1] == seqs and runs[-1][2] + runs[-1][0] == position:
            runs[-1][0] += 1
        else:
            runs.append([1, seqs, position])
    return runs


def record(library: Library, story: Story, folder: Path) -> list[dict]:
    """Tell a story; the model is written into a folder."""
    path = folder / f"{story.model}.gguf"
    with LlamaModel(library, path if path.exists() else write_model(story.model, path)) as model:
        return Teller(model, story).tell()


if __name__ == "__main__":
    out, engine = Path(sys.argv[1]), Library(os.environ.get("KVSIM_LLAMA_CPP"))
    with TemporaryDirectory() as models:
        for name, story in STORIES.items():
            write_recording(out / f"{name}.jsonl.gz", record(engine, story, Path(models)))
