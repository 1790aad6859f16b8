"""What llama.cpp's tools print around their tables: the device and the model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_DEVICES = (
    re.compile(r"^\s*Device (?P<number>\d{1,3}): (?P<name>[^,]{1,80}),"),  # CUDA, ROCm
    re.compile(r"^ggml_vulkan: (?P<number>\d{1,3}) = (?P<name>[^(|]{1,80})"),
    re.compile(r"^ggml_metal(?:_device)?_init: (?:GPU name|found device|picking default device): +(?P<name>.{1,80})$"),
)
_SAYS = re.compile(r"print_info: (file type|model params|file size|model type) +(?:=|:) (.{1,80})$")


@dataclass(frozen=True, slots=True)
class Logged:
    """What a log says; None where it says nothing."""

    device: str | None = None
    """Its devices, with commas between them."""
    file_type: str | None = None
    parameters: float | None = None

    @staticmethod
    def of(lines: Iterable[str]) -> Logged:
        """What these lines say."""
        devices: dict[str, str] = {}
        said: dict[str, str] = {}
        for line in lines:
            if found := next(filter(None, (pattern.search(line) for pattern in _DEVICES)), None):
                devices[found.groupdict().get("number") or "0"] = found["name"].strip()
            elif found := _SAYS.search(line):
                said[found[1]] = found[2].strip()
        count = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?) (M|B)", said.get("model params", ""))
        return Logged(
            ", ".join(devices.values()) or None,
            said.get("file type"),
            float(count[1]) * {"M": 1e6, "B": 1e9}[count[2]] if count else None,
        )


def table_cells(line: str) -> list[str]:
    """The cells of a line of a table such as ``| a | b |``; none of other lines."""
    line = line.strip()
    if len(line) < 2 or not (line.startswith("|") and line.endswith("|")):
        return []
    return [cell.strip() for cell in line[1:-1].split("|")]
