"""Compiles the modules in which a simulation spends its time, with mypyc, where there is a C compiler.

All else is in pyproject.toml. Where they cannot be compiled, or ``KVSIM_PURE`` is set, the same files run as Python;
``policies/compiled.py`` decides which are used.
"""

import os
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

HOME = Path(__file__).resolve().parent
sys.path.insert(0, str(HOME / "policies"))  # Alone: the rest is not needed to build it.
from compiled import PURE, STAMP, stamp_of  # noqa: E402

COMPILED = [
    "kvsim.costs.pass_price",
    "kvsim.scenario.content",
    "kvsim.simulation.arrivals",
    "kvsim.simulation.backend",
    "kvsim.simulation.cache_states",
    "kvsim.simulation.cluster.cluster",
    "kvsim.simulation.cluster.replica",
    "kvsim.simulation.cluster.routing",
    "kvsim.simulation.cluster.routers.prefix_tree",
    "kvsim.simulation.counts",
    "kvsim.simulation.job",
    "kvsim.simulation.recorder",
    "kvsim.simulation.request_log",
    "kvsim.simulation.schedulers.base",
    "kvsim.simulation.schedulers.host_prompt_cache",
    "kvsim.simulation.schedulers.llama_server",
    "kvsim.simulation.schedulers.slot_server",
    "kvsim.simulation.schedulers.slots",
    "kvsim.simulation.schedulers.static",
    "kvsim.simulation.schedulers.vllm",
    "kvsim.simulation.schedulers.vllm_async",
    "kvsim.simulation.server",
    "kvsim.simulation.step_loop",
    "policies.cells.arena",
    "policies.cells.arena_cells",
    "policies.cells.free_cells",
    "policies.cells.ordering",
    "policies.cells.search",
    "policies.cells.sequence_cells",
    "policies.cells.stream_arenas",
    "policies.cells.tile_counts",
    "policies.cells.window",
    "policies.compaction.triggers",
    "policies.content",
    "policies.paging.admission",
    "policies.paging.block_manager",
    "policies.paging.block_table",
    "policies.paging.blocks",
    "policies.paging.cache_groups",
    "policies.paging.free_lists.lru",
    "policies.paging.free_lists.uncached",
    "policies.paging.group_manager",
    "policies.paging.large_pages",
    "policies.paging.prefix_agreement",
    "policies.paging.state_groups",
    "policies.paging.token_blocks",
    "policies.placement.blocks",
    "policies.placement.cells",
    "policies.placement.parts",
    "policies.placement.regions",
    "policies.placement.repeats",
    "policies.placement.rule",
    "policies.placement.stream_cells",
    "policies.placement.streams",
    "policies.placement.tokens",
]
"""Modules that handle requests and steps one by one. In most of the rest NumPy does the work: they gain little."""
TYPED = [
    "kvsim.costs.tables",
    "kvsim.errors",
    "kvsim.simulation.schedulers.__init__",
    "policies.__init__",
    "policies.compiled",
    "policies.paging.free_lists.protocol",
    "policies.vocabulary",
    "workloads.__init__",
    "workloads.request",
]
"""Modules that stay Python, but whose types the compiled ones rely on; of all others they check types as they run."""
SOURCES = [f"{name.replace('.', '/')}.py" for name in (*COMPILED, *TYPED)]
"""What a stamp names, from this folder."""

LIBRARY = "policies.compiled"
"""One library holds all of their code, in the module of this name and ``__mypyc``; they themselves only refer to it."""
WRITTEN = Path("build", "core")
"""The folder for the C that mypyc writes."""
SETTINGS = f"""[mypy]
ignore_missing_imports = True
[mypy-{",".join(f"{package}.*" for package in ("kvsim", "policies", "workloads", "pandas", "scipy", "simpy"))}]
follow_imports = skip
[mypy-{",".join(name.removesuffix(".__init__") for name in TYPED)}]
follow_imports = normal
"""
"""For mypy, which is to look at nothing else: that takes seconds, and all of the packages, a minute."""


