"""Storage types and their bytes per number; parsing and formatting sizes in bytes."""

from __future__ import annotations

import re

from kvsim.errors import UserError

CACHE_TYPES: dict[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "fp8": (1, 1),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
"""Types of keys and values: (numbers in a block, bytes of a block). Source: ``ggml-common.h``; ``fp8`` is that of
vLLM's ``--kv-cache-dtype fp8``."""

LLAMACPP_CACHE_TYPES = tuple(name for name in CACHE_TYPES if name != "fp8")
"""Types that llama.cpp's ``--cache-type-k`` accepts (``common/arg.cpp``)."""

VLLM_CACHE_TYPES = ("f16", "bf16", "f32", "fp8")
"""Types of K and V in vLLM, the same for both: the type of the model, or fp8."""

MAMBA_CACHE_TYPES = {"auto": 0, "float32": 4, "bfloat16": 2, "float16": 2}
"""Types in which vLLM keeps states (``--mamba-cache-dtype``), and their bytes per number; ``auto`` is the model's."""

_PURE_BITS: dict[str, float] = {
    **{name: 8 * size / block for name, (block, size) in CACHE_TYPES.items()},
    "mxfp4": 8 * 17 / 32,
}
"""Bits per number of types that all tensors can have."""

GGUF_BLOCKS: dict[str, tuple[int, int]] = {
    **{name: block for name, block in CACHE_TYPES.items() if name != "fp8"},
    "mxfp4": (32, 17),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "iq1_s": (256, 50),
    "iq1_m": (256, 56),
    "iq2_xxs": (256, 66),
    "iq2_xs": (256, 74),
    "iq2_s": (256, 82),
    "iq3_xxs": (256, 98),
    "iq3_s": (256, 110),
    "iq4_xs": (256, 136),
}
"""Types of tensors in GGUF files: (numbers in a block, bytes of a block). Source: ``ggml-common.h``."""

WHOLE_TYPES = ("f32", "f16", "bf16")
"""Types of numbers that are not quantised."""

_MIXED_BITS: dict[str, float] = {
    "iq1_s": 2.0042,
    "iq1_m": 2.1460,
    "iq2_xxs": 2.3824,
    "iq2_xs": 2.5882,
    "iq2_s": 2.7403,
    "iq2_m": 2.9294,
    "iq3_xxs": 3.2548,
    "iq3_xs": 3.4977,
    "iq3_s": 3.6606,
    "iq3_m": 3.7628,
    "iq4_xs": 4.4597,
    "q2_k_s": 2.9697,
    "q2_k": 3.1593,
    "q3_k_s": 3.6429,
    "q3_k_m": 3.9960,
    "q3_k_l": 4.2979,
    "q4_k_s": 4.6672,
    "q4_k_m": 4.8944,
    "q5_k_s": 5.5704,
    "q5_k_m": 5.7036,
    "q6_k": 6.5633,
}
"""Bits per weight of llama-quantize's mixtures, as measured on Llama 3.1 8B (llama.cpp, ``tools/quantize/README.md``;
of q3_k_m, which is not there, by ``gguf_quantization``). For other models they are estimates: which tensors get more
bits depends on the shape, and the sizes of files follow from that (``gguf_quantization``)."""

_GPU_BITS: dict[str, float] = {
    "fp8_block": 8,
    "fp8_static": 8,
    "int8": 8,
    "int4": 4.15625,
    "int4_g32": 4.5,
    "nvfp4": 4.5,
}
"""Bits per weight of types that engines for GPUs serve besides, with scales where they count: of nvfp4 one of 8 bits
for 16 weights, of int4 (AWQ, GPTQ) one of 16 bits and a zero of 4 for 128, of int4_g32 (Kimi) one of 16 bits for 32."""

WEIGHT_TYPES = (*_PURE_BITS, *_GPU_BITS, *_MIXED_BITS)
"""Types that ``--weights`` accepts, in any case."""

SERVED_TYPES = ("fp8", *_GPU_BITS, "mxfp4")
"""Types in which engines for GPUs keep the matrices of layers only: embeddings and head stay in 16 bits."""

GGUF_ONLY = frozenset((*LLAMACPP_CACHE_TYPES, *_MIXED_BITS)) - {"f32", "f16", "bf16"}
"""Types of weights that only GGUF files have."""

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}{'b' * b}": 1000**i for i, letter in enumerate("kmgt", 1) for b in (0, 1)}
_UNITS |= {f"{letter}i{'b' * b}": 1024**i for i, letter in enumerate("kmgt", 1) for b in (0, 1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_MOST_BYTES = 1 << 60


def bytes_per_number(kind: str) -> float:
    """Bytes of a number of K or V in a type of ``CACHE_TYPES``."""
    block, size = CACHE_TYPES[kind]
    return size / block


def row_bytes(kind: str, numbers: int) -> int:
    """Bytes of a row of ``numbers``, a multiple of the block size of the type (``ggml_row_size``)."""
    block, size = CACHE_TYPES[kind]
    return numbers // block * size


def weight_bytes(kind: str, numbers: int) -> int:
    """Bytes of ``numbers`` weights of a type in ``WEIGHT_TYPES``, or of one that only GPUs serve, rounded up."""
    bits = _PURE_BITS.get(kind) or _MIXED_BITS.get(kind) or _GPU_BITS[kind]
    return -int(-numbers * bits // 8)


def parse_size(text: str, where: str = "--memory") -> int:
    """Parse a size such as 8GB (10^9), 8GiB (2^30), 512MiB or plain bytes. Raises ``UserError``."""
    match = _SIZE.fullmatch(text)
    unit = match and _UNITS.get(match[2].lower())
    # A number too long for a float would be infinite.
    if match is None or unit is None or len(match[1]) > 40 or not 1 <= (size := float(match[1]) * unit) <= _MOST_BYTES:
        raise UserError(f"{where}: {text!r:.60}; a size such as 8GB, 8GiB, 512MiB or bytes is accepted")
    return int(match[1]) * unit if match[1].isdigit() else int(size)


def binary_reading(text: str) -> str:
    """The size that may have been meant by one in GB or TB: 16GiB for 16GB; empty if it has another unit."""
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else ""
    return f"{match[1]}{unit[0].upper()}iB" if match and unit in ("g", "gb", "t", "tb") else ""


def decimal_hint(text: str) -> str:
    """Say what a size in GB is in GiB, as memory is made but not sold; empty if it has another unit."""
    meant = binary_reading(text)
    if not meant:
        return ""
    given = f"{meant[:-3]} {meant[-3]}B"
    return f"{given} is {format_size(parse_size(text))}; a card sold as {given} usually has {meant}"


def format_size(size: int) -> str:
    """Format bytes as llama.cpp logs them: GiB, MiB or KiB with two decimals."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.0f} B"
