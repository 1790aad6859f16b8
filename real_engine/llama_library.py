"""llama.cpp through llama-cpp-python's low-level interface: loading, batches, sequence operations, and cells.

Two eras of llama.cpp are supported, distinguished by the interface (see ``docs/llamacpp.md``):

- ``A``, b4666 to b4880 (llama-cpp-python 0.3.8): ``llama_kv_cache_*``, with defragmentation and the view interface,
  which shows every cell at any time.
- ``B``, since b6975 (for example 0.3.36): ``llama_memory_*``, with streams and sliding windows. It shows its cells
  only while it looks for slots, in its log, if ``LLAMA_KV_CACHE_DEBUG`` was 3 when the context was made.

Requests, schedules and policies are unknown here.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import UserError
from kvsim.installation import install_extra, pip_install, quoted
from kvsim.model.engine_shapes import Storage
from real_engine.llama_cells import SHARED, Era, StreamCells, parse_cache_sizes, parse_cells

BatchRow = tuple[int, int, bool, tuple[int, ...]]
"""A token of a batch: its id, its position, whether its logits are wanted, and the sequences that see it."""

_TYPES: dict[Storage, int] = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
"""``enum ggml_type``."""
_PARTIAL_ONLY = 1
"""``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``."""
_DEBUG_VARIABLE = "LLAMA_KV_CACHE_DEBUG"


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """Parameters of a context, named as in ``llama_context_params`` but for the cells."""

    cells: int
    """Cells in all streams together (``n_ctx``)."""
    n_batch: int = 512
    """Most tokens in a batch, which cannot exceed ``cells`` either."""
    n_ubatch: int = 512
    sequences: int = 1
    """``n_seq_max``."""
    unified: bool = True
    """``kv_unified``; always true in era A."""
    threads: int = 1
    flash_attention: bool = False
    type_k: Storage = "f16"
    type_v: Storage = "f16"
    defrag_threshold: float = -1.0
    """``defrag_thold``; era A."""
    snapshots: int = 0
    """Era B: last tokens of each sequence that a state can take back (``n_rs_seq``)."""
    show_cells: bool = False
    """Era B: print the cells to the log at each decode, which takes time."""


class Library:
    """One version of llama.cpp, loaded by llama-cpp-python. A process can load only one."""

    def __init__(self, folder: Path | str | None = None):
        """``folder``: one with another llama-cpp-python than the installed one (``pip install --target``).

        Raises ``UserError`` if there is none, or none of a supported version.
        """
        self.api, self.version = _load(None if folder is None else Path(folder))
        if hasattr(self.api, "llama_kv_cache_view_init"):
            self.era: Era = "A"
        elif hasattr(self.api, "llama_memory_seq_rm") and not hasattr(self.api, "llama_kv_self_defrag"):
            self.era = "B"
        else:
            raise UserError(
                f"llama-cpp-python {self.version}: neither the view interface (as 0.3.8 has it) nor today's memory "
                "interface without defragmentation (as 0.3.36 has it); these two are supported"
            )
        self._log_lines = _capture_log(self.api)

    @property
    def name(self) -> str:
        """Name and version for reports and profiles, with the folder of a custom build."""
        own = os.environ.get("LLAMA_CPP_LIB_PATH")
        return f"llama-cpp-python {self.version}" + (f" with {own}" if own else "")

    def read_log(self) -> list[str]:
        """Lines of llama.cpp's log since the last call."""
        lines, self._log_lines[:] = list(self._log_lines), []
        _raise_pending_interrupt()
        return lines


_PENDING_INTERRUPTS: list[bool] = []
"""Not empty after the user pressed Ctrl-C inside a log callback."""


def _raise_pending_interrupt() -> None:
    if _PENDING_INTERRUPTS:
        _PENDING_INTERRUPTS.clear()
        raise KeyboardInterrupt


_LOG_CALLBACKS: list[Any] = []
"""References that keep the callbacks alive, since llama.cpp calls them until the process ends."""


