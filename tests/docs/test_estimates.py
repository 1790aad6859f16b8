"""The errors of estimates that docs/gpus.md states are those that ship."""

import re

from kvsim.costs.efficiency import efficiencies
from tests.paths import ROOT

ROWS = {
    "vLLM, NVIDIA, 16 bits": ("vllm", "nvidia", "f16"),
    "vLLM, NVIDIA, 16 bits, experts": ("vllm", "nvidia", "f16 experts"),
    "vLLM, NVIDIA, fp8": ("vllm", "nvidia", "fp8"),
    "vLLM, NVIDIA, fp8, experts": ("vllm", "nvidia", "fp8 experts"),
    "vLLM, Blackwell, NVFP4": ("vllm", "blackwell", "nvfp4"),
    "vLLM, Blackwell, NVFP4, experts": ("vllm", "blackwell", "nvfp4 experts"),
    "vLLM, all of these": ("vllm", "nvidia", "all"),
    "llama.cpp, NVIDIA": ("llamacpp", "nvidia", "all"),
    "llama.cpp, Hopper": ("llamacpp", "hopper", "all"),
    "llama.cpp, Hopper, models with states": ("llamacpp", "hopper", "states"),
    "llama.cpp, Apple": ("llamacpp", "apple", "all"),
    "llama.cpp, AMD": ("llamacpp", "amd", "all"),
    "llama.cpp, AMD Instinct": ("llamacpp", "instinct", "all"),
}


def test_the_errors_on_the_page_are_those_that_ship():
    page = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
    for title, (engine, make, kind) in ROWS.items():
        errors = efficiencies()[engine][make].errors[kind]
        cells = re.search(rf"^\| {re.escape(title)} \| (.*) \|$", page, re.MULTILINE)[1].split(" | ")
        numbers = (errors.decode_median, errors.decode_p90, errors.prompt_median, errors.prompt_p90)
        assert cells == [f"{100 * value:.0f} %" for value in numbers], title


def test_the_page_says_of_how_many_measurements_they_are():
    page = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
    for make, found in efficiencies()["llamacpp"].items():
        rows, devices = re.search(r"\((\d+) of (\d+) devices? ", found.source).groups()
        assert f"{rows} of {'one device' if devices == '1' else devices} " in page, make
