# One command a habit; CONTRIBUTING.md says when to use which. Needs make and Python 3.11, 3.12 or 3.13: the first of
# python3.11, python3.12, python3.13 and python3 that is one, or PYTHON=.
# Which registry packages come from is pip's own configuration; which versions, constraints.txt.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.tidegate-setup
SCRIPTS := $(wildcard scripts/*.py examples/*.py benchmarks/*.py)
# Tests that are too slow to run after each change; types show the calls in them that do not fit any more.
CLUSTER_TESTS := $(wildcard tests/cluster/*.py)
ARGS ?=
# Percent of the lines of a module: `make cov` lists those with less.
UNDER ?= 80
# Processes of a test run: JOBS, or as many as there are processors, up to eight. `make test` takes at least three: those
# with the tests on Ray and on S3 wait for others most of the time. The quick tests wait for nobody, and each process more
# imports everything and loads every kernel once more.
JOBS ?=
PROCESSORS := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 8 ? 8 : n)))
PROCESSES = $(or $(JOBS),$(shell echo $$(($(PROCESSORS) < 3 ? 3 : $(PROCESSORS)))))

RUN_TESTS = "$(BIN)/pytest" --numprocesses $(PROCESSES) --dist loadgroup --no-loadscope-reorder --max-worker-restart 0 \
    --durations 15
# What says most within a minute on two quiet processors; CONTRIBUTING.md says what is left to `make test`.
FAST := --kinds "unit, contract, house, docs, local jobs" -m "not slow"
# Where unit and contract tests run as well, if the machine has these Pythons.
OTHER_PYTHONS := 3.12 3.13
test-fast cov: PROCESSES = $(or $(JOBS),$(PROCESSORS))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The processes of a job and of a test run import the same modules: they find them compiled, wherever this runs.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup environments demo test test-fast test-newest test-lowest test-pythons simulate cov check format bench bench-all docs pins clean

help:  ## Show the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 13

setup: $(STAMP)  ## Make .venv and install tidegate in it, with uv where it is found (again only after pyproject.toml or constraints.txt changed)

# Another Python than that of .venv is asked for: make it anew.
ifneq ($(PYTHON),)
ifneq ($(shell "$(PYTHON)" -c 'import sys; print(sys.version_info[:2])' 2>&1),$(shell "$(BIN)/python" -c 'import sys; print(sys.version_info[:2])' 2>/dev/null))
.PHONY: $(STAMP)
ANEW := yes
endif
endif

$(STAMP): pyproject.toml constraints.txt
	@wanted="$(PYTHON)"; \
	for python in $${wanted:-python3.11 python3.12 python3.13 python3}; do \
	    if "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	    then found="$$python"; break; fi; \
	done; \
	if [[ -z "$${found:-}" ]]; then \
	    echo "tidegate needs Python 3.11, 3.12 or 3.13, and $${wanted:-none of python3.11, python3.12, python3.13 and python3} is not one." >&2; \
	    echo "Install it (Debian 13, Ubuntu 24.04: apt install python3 python3-venv) or name it: make setup PYTHON=..." >&2; \
	    exit 1; \
	fi; \
	[[ -z "$(ANEW)" ]] && "$(BIN)/python" -c 'import pip' 2>/dev/null || "$$found" -m venv --clear "$(VENV)" || { \
	    echo "$$found cannot make a virtual environment (Debian: apt install python3-venv)." >&2; exit 1; }
	@echo "installing tidegate and what it needs in $(VENV); the first time this takes some minutes ..."
	@if command -v uv >/dev/null 2>&1; \
	then uv pip install --python "$(BIN)/python" --constraint constraints.txt --editable '.[examples,dev]'; \
	else "$(BIN)/python" scripts/show_install.py constraints.txt \
	    "$(BIN)/python" -u -m pip install --progress-bar off --constraint constraints.txt --editable '.[examples,dev]'; \
	fi
	@touch "$@"

demo: $(STAMP)  ## Run the flight delays demo on Ray and Spark; ARGS= goes to it
	@"$(BIN)/python" examples/flight_delays.py $(ARGS)

test: $(STAMP)  ## Run the tests, JOBS= of them at a time; ARGS= goes to pytest
	$(RUN_TESTS) $(ARGS)

test-fast: $(STAMP)  ## Run the quick ones of the tests that need neither Ray nor S3; ARGS= goes to pytest
	$(RUN_TESTS) $(FAST) $(ARGS)

test-newest: $(STAMP)  ## Run the quick tests with the newest versions that are known; ARGS= goes to the script
	@"$(BIN)/python" scripts/test_versions.py newest $(ARGS)

test-lowest: $(STAMP)  ## Run the quick tests with the lowest versions that pyproject.toml allows; ARGS= goes to the script
	@"$(BIN)/python" scripts/test_versions.py lowest $(ARGS)

test-3.12 test-3.13: test-%: $(STAMP)
	@"$(BIN)/python" scripts/test_versions.py $* $(ARGS)

environments: $(STAMP)  ## Make the environments that test-pythons runs in
	@for version in $(OTHER_PYTHONS); do \
	    "$(BIN)/python" scripts/test_versions.py $$version --if-there --install-only; \
	done

test-pythons: $(STAMP)  ## Run unit and contract tests on Python 3.12 and 3.13, as far as they are there
	@failed=0; for version in $(OTHER_PYTHONS); do \
	    "$(BIN)/python" scripts/test_versions.py $$version --if-there --kinds "unit, contract" $(ARGS) || failed=1; \
	done; exit $$failed

simulate: $(STAMP)  ## Run random jobs under faults in the simulator; ARGS= goes to it, such as "--seeds 0..999 --workers 2"
	@PYTHONPATH=tests/support "$(BIN)/python" -m random_jobs $(ARGS)

cov: $(STAMP)  ## Say which modules the quick tests hardly touch; ARGS= chooses other tests
	$(RUN_TESTS) --cov --cov-report html --cov-report "" $(or $(ARGS),$(FAST))
	@"$(BIN)/coverage" report --sort cover | awk 'NR <= 2 || $$1 == "TOTAL" || $$NF + 0 < $(UNDER)'
	@echo "modules under $(UNDER) % are listed; line by line: .htmlcov/index.html"

check: $(STAMP)  ## Lint, format, types, import directions: reports all, changes nothing
	@failed=(); \
	run() { echo "== $$*"; "$(BIN)/$$@" || failed+=("$$1"); }; \
	run ruff check; \
	run ruff format --check --quiet; \
	run mypy; \
	run mypy $(SCRIPTS); \
	run mypy $(CLUSTER_TESTS); \
	run lint-imports --no-logo; \
	if (($${#failed[@]})); then echo "make check: failed: $${failed[*]}" >&2; exit 1; fi

format: $(STAMP)  ## Format, and fix what ruff can fix safely
	"$(BIN)/ruff" check --fix-only --quiet
	"$(BIN)/ruff" format

bench: $(STAMP)  ## Measure keyed throughput; ARGS= goes to the benchmark
	"$(BIN)/python" benchmarks/keyed_throughput.py $(ARGS)

bench-all: $(STAMP)  ## Run the benchmarks of docs/performance.md, and make it anew; ARGS= goes to it
	"$(BIN)/python" benchmarks/bench_all.py $(ARGS)

docs: $(STAMP)  ## Build the documentation site in build/site, and follow its links
	@"$(BIN)/python" -c 'import mkdocs, material' 2>/dev/null || { \
	    echo "installing what the site needs ..."; \
	    "$(BIN)/python" -m pip install --quiet --constraint constraints.txt --editable '.[docs]'; }
	@NO_MKDOCS_2_WARNING=1 "$(BIN)/python" -m mkdocs build --clean
	@"$(BIN)/python" scripts/check_site.py build/site

pins: $(STAMP)  ## Write what .venv holds to constraints.txt
	"$(BIN)/pip" freeze --all --exclude-editable --exclude tidegate --exclude pip --exclude wheel > constraints.new
	mv constraints.new constraints.txt
	@touch "$(STAMP)"

clean:  ## Remove everything that was generated, .venv included
	rm -rf "$(VENV)" .venv-* .demo .bench .debian .coverage .coverage.* .htmlcov build dist *.egg-info spark-warehouse metastore_db derby.log
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