@cache
def _capture_log(api: Any) -> list[str]:
    """Start llama.cpp and return the list to which it logs; a process has only one log."""
    lines: list[str] = []

    def on_log(level: int, text: bytes | None, _: Any) -> None:
        try:
            lines.append((text or b"").decode(errors="replace"))
            # Bounds the memory of a log that is never read; the last lines explain a failed load.
            if len(lines) > 100_000:
                del lines[:50_000]
        except KeyboardInterrupt:
            # An exception cannot pass through llama.cpp, so it is raised once that has returned.
            _PENDING_INTERRUPTS.append(True)

    _LOG_CALLBACKS.append(api.llama_log_callback(on_log))
    api.llama_log_set(_LOG_CALLBACKS[-1], ctypes.c_void_p(0))
    api.llama_backend_init()
    return lines


_LOADED_FOLDERS: set[Path] = set()
"""Folders from which llama-cpp-python was loaded by name."""


def _load(folder: Path | None) -> tuple[Any, str]:
    """The low-level module and the package's version."""
    if folder is not None and not (folder / "llama_cpp").is_dir():
        fill = pip_install(f"--target {quoted(str(folder))} llama-cpp-python")
        raise UserError(f"{folder}: no llama_cpp in it; install it there with: {fill}")
    wanted, loaded = folder and folder.resolve(), sys.modules.get("llama_cpp")
    if loaded is not None:
        home = Path(str(loaded.__file__)).parent.parent
        if home != wanted and (wanted is not None or home in _LOADED_FOLDERS):
            there = wanted or "the installed one"
            raise UserError(f"{there}: another llama-cpp-python, {loaded.__version__}, is in use in this process")
    if wanted is not None:
        _LOADED_FOLDERS.add(wanted)
        sys.path.insert(0, str(wanted))
    try:
        package = importlib.import_module("llama_cpp")
        api = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError as e:
        raise UserError(
            f"llama-cpp-python cannot be imported ({e}); install it with: {install_extra('llama')}"
        ) from None
    except (OSError, RuntimeError, AttributeError) as e:
        # The shared library is missing, is for another machine, or lacks a function that this version calls.
        raise UserError(f"llama-cpp-python cannot load llama.cpp: {str(e).splitlines()[0]}") from None
    finally:
        if folder is not None:
            sys.path.remove(str(wanted))
    return api, str(package.__version__)


class Closeable(AbstractContextManager[Any]):
    """A resource that is released at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Release the resource."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, what: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


class LlamaModel(Closeable):
    """A model's weights, which any number of contexts can share."""

    def __init__(self, library: Library, path: Path | str):
        """Raises ``UserError`` if llama.cpp cannot load the file."""
        self.library = library
        self.path = Path(path)
        api = library.api
        params = api.llama_model_default_params()
        if hasattr(params, "use_extra_bufts"):
            # Like llama-server's --no-repack: kernels for AMX crash on some machines (llama.cpp issue 20824).
            params.use_extra_bufts = False
        library.read_log()
        self.handle = api.llama_model_load_from_file(str(self.path).encode(), params)
        said = [line.strip() for line in library.read_log() if "error" in line or "failed" in line]
        if not self.handle:
            raise UserError(f"{self.path}: llama.cpp cannot load it: {said[0] if said else 'it does not say why'}")
        vocabulary = api.llama_model_get_vocab(self.handle)
        self.vocabulary = int(api.llama_vocab_n_tokens(vocabulary))
        self.n_layers = int(api.llama_model_n_layer(self.handle))

    def close(self) -> None:
        """Free the memory."""
        if self.handle:
            self.library.api.llama_model_free(self.handle)
            self.handle = None


