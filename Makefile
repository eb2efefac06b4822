# Every target makes .venv by itself; nothing is needed but Python 3.11 or newer.

PYTHON := .venv/bin/python
READY := .venv/.ready
WORKERS ?= 3
ROUNDS ?= 5
SECONDS ?= 300
TARGETS ?= $(notdir $(wildcard tests/fuzz/corpus/*))
CUTS ?= 100

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-chaos test-power fuzz check format bench docs clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) $(READY)-peers-demo ## A node and a pipeline on local Spark: sockets in, lanes, a ledger
	$(PYTHON) examples/pipeline.py

test: $(READY) $(READY)-peers-test ## Run all tests (WORKERS=3 at a time; ARGS are pytest's)
	$(PYTHON) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-chaos: $(READY) ## Kill the processes of pipelines 50 times (ROUNDS=5 of ten kills)
	@mkdir -p .chaos && rm -f .chaos/kills.jsonl
	TURNLANE_KILL_ROUNDS=$(ROUNDS) TURNLANE_KILL_REPORT=$(CURDIR)/.chaos/kills.jsonl \
		$(PYTHON) -m pytest -n 2 tests/spark/test_kill.py $(ARGS)
	@cat .chaos/kills.jsonl

fuzz: $(READY) ## Search for bytes that break a parser (SECONDS=300 for each of TARGETS)
	@for target in $(TARGETS); do \
		$(PYTHON) -m tests.fuzz.run $$target $(SECONDS) || exit; \
	done

test-power: $(READY) $(READY)-peers-power ## Cut the power of a virtual machine CUTS=100 times (ARGS: see --help)
	$(PYTHON) -m tests.power.cuts --cuts $(CUTS) $(ARGS)

check: $(READY) ## Lint, formatting, types, import contracts, plain English
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy
	.venv/bin/lint-imports
	$(PYTHON) scripts/prose.py --limit 15 src docs tests

format: $(READY) ## Format the code and fix what ruff can fix
	$(PYTHON) -m ruff check --fix-only
	$(PYTHON) -m ruff format

bench: $(READY) $(READY)-peers-bench ## Run all benchmarks, write docs/benchmarks.md
	$(PYTHON) -m benchmarks.report

docs: $(READY)-docs ## Build the documentation into site/
	.venv/bin/zensical build --strict --clean

clean: ## Remove everything that is made, .venv included
	rm -rf .venv site dist build .demo .hypothesis .fuzz .chaos
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt scripts/bootstrap
	scripts/bootstrap dev,bench
	@touch $@

$(READY)-docs: $(READY)
	scripts/bootstrap docs
	@touch $@

$(READY)-peers-%: scripts/peers | $(READY)
	scripts/peers $*
	@touch $@