def why_not() -> str:
    """Why nothing can be compiled here, in words; empty if it can be tried."""
    if os.environ.get(PURE):
        return f"{PURE} is set"
    if find_spec("mypyc") is None:
        return "mypy is not installed"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if sys.platform != "win32" and shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    return ""


def written_in_c() -> list[Extension]:
    """The compiled modules, of which mypyc has written the C. Raises ``SystemExit`` where it finds a fault."""
    from mypyc.build import mypycify

    WRITTEN.mkdir(parents=True, exist_ok=True)
    settings = WRITTEN / "mypy.ini"
    settings.write_text(SETTINGS, encoding="utf-8")
    found = mypycify(
        [f"--config-file={settings}", *SOURCES[: len(COMPILED)]],
        opt_level="1",  # 2 takes half as long again to compile, and runs no faster.
        debug_level="0",
        multi_file=True,  # So that files are compiled beside one another.
        group_name=LIBRARY,
        target_dir=str(WRITTEN),
    )
    for each in found:
        # mypyc puts headers into a folder for the library's package, and includes them without it.
        each.include_dirs.append(str(WRITTEN / "policies"))
        # A compiler that is newer than mypyc may have a warning for it.
        each.extra_compile_args = [argument for argument in each.extra_compile_args if argument != "-Werror"]
    return found


def extensions() -> list[Extension]:
    """What there is to build; where nothing can be, it says why."""
    in_place = {"editable_wheel", "--inplace"} & {*sys.argv}
    if not in_place and "bdist_wheel" not in sys.argv:
        return []  # pip only asks for names and versions
    reason = why_not()
    if not reason:
        stamp = HOME / STAMP
        if in_place and stamp.is_file() and stamp.read_text(encoding="utf-8") == stamp_of(SOURCES):
            return []
        print("kvsim: compiling the simulator's core, half a minute on two processors", file=sys.stderr)
        try:
            return written_in_c()
        except (Exception, SystemExit) as e:
            reason = f"mypyc ended with {e!r}"
    print(f"kvsim: the simulator's core stays Python: {reason}", file=sys.stderr)
    return []


class BuildCore(build_ext):
    """Builds the compiled modules, several files at once, and leaves a stamp; without them where that fails."""

    def run(self) -> None:
        """Compile, and write the stamp when all is done."""
        if not self.extensions:
            return
        folder = HOME if self.inplace else Path(self.build_lib)
        stamp, sources = folder / STAMP, stamp_of(SOURCES)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text("")
        try:
            super().run()
        except Exception as e:
            print(f"kvsim: the core stays Python: the compiler failed ({type(e).__name__})", file=sys.stderr)
        else:
            for each in {HOME, Path(self.build_lib)}:
                self.remove_others(each)
            stamp.write_text(sources, encoding="utf-8")

    def remove_others(self, folder: Path) -> None:
        """Remove modules that an earlier build compiled, and this one did not: nothing would tell when they are old."""
        built = {folder / self.get_ext_filename(each.name) for each in self.extensions}
        for package in ("kvsim", "policies"):
            for path in {*(folder / package).rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}")} - built:
                path.unlink()

    def build_extensions(self) -> None:
        """Have only those files compiled that changed, several at once."""
        compile_files = self.compiler.compile
        for_all = [find_spec("mypyc").origin, *map(str, WRITTEN.rglob("*.h"))]

        def compile_changed(sources: list[str], output_dir: str, **options: object) -> list[str]:
            files = self.compiler.object_filenames(sources, output_dir=output_dir)
            changed = [s for s, file in zip(sources, files, strict=True) if newer_group([s, *for_all], file)]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda source: compile_files([source], output_dir=output_dir, **options), changed))
            return files

        self.compiler.compile = compile_changed
        super().build_extensions()


if __name__ == "__main__":
    setup(ext_modules=extensions(), cmdclass={"build_ext": BuildCore})