class Context(Closeable):
    """One KV cache with its operations, named like those of the policies."""

    def __init__(self, model: LlamaModel, settings: ContextSettings):
        """Raises ``UserError`` if llama.cpp refuses the settings."""
        self.model, self.settings, self.library = model, settings, model.library
        self._api = model.library.api
        self.era = model.library.era
        why = refusal(self.era, settings)
        if why is not None:
            raise UserError(f"{self.library.name}: {why}")
        params = self._params()
        self.library.read_log()
        with _environment(_DEBUG_VARIABLE, "3" if settings.show_cells else "0"):
            self.handle = self._api.llama_init_from_model(model.handle, params)
        said = self.library.read_log()
        if not self.handle:
            told = [line.strip() for line in said if "error" in line or "failed" in line or "require" in line]
            raise UserError(f"{self.library.name} cannot make a context: {told[0] if told else 'it does not say why'}")
        self.sizes = parse_cache_sizes(said) if self.era == "B" else (settings.cells,)
        """Cells in each stream, by cache."""
        got = int(self._api.llama_n_ctx(self.handle))
        if got != settings.cells:
            self.close()
            raise UserError(f"{self.library.name} makes {got} cells where {settings.cells} were asked for")
        self.memory = self.handle if self.era == "A" else self._api.llama_get_memory(self.handle)
        # A batch of more tokens than cells would abort the process.
        self._batch = _BatchBuffer(self._api, min(settings.n_batch, settings.cells), settings.sequences)
        self.wall_s = self.cpu_s = 0.0
        """Seconds spent in ``decode`` so far, by the clock and of all processors together."""

    def _params(self) -> Any:
        s, params = self.settings, self._api.llama_context_default_params()
        # llama.cpp aborts the process if a batch cannot hold a token of each sequence.
        most = max(s.n_batch, s.sequences)
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = s.cells, most, s.n_ubatch, s.sequences
        params.n_threads = params.n_threads_batch = s.threads
        params.type_k, params.type_v = _TYPES[s.type_k], _TYPES[s.type_v]
        params.no_perf, params.offload_kqv = True, False
        if self.era == "A":
            params.flash_attn, params.defrag_thold = s.flash_attention, s.defrag_threshold
        else:
            params.flash_attn_type, params.kv_unified, params.swa_full = int(s.flash_attention), s.unified, False
            if s.snapshots:
                params.n_rs_seq = s.snapshots
        return params

    def decode(self, rows: Sequence[BatchRow]) -> tuple[int, float]:
        """Run a batch and return ``llama_decode``'s code (0 done, 1 no slot, -1 rejected) and its seconds.

        Raises ``UserError`` for any other code: llama.cpp ran out of memory, or could not compute.
        """
        self._batch.fill(rows)
        cpu, began = time.process_time(), time.perf_counter()
        returned = int(self._api.llama_decode(self.handle, self._batch.struct))
        self._api.llama_synchronize(self.handle)
        seconds = time.perf_counter() - began
        _raise_pending_interrupt()
        self.wall_s += seconds
        self.cpu_s += time.process_time() - cpu
        if returned not in (0, 1, -1):
            said = " ".join(line.strip() for line in self.library.read_log()[-3:])
            raise UserError(f"{self.library.name}: llama_decode returned {returned}, after it said: {said}")
        return returned, seconds

    def best(self, row: int) -> int | None:
        """The most likely token after a row of the last batch for which logits were wanted; None if it has none, as in
        a batch that failed."""
        logits = self._api.llama_get_logits_ith(self.handle, row)
        if not logits:
            return None
        return int(np.ctypeslib.as_array(logits, (self.model.vocabulary,)).argmax())

    def remove(self, seq: int, start: int, stop: int) -> bool:
        """``seq_rm`` of positions ``[start, stop)``; a negative end is open, a negative sequence means all."""
        return bool(self._op("seq_rm")(self.memory, seq, start, stop))

    def copy(self, src: int, dst: int, start: int, stop: int) -> None:
        """``seq_cp``."""
        self._op("seq_cp")(self.memory, src, dst, start, stop)

    def keep(self, seq: int) -> None:
        """``seq_keep``."""
        self._op("seq_keep")(self.memory, seq)

    def first_position(self, seq: int) -> int:
        """Era B: the lowest position that a sequence still has in every cache, -1 if none."""
        return int(self._api.llama_memory_seq_pos_min(self.memory, seq))

    def last_position(self, seq: int) -> int:
        """Era B: the highest position that a sequence holds, -1 if none."""
        return int(self._api.llama_memory_seq_pos_max(self.memory, seq))

    def shift(self, seq: int, start: int, stop: int, delta: int) -> None:
        """``seq_add``."""
        self._op("seq_add")(self.memory, seq, start, stop, delta)

    def divide(self, seq: int, start: int, stop: int, divisor: int) -> None:
        """``seq_div``."""
        self._op("seq_div")(self.memory, seq, start, stop, divisor)

    def clear(self) -> None:
        """Empty the cache."""
        if self.era == "A":
            self._api.llama_kv_cache_clear(self.handle)
        else:
            self._api.llama_memory_clear(self.memory, False)

    def defragment(self) -> None:
        """Era A: request one pass of defragmentation before the next batch, or at the next ``update``."""
        assert self.era == "A", "nothing is ever moved since b6975"
        self._api.llama_kv_cache_defrag(self.handle)

    def update(self) -> float:
        """Era A: carry out pending defragmentation and K-shifts, and return the seconds."""
        began = time.perf_counter()
        self._api.llama_kv_cache_update(self.handle)
        self._api.llama_synchronize(self.handle)
        return time.perf_counter() - began

    def state(self) -> NDArray[np.uint8]:
        """The cache's whole contents, for ``restore``."""
        data = np.zeros(int(self._api.llama_state_get_size(self.handle)), np.uint8)
        n = self._api.llama_state_get_data(self.handle, data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), len(data))
        return data[: int(n)]

    def restore(self, state: NDArray[np.uint8]) -> None:
        """Restore what ``state`` returned, of this context or of one with equal settings."""
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if not self._api.llama_state_set_data(self.handle, pointer, len(state)):
            raise RuntimeError("llama.cpp did not take back its own state")

    def state_of(
        self, seq: int, memory: Callable[[int], NDArray[np.uint8]] | None = None, *, partial: bool = False
    ) -> NDArray[np.uint8]:
        """The contents of a sequence, for ``put``; ``memory`` gives as many bytes as it is asked for.

        ``partial``, era B: only what could not be rolled back later, a context checkpoint.
        """
        size = self._of_sequence("get_size", seq, partial=partial)
        data = np.zeros(size, np.uint8) if memory is None else memory(size)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        n = self._of_sequence("get_data", pointer, len(data), seq, partial=partial)
        return data[:n]

    def put(self, seq: int, state: NDArray[np.uint8], *, partial: bool = False) -> bool:
        """Insert what ``state_of`` returned, of a context with equal settings, as a sequence; False if cells are
        lacking.

        Cells are found as for a batch of as many tokens, and filled without any computation.
        """
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return bool(self._of_sequence("set_data", pointer, len(state), seq, partial=partial))

    def _of_sequence(self, operation: str, *arguments: Any, partial: bool) -> int:
        """Call ``llama_state_seq_<operation>``, or its form that takes flags."""
        if partial:
            return int(getattr(self._api, f"llama_state_seq_{operation}_ext")(self.handle, *arguments, _PARTIAL_ONLY))
        return int(getattr(self._api, f"llama_state_seq_{operation}")(self.handle, *arguments))

    def cells(self) -> list[StreamCells]:
        """Cells that llama.cpp has shown since the last call.

        Era A: as they are now. Era B: as they were when the last ``decode`` began to look for slots, of the streams
        that it searched; empty unless ``show_cells`` was set.
        """
        if self.era == "A":
            return [self._view()]
        return list(parse_cells(self.library.read_log(), len(self.sizes)))

    def close(self) -> None:
        """Free the memory."""
        if self.handle:
            self._api.llama_free(self.handle)
            self.handle = None

    def _op(self, name: str) -> Any:
        return getattr(self._api, f"llama_kv_cache_{name}" if self.era == "A" else f"llama_memory_{name}")

    def _view(self) -> StreamCells:
        api, most = self._api, self.settings.sequences
        view = api.llama_kv_cache_view_init(self.handle, most)
        try:
            api.llama_kv_cache_view_update(self.handle, ctypes.byref(view))
            n = int(view.n_cells)
            raw = ctypes.cast(view.cells, ctypes.POINTER(ctypes.c_int32))
            position = np.ctypeslib.as_array(raw, (n,)).astype(np.int64)
            seqs = np.ctypeslib.as_array(view.cells_sequences, (n, most)).astype(np.int64)
            used, largest = int(view.used_cells), int(view.max_contiguous)
        finally:
            api.llama_kv_cache_view_free(ctypes.byref(view))
        count = (seqs >= 0).sum(axis=1)
        owner = np.where(count == 0, -1, np.where(count == 1, seqs.max(axis=1), SHARED))
        several = np.flatnonzero(owner == SHARED).tolist()
        shared = {cell: tuple(sorted(seq for seq in seqs[cell].tolist() if seq >= 0)) for cell in several}
        return StreamCells(0, 0, used, np.where(count == 0, -1, position), owner, largest=largest, shared=shared)


