# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# Without bytecode of 25,000 files, most of which never run: the others get theirs when they do,
# or every process would compile the libraries that it imports.
unexport PYTHONDONTWRITEBYTECODE
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

# Groups of tests with real processes that take minutes; each has a target of its own.
TRAINING = chaos families train_sharded train_zero launch train trl calibrate extending
SERVING = serve_api browser generate farm quantize
TRACING = tracing
KERNELS = kernels
CLUSTER = cluster
HEAVY = $(TRAINING) $(SERVING) $(TRACING) $(KERNELS) $(CLUSTER)
# Three at a time on two cores, since many wait for processes of their own; in the order given, the
# long ones first.
BESIDE = OMP_NUM_THREADS=1 TIGHTFIT_CROWD_SECONDS=20 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
ON_CLUSTER = tests/integration/$(CLUSTER)
SPEEDS = $(ON_CLUSTER)/test_cluster_stage.py::test_the_chosen_way_is_near_the_best
ON_SLURM = $(foreach file,farm inventory lab submit,$(ON_CLUSTER)/test_cluster_$(file).py)

.PHONY: help install demo demo-full test fuzz kills test-bare test-training test-serving test-tracing test-long test-kernels test-cluster test-slurm test-hosts test-gpu check bench format docs site clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: .venv/.installed  ## make .venv with everything the project needs

# torch first and pinned: anything that depends on it then finds it there and pulls no other build.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch setuptools wheel ninja py-cpuinfo
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed  # its set-up asks torch, which an isolated build lacks
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps liger-kernel  # traced without its kernels, hence without triton
	touch $@

demo: install  ## the main job on a CPU with a real small model: no GPU, no hub
	PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/demo.sh

demo-full: install  ## the same with harder questions, more training and more formats
	PATH="$(CURDIR)/$(BIN):$$PATH" DEMO_FULL=1 bash scripts/demo.sh

test: install test-bare  ## every test that needs no GPU
	$(BESIDE) $(foreach group,$(HEAVY),--ignore tests/integration/$(group))

test-training: install  ## runs that are killed, starved, cut off and sharded, every family's whole job: minutes
	$(BESIDE) $(addprefix tests/integration/,$(TRAINING))

test-serving: install  ## the HTTP API under load, the page in a browser, killed batches, 4-bit files: minutes
	$(BESIDE) $(addprefix tests/integration/,$(SERVING))

test-tracing: install  ## traces of many real models, strategies and shardings: minutes
	$(BESIDE) $(addprefix tests/integration/,$(TRACING))

test-long: install  ## training, serving and tracing at once
	$(BESIDE) $(addprefix tests/integration/,$(TRAINING) $(SERVING) $(TRACING))

# Apart from .venv: with triton there, libraries would behave as on a machine that has a GPU.
# Its interpreter cannot loop with a newer numpy.
test-kernels: install  ## our GPU kernels in triton's interpreter
	test -d .venv/triton || $(PIP) --no-deps --target .venv/triton triton 'numpy<2.4'
	OMP_NUM_THREADS=1 TIGHTFIT_TRITON="$(CURDIR)/.venv/triton" $(BIN)/python -m pytest $(addprefix tests/integration/,$(KERNELS))

# What compares speeds, alone. Then what needs the one Slurm of a machine, beside what does not.
test-cluster: install  ## a real Slurm of five nodes, hosts as namespaces: root, minutes
	bash tests/integration/cluster/slurm_lab.sh install
	$(BIN)/python -m pytest $(SPEEDS)
	$(MAKE) --jobs 2 --output-sync test-slurm test-hosts

test-cluster test-slurm test-hosts: export OMP_NUM_THREADS = 1
test-slurm: install
	$(BIN)/python -m pytest $(ON_SLURM)

test-hosts: install
	$(BIN)/python -m pytest $(ON_CLUSTER) $(addprefix --ignore ,$(ON_SLURM)) --deselect $(SPEEDS)

# With the torch of that machine: a CUDA build is what these tests are about.
test-gpu:  ## engines, packed rows and every family's first plan on a CUDA GPU, where there is one
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu

# The same tests as a part of `make test`, with 10,000 cases of each kind for their 200.
fuzz: install  ## hostile files and flags through every reader: an hour or more
	$(BIN)/python benchmarks/fuzz.py

# Gone on with where the last call stopped: hours in all.
kills: install  ## kill -9 and bad disks at many moments of every verb that writes
	nice $(BIN)/python benchmarks/kill_verbs.py
	nice $(BIN)/python benchmarks/fault_verbs.py

test-bare: install  ## the planner in an environment that has no torch
	$(BIN)/python scripts/test_bare.py

check: install  ## what CI runs before the tests: style, types, rooms, generated files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .  # where an import sorts depends on other files, which its cache leaves out
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/write_cli_docs.py --check
	$(BIN)/python scripts/write_readme.py --check

# Two at a time; then alone what is timed.
BENCHMARKS = published_memory closed_form_vs_trace published_time h200_memory h200_allocator h200_trace \
	other_trainers farm_simulation h200_throughput h200_families compiled_traces h200_sweep measure_demo_step \
	measure_decoding
bench: install  ## predicted against published memory and time; fails if it got worse
	printf '%s\n' $(BENCHMARKS) | xargs -P 2 -I NAME $(BIN)/python benchmarks/NAME.py --check
	$(BIN)/python benchmarks/measure_cli_seconds.py --check

format: install  ## let ruff rewrite what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install  ## write docs/cli.md again from --help
	$(BIN)/python scripts/write_cli_docs.py
	$(BIN)/python scripts/write_readme.py

site: install  ## the documentation as a static site, build/site/index.html, with a gallery
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:  ## remove what the targets made
	rm -rf .venv build demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
