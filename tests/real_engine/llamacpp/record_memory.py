"""Records what llama.cpp allocates for tokens and for states: run by a Python that has llama-cpp-python and gguf.

    python -m tests.real_engine.llamacpp.record_memory OUT.json

Tiny models with the layers of today's, of random weights, are loaded with 1 and with 64 sequences, and with 64 whose
states can take back 3 tokens (``64+3``). The sizes are those that the library logs, in MiB: ``llama_kv_cache: size =``,
``llama_memory_recurrent: size =``.
"""

import ctypes
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import llama_cpp
import llama_cpp.llama_cpp as api

from benchmarks.gpu import random_gguf
from tests.benchmarks.gpu.test_random_gguf import HYBRIDS

CELLS = 16384
SIZE = re.compile(r"(llama_kv_cache|llama_memory_recurrent): size = +([\d.]+) MiB")
_logged = []


@api.llama_log_callback
def _log(_level, text, _data):
    _logged.append(text.decode(errors="replace"))


def record(path, sequences, snapshots=0):
    """MiB of the caches of tokens and of the states."""
    _logged.clear()
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    asked = api.llama_context_default_params()
    asked.n_ctx, asked.n_seq_max, asked.n_batch, asked.n_ubatch, asked.kv_unified = CELLS, sequences, 64, 64, False
    asked.n_rs_seq = snapshots
    context = api.llama_init_from_model(model, asked)
    found = Counter()
    for name, size in SIZE.findall("".join(_logged)):
        found[name] += float(size)  # Keys of an indexer have a cache of their own.
    api.llama_free(context)
    api.llama_model_free(model)
    return found


def main(out):
    api.llama_backend_init()
    api.llama_log_set(_log, ctypes.c_void_p(0))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in HYBRIDS.items():
            path = Path(folder) / "tiny.gguf"
            random_gguf.write(path, config, "q8_0")
            found[name] = {str(n): record(path, n) for n in (1, 64)} | {"64+3": record(path, 64, 3)}
    header = {"llama-cpp-python": llama_cpp.__version__, "cells": CELLS}
    Path(out).write_text(json.dumps(header | {"models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
