"""Times llama.cpp on this machine's GPU: whole passes by depth, decodes of many sequences, and a server under load.

    python -m benchmarks.gpu.llamacpp --out FOLDER

compiles llama.cpp with CUDA, makes GGUF files with random weights one at a time, and runs llama-bench,
llama-batched-bench and llama-server on each, the most important first, until the minutes are over. Run again, it goes
on with what is missing. ``README.md`` says what it writes.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu import random_gguf
from benchmarks.gpu.random_tensors import tensors
from kvsim.errors import UserError, no_such

ROOT = Path(__file__).parents[2]
TOOLS = ("llama-bench", "llama-batched-bench", "llama-server")
SLOTS, SLOT_CONTEXT = 8, 2048
LEAST_S = 20.0
"""With less left, nothing is begun."""


@dataclass(frozen=True)
class Clock:
    """The time that may be used."""

    end: float

    def left(self, most: float) -> float:
        """Seconds that something may take."""
        return min(most, self.end - time.monotonic())


@dataclass(frozen=True)
class Sizes:
    """What is timed, as words of the tools."""

    prompts: str = "512,2048"
    depths: str = "0,4096,16384"
    streams: str = "1,2,4,8,16,32"
    drafted: str = "2,4,8,16"
    """Tokens of one sequence in a pass that verifies drafts."""
    repeated: int = 3
    requests: int = 64
    threads: str = ""
    """The flag of the tools, or nothing."""

    def benches(self) -> list[list[str]]:
        """The commands, but for the folder of the tool and the model, the most important first."""
        most = max(map(int, self.streams.split(",")))
        common = ["-d", self.depths, "-r", str(self.repeated), "-o", "jsonl", *self.threads.split()]
        deep = ["-p", self.prompts, "-n", "64", *common]
        # Each sequence has a cache of its own, in whole pieces of 256 cells. The tool may end before
        # its last row is printed, so that one more comes last.
        many = [
            "-c",
            str(most * 768),
            "-npp",
            "512",
            "-ntg",
            "32",
            "-npl",
            f"{self.streams},1",
            "-fa",
            "on",
            *self.threads.split(),
        ]
        return [
            ["llama-bench", *deep, "-fa", "1"],
            ["llama-batched-bench", *many, "--output-format", "jsonl"],
            ["llama-bench", "-p", self.drafted, "-n", "0", *common, "-fa", "1"],
            ["llama-bench", *deep, "-fa", "1", "-ctk", "q8_0", "-ctv", "q8_0"],
            ["llama-bench", *deep, "-fa", "0"],
        ]


def find_source(source: Path | None) -> Path:
    """The source of llama.cpp: what was named, else what ``make test-llama`` unpacked. Raises ``UserError``."""
    pattern = ".venv/llama-server/llama_cpp_python-*/vendor/llama.cpp"
    found = [source] if source else sorted(ROOT.glob(pattern))
    if not found or not (found[-1] / "CMakeLists.txt").is_file():
        raise UserError(f"no source of llama.cpp in {source or pattern}; make test-llama unpacks it there")
    return found[-1].resolve()


def build(source: Path, folder: Path, architecture: str | None) -> Path:
    """Compile the tools where they are not there yet; None: for the processor. Raises ``UserError``."""
    bin_folder = folder / "bin"
    if all((bin_folder / tool).is_file() for tool in TOOLS):
        return bin_folder
    folder.mkdir(parents=True, exist_ok=True)
    off = ("LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI")
    words = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *(f"-D{name}=OFF" for name in off)]
    if architecture is not None:
        # K and V are f16 or q8_0; kernels of attention for other types would take time to compile.
        words += ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={architecture}"]
        # What is compiled for another machine cannot rely on this one's processor.
        words += [f"-DGGML_NATIVE={'ON' if architecture == 'native' else 'OFF'}"]
        words += ["-DGGML_CUDA_NCCL=OFF", "-DGGML_CUDA_FA_QUANTS=f16-f16;q8_0-q8_0"]
    configure = ["cmake", "-S", str(source), "-B", str(folder), *words]
    compiled = ["cmake", "--build", str(folder), "--target", *TOOLS]
    log = folder / "build.log"
    print(f"compiling {', '.join(TOOLS)} in {folder}", flush=True)
    with log.open("w") as output:

        def run(command: list[str]) -> bool:
            return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode == 0

        try:
            done = (run(configure) or run([*configure, *elsewhere()])) and run(compiled)
        except FileNotFoundError as e:
            raise UserError(f"{e.filename} is needed to compile llama.cpp, and is not on the PATH") from None
    if not done:
        last = "\n".join(log.read_text("utf-8", "replace").splitlines()[-15:])
        raise UserError(f"{last}\nllama.cpp could not be compiled; {log} says why")
    return bin_folder


def elsewhere() -> list[str]:
    """Settings of CMake for a toolkit without cuBLAS or the driver's library: those of Python's packages and the
    driver's own."""
    places = [Path("/usr/local/nvidia/lib64"), Path("/usr/local/nvidia/lib"), Path("/usr/lib/x86_64-linux-gnu")]
    packages = importlib.util.find_spec("nvidia")
    for place in packages.submodule_search_locations or () if packages else ():
        places += Path(place).glob("*/lib")
    found = []
    for setting, name in (("cublas", "libcublas"), ("cublasLt", "libcublasLt"), ("cuda_driver", "libcuda")):
        if files := [file for place in places for file in sorted(place.glob(f"{name}.so*"))]:
            found.append(f"-DCUDA_{setting}_LIBRARY={files[0]}")
    if includes := [place.parent / "include" for place in places if (place.parent / "include/cublas_v2.h").is_file()]:
        found.append(f"-DCMAKE_CUDA_FLAGS=-isystem {includes[0]}")
    if not any("cuda_driver" in each for each in found):
        found.append("-DGGML_CUDA_NO_VMM=ON")
    return found


