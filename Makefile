# Each target prepares .venv by itself; a fresh machine needs Python 3.11, git and make.
# Where to find packages is pip's configuration (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...): see CONTRIBUTING.md.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# One more than the two cores it is meant for: tests wait for deadlines and disks for a third of their time.
WORKERS ?= 3
ON_WORKERS = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Tests that take long run with some of their cases, drawn by the seed (tests/support/draw.py); with all if DRAW=.
DRAW ?= 1
READY := $(VENV)/.ready
READY_BENCH := $(VENV)/.ready-bench
READY_UI := $(VENV)/.ready-ui
TRAINERS := $(VENV)-trainers
READY_TRAINERS := $(TRAINERS)/.ready
OLDEST := $(TRAINERS)-oldest
READY_OLDEST := $(OLDEST)/.ready
PIP_TRAINERS := $(TRAINERS)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt

.PHONY: help setup test test-real test-trainers test-trainers-oldest test-ui test-versions lint style dist demo bench bench-many soak soak-trainers docs docs-serve clean

help:
	@echo "make setup   prepare $(VENV)"
	@echo "make test    ruff, mypy and the suite (DRAW= for all cases of the tests that take long)"
	@echo "make test-real  the tests of shared stores on Ceph's S3 server and Debian's PostgreSQL, installed by apt-get if need be"
	@echo "make test-trainers  the integrations on the real libraries of the trainers, in an environment of their own"
	@echo "make test-trainers-oldest  the core of these tests on the oldest supported releases of the libraries"
	@echo "make test-ui  the web page in Debian's Chromium"
	@echo "make test-versions  the core of the suite on the oldest and on the newest versions of all dependencies (VERSIONS='oldest 2.15.0/3.14': a release of torch, on a release of Python; SUITE=whole runs all tests, SUITE=smoke a few)"
	@echo "make lint    ruff and mypy"
	@echo "make dist    build wheel and sdist, and try the wheel in a fresh environment"
	@echo "make demo    train, be killed, resume, fine-tune: under two minutes"
	@echo "make docs    run the snippets of the docs, check their links, build the site into build/site"
	@echo "make docs-serve  build it and show it on http://127.0.0.1:8000"
	@echo "make bench   measure against the peers and the machine's limits (BENCH='--case first --rounds 3')"
	@echo "make bench-many  measure 100,000 commits, 4,096 simulated ranks and 100,000 tensors (1.1 GB in TMPDIR)"
	@echo "make soak    the long tests, hours of them (SOAK='tests/crash -k sigkill' for some; docs/testing.md says how long each takes)"
	@echo "make soak-trainers  the same for the integrations"

$(BIN)/python:
	@echo "setup 1/4: creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ckptstore needs Python 3.11 or newer")'
	@$(PYTHON) -m venv $(VENV)