def refusal(era: Era, s: ContextSettings) -> str | None:
    """Why llama.cpp would refuse such a cache, or make another one; None if it makes this one."""
    if era == "A" and not s.unified:
        return "this version has one cache for all sequences, no streams"
    if s.type_v in ("q8_0", "q4_0") and not s.flash_attention:
        return f"V in {s.type_v} needs flash attention (cache.kernel = 'tiled')"
    if era == "A" and s.flash_attention and "f32" in (s.type_k, s.type_v):
        return "its flash attention takes no K and V in f32 (cache.type_k, cache.type_v), and aborts the process"
    streams = 1 if s.unified else s.sequences
    pad = (256 if s.flash_attention else 32) if era == "A" else 256
    if s.cells % (pad * streams):
        each = "" if streams == 1 else f" for each of {streams} streams"
        return f"it makes multiples of {pad} cells{each}, not {s.cells}"
    return None


class _BatchBuffer:
    """A ``llama_batch`` over NumPy arrays."""

    def __init__(self, api: Any, most: int, sequences: int):
        self._most = most
        self._token, self._pos, self._n = (np.zeros(most, np.int32) for _ in range(3))
        self._seqs = np.zeros((most, max(sequences, 1)), np.int32)
        self._rows = self._seqs.ctypes.data + np.arange(most, dtype=np.uintp) * self._seqs.strides[0]
        self._logits = np.zeros(most, np.int8)
        self.struct = api.llama_batch()
        by_name: dict[str, NDArray[Any]] = {"token": self._token, "pos": self._pos, "n_seq_id": self._n}
        by_name |= {"logits": self._logits, "seq_id": self._rows}
        fields = dict(type(self.struct)._fields_)
        for name, array in by_name.items():
            setattr(self.struct, name, ctypes.cast(array.ctypes.data, fields[name]))

    def fill(self, rows: Sequence[BatchRow]) -> None:
        """Write the rows of the next batch."""
        n = len(rows)
        if not 0 < n <= self._most:
            raise UserError(f"a batch of {n} tokens; llama.cpp was set up for 1 to {self._most} (n_batch)")
        tokens, positions, wanted, seqs = zip(*rows, strict=True)
        self._token[:n], self._pos[:n], self._logits[:n] = tokens, positions, wanted
        self._n[:n] = [len(own) for own in seqs]
        if all(len(own) == 1 for own in seqs):
            self._seqs[:n, 0] = [own[0] for own in seqs]
        else:
            for row, own in zip(self._seqs, seqs, strict=False):
                row[: len(own)] = own
        self.struct.n_tokens = n


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