class Recording:
    """The file of a model: for each command a line that says how it ended, and its rows."""

    def __init__(self, path: Path):
        self.path = path
        self.parts: dict[str, tuple[str, list[str]]] = {}
        command = ""
        for line in path.read_text().splitlines() if path.exists() else ():
            if line.startswith("# "):
                end, _, command = line[2:].partition(": ")
                self.parts[command] = (end, [])
            else:
                self.parts[command][1].append(line)

    def is_whole(self, command: str) -> bool:
        """Whether the command ran to its end."""
        return self.parts.get(command, ("",))[0] == "whole"

    def put(self, command: str, end: str, rows: list[str]) -> None:
        """Write the rows of a command in place of those from before."""
        self.parts[command] = (end, rows)
        lines = [line for name, (how, own) in self.parts.items() for line in (f"# {how}: {name}", *own)]
        scratch = self.path.with_suffix(".part")
        scratch.write_text("".join(f"{line}\n" for line in lines))
        scratch.replace(self.path)


def bench(tools: Path, words: list[str], model: Path, recording: Recording, limit_s: float) -> str:
    """Run a tool that prints JSON lines, and say what came of it; what it printed before its time was over is kept."""
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as rows, tempfile.TemporaryFile("w+") as said:
        try:
            process = subprocess.run(
                [tools / words[0], *words[1:], "-m", model], stdout=rows, stderr=said, timeout=limit_s, check=False
            )
            end = "whole" if process.returncode == 0 else f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            end = f"cut after {limit_s:.0f} s"
        rows.seek(0)
        said.seek(0)
        text = rows.read().replace(f"{model.parent}/", "")
        found = [line for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
        errors = said.read().split("\n")
    if end == "whole" and not found:
        end = "nothing timed"
    recording.put(" ".join(words), end, found)
    why = f" ({[*filter(None, errors), 'it said nothing'][-2 if any(errors) else -1]})" if "ended" in end else ""
    return f"{end}, {len(found)} rows, {time.monotonic() - begin:.0f} s{why}"


def serve(tools: Path, model: Path, out: Path, sizes: Sizes, limit_s: float) -> str:
    """Record a llama-server under ``load.toml``, with every step of its log, and say what came of it."""
    from tests.real_engine.llama_server.server import running

    if subprocess.run([sys.executable, "-m", "kvsim", "--version"], capture_output=True, check=False).returncode:
        return "kvsim cannot run here, which sends the load: its packages are missing"
    flags = ["-np", str(SLOTS), "-c", str(SLOTS * SLOT_CONTEXT), "-fa", "on", "--metrics", *sizes.threads.split()]
    log, scratch = model.with_suffix(".log"), model.with_suffix(".jsonl.gz")
    end = time.monotonic() + limit_s
    try:
        with running(tools / "llama-server", model, flags, log, limit_s) as port:
            words = ["record", "--url", f"http://127.0.0.1:{port}", Path(__file__).with_name("load.toml")]
            words += ["--requests", sizes.requests, "--log", log, "--flags", " ".join(flags), "--out", scratch]
            words += ["--limit", max(end - time.monotonic(), 1.0)]
            command = [sys.executable, "-m", "kvsim", *map(str, words)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except (RuntimeError, TimeoutError) as e:
        return str(e)
    # Where its time was over, it has written what was answered by then.
    if scratch.exists():
        shutil.copy(scratch, out)
    said = (done.stderr if done.returncode else done.stdout).strip().splitlines() or ["kvsim record said nothing"]
    return said[-1 if done.returncode else 0].replace(str(scratch), out.name).partition("; the same command")[0]


def record(tools: Path, model: str, weights: str, out: Path, scratch: Path, sizes: Sizes, clock: Clock) -> bool:
    """Time one model as far as it has not been; whether all is there."""
    name = f"{Path(model).name.removesuffix('.json')}-{weights}"
    recording, loaded = Recording(out / f"{name}.jsonl"), out / f"{name}.load.jsonl.gz"
    missing = [words for words in sizes.benches() if not recording.is_whole(" ".join(words))]
    if not missing and loaded.exists():
        return True
    config = random_gguf.config(model)
    needed = sum(map(random_gguf.size, tensors(config, weights).values()))
    if needed * 1.02 > (free := shutil.disk_usage(scratch).free):
        print(f"{name}: {needed / 1e9:.1f} GB, and {scratch} has {free / 1e9:.1f} GB free; left out", flush=True)
        return False
    if clock.left(LEAST_S) < LEAST_S:
        return False
    path = scratch / f"{name}.gguf"
    try:
        random_gguf.write(path, config, weights)
        print(f"{name}: made, {path.stat().st_size / 1e9:.2f} GB", flush=True)
        for words in missing:
            if clock.left(LEAST_S) >= LEAST_S:
                print(f"{name}: {words[0]} {bench(tools, words, path, recording, clock.left(120))}", flush=True)
        if not loaded.exists() and clock.left(LEAST_S) >= LEAST_S:
            print(f"{name}: {serve(tools, path, loaded, sizes, clock.left(90))}", flush=True)
    finally:
        path.unlink(missing_ok=True)
    return loaded.exists() and all(recording.is_whole(" ".join(words)) for words in sizes.benches())


def describe(out: Path) -> None:
    """Write what the machine is, which only NVIDIA's tool says."""
    asked = "--query-gpu=name,memory.total,driver_version,power.limit,clocks.max.sm,clocks.max.memory,compute_cap"
    if shutil.which("nvidia-smi"):
        said = subprocess.run(["nvidia-smi", asked, "--format=csv"], capture_output=True, text=True, check=False)
        (out / "machine.csv").write_text(said.stdout)


def main(
    out: Annotated[Path, typer.Option(help="The folder of what is recorded.")],
    models: Annotated[str, typer.Option(help="Names of kvsim plan --list, or config.json files.")] = (
        "llama-3.1-8b,qwen3-14b,qwen3-32b,qwen3-30b-a3b"
    ),
    types: Annotated[str, typer.Option(help="Storage types; the first of all models comes first.")] = "q4_k_m,q8_0,f16",
    minutes: Annotated[float, typer.Option(help="For all of it; 0 only compiles.")] = 8.0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Compile for the processor.")] = False,
    architecture: Annotated[str, typer.Option(help="CUDA architecture; a number where no GPU is.")] = "native",
    source: Annotated[Path | None, typer.Option(help="The source of llama.cpp.")] = None,
    build_in: Annotated[Path | None, typer.Option(help="Where it is compiled; by default build/gpu.")] = None,
    scratch: Annotated[Path | None, typer.Option(help="Where GGUF files are made, one at a time.")] = None,
    prompts: str = Sizes.prompts,
    depths: str = Sizes.depths,
    streams: str = Sizes.streams,
    requests: int = Sizes.requests,
    threads: Annotated[int | None, typer.Option(help="Of the tools; by default, as many as they take.")] = None,
) -> None:
    """Time llama.cpp with models of random weights."""
    clock = Clock(time.monotonic() + 60 * minutes)
    folder = (build_in or ROOT / "build" / ("cpu" if cpu else "gpu")).absolute()
    try:
        for weights in types.lower().split(","):
            if weights not in random_gguf.TYPES:
                raise UserError(no_such("storage type", weights, random_gguf.TYPES))
        for model in models.split(","):
            random_gguf.config(model)
        found = find_source(source)
        tools = build(found, folder, None if cpu else architecture)
        if importlib.util.find_spec("gguf") is None:
            sys.path.append(str(found / "gguf-py"))
        out.mkdir(parents=True, exist_ok=True)
        describe(out)
        sizes = Sizes(prompts, depths, streams, requests=requests, threads=f"-t {threads}" if threads else "")
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            asked = [(model, weights) for weights in types.lower().split(",") for model in models.split(",")]
            done = [record(tools, *each, out, Path(place), sizes, clock) for each in asked]
    except UserError as e:
        print(e, file=sys.stderr)
        raise typer.Exit(2) from None
    print(f"{sum(done)} of {len(done)} are whole in {out}" + ("" if all(done) else "; the same command goes on"))


if __name__ == "__main__":
    typer.run(main)