# torch comes first, alone, so that no other package decides which build of it is installed.
$(READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "setup 2/4: installing torch (the long one)"
	@$(PIP) install -c constraints.txt torch setuptools
	@echo "setup 3/4: installing the other requirements"
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[s3,obstore,plot,sign,watch,ui,test,dev,docs]'
	@echo "setup 4/4: checking"
	@$(BIN)/python -m pip check --disable-pip-version-check
	@touch $@

$(READY_BENCH): $(READY)
	@echo "setup: installing the peers that the benchmarks measure"
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[s3,obstore,ui,test,dev,docs,bench]'
	@touch $@

setup: $(READY)

# What tests share is made once: tests/conftest.py says what a worker runs as a whole, and puts the longest first.
# mypy, which uses one core, looks at the types meanwhile, and has the last word.
test: style
	@$(BIN)/mypy > $(VENV)/mypy.txt 2>&1 & types=$$!; trap "kill $$types 2> /dev/null || true" EXIT; failed=0; \
		CKPTSTORE_TEST_DRAW=$(DRAW) $(BIN)/python -m pytest $(ON_WORKERS) $(if $(REPORT),--junitxml $(REPORT)) || failed=$$?; \
		wait $$types || failed=$$?; cat $(VENV)/mypy.txt; exit $$failed

test-real: $(READY)
	@CKPTSTORE_TEST_DRAW=$(DRAW) $(BIN)/python -m tests.real $(ON_WORKERS)

# The trainers' libraries are in an environment of their own. DeepSpeed is built without its operators, which it
# compiles when they are used. torchtitan wants a version of datasets that refuses the newest fsspec, and needs none.
$(READY_TRAINERS): pyproject.toml constraints.txt
	@echo "setup 1/3: installing torch into $(TRAINERS)"
	@$(PYTHON) -m venv $(TRAINERS)
	@$(PIP_TRAINERS) torch setuptools
	@echo "setup 2/3: installing the trainers' libraries"
	@$(PIP_TRAINERS) --no-build-isolation -e '.[s3,test,trainers]'
	@echo "setup 3/3: installing DeepSpeed and torchtitan"
	@DS_BUILD_OPS=0 $(PIP_TRAINERS) --no-build-isolation -e '.[deepspeed]'
	@$(PIP_TRAINERS) einops tensorboard tyro
	@$(PIP_TRAINERS) --no-deps torchtitan spmd_types torch_checkpointing
	@touch $@

test-trainers: $(READY_TRAINERS)
	@CKPTSTORE_TEST_DRAW=$(DRAW) CKPTSTORE_TEST_TRAINERS=1 $(TRAINERS)/bin/python -m pytest tests/trainers $(ON_WORKERS)

# Torch, and all that may be new, is that of the other environment. DeepSpeed is built, with setuptools of today.
$(READY_OLDEST): $(READY_TRAINERS) constraints-trainers-oldest.txt
	@echo "setup: installing the oldest supported releases into $(OLDEST)"
	@$(PYTHON) -m venv --clear $(OLDEST)
	@folder() { "$$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
		echo "import site; site.addsitedir('$$(folder $(abspath $(TRAINERS)))')" > "$$(folder $(OLDEST))/trainers.pth"
	@$(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt setuptools wheel
	@DS_BUILD_OPS=0 $(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install --no-build-isolation -r constraints-trainers-oldest.txt
	@touch $@

test-trainers-oldest: $(READY_OLDEST)
	@CKPTSTORE_TEST_TRAINERS=1 $(OLDEST)/bin/python -m pytest tests/trainers -m oldest $(ON_WORKERS)

# Playwright drives Debian's Chromium, so it downloads none.
$(READY_UI): $(READY)
	@echo "setup: installing what drives a browser"
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[s3,obstore,ui,test,dev,docs,test-ui]'
	@touch $@

test-ui: $(READY_UI)
	@CKPTSTORE_TEST_UI=1 $(BIN)/python -m pytest tests/ui/chromium

test-versions: $(READY)
	@WORKERS=$(WORKERS) SUITE=$(SUITE) $(BIN)/python -m tests.versions $(VERSIONS)

dist: $(READY)
	@$(BIN)/python -m tests.dist

lint: style
	@$(BIN)/mypy

style: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --quiet --check .

demo: $(READY)
	@$(BIN)/python -m demo

bench: $(READY_BENCH)
	@$(BIN)/python -m benchmarks $(BENCH)

bench-many: $(READY_BENCH)
	@for each in "many_commits --commits 100000" "simulated_ranks --ranks 4096" \
		"simulated_ranks --ranks 4096 --restore" "many_tensors --tensors 100000 --rounds 1"; do \
		echo "python -m benchmarks.$$each"; $(BIN)/python -m benchmarks.$$each || exit 1; done

# What a long test prints is shown when it has passed, so the output is a report of what was tried.
soak: $(READY)
	@CKPTSTORE_TEST_PROFILE=soak $(BIN)/python -m pytest -m soak -v --timeout 3600 $(SOAK)

soak-trainers: $(READY_TRAINERS)
	@CKPTSTORE_TEST_TRAINERS=1 CKPTSTORE_TEST_PROFILE=soak $(TRAINERS)/bin/python -m pytest tests/trainers -m soak -v --timeout 3600 $(SOAK)

# `python -m tests.support.snippets` writes what the snippets print now into the pages.
docs: $(READY)
	@$(BIN)/python -m pytest -m docs $(ON_WORKERS) $$(grep -rl --include='test_*.py' 'mark\.docs' tests)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "docs: build/site/index.html"

docs-serve: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

clean:
	@rm -rf $(VENV) $(TRAINERS) $(VENV)-dist $(OLDEST) $(VENV)-oldest $(VENV)-newest $(VENV)-[0-9]* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
