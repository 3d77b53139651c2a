# Everything runs in virtual environments under .venv/, made from nothing with PYTHON.
# Each step prints one line when it passes, and all it has to say when it fails.

PYTHON ?= python3
VENV   ?= .venv/dev
ARGS   ?=
SEEDS  ?= 20000
ROUNDS ?= 50

SHELL       := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PY       := $(VENV)/bin/python
READY    := $(VENV)/.ready
BENCH    := .venv/bench
SERVE    := .venv/serve
SERVED   := .venv/bench-service
BARE     := .venv/bare
# --verifytypes looks at the first `python` on PATH and at nothing else.
PYRIGHT   = PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m basedpyright
COVERAGE  = COVERAGE_FILE=$(VENV)/.coverage $(PY) -m coverage
PIP       = -m pip install --quiet --disable-pip-version-check

# $(call step,name,command[,filter]): on success one line, with what the filter makes of the
# output; on failure the whole output.
define step
@printf '%-34s' '$(1)'; \
if out=$$( { $(2); } 2>&1 ); then echo ok$(if $(3),"  $$(echo "$$out" | $(3))"); \
else printf 'FAILED\n\n%s\n\n' "$$out"; exit 1; fi
endef

.PHONY: help
help: ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | \
	while IFS='|' read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

.PHONY: test
test: lint bare pytest ## Everything that must hold before a commit: lint, bare, pytest

.PHONY: lint
lint: $(READY) ## Format, lint, types, imports
	$(call step,ruff format,$(PY) -m ruff format --check .)
	$(call step,ruff check,$(PY) -m ruff check --quiet .)
	$(call step,mypy (strict),$(PY) -m mypy)
	$(call step,pyright (strict),$(PYRIGHT))
	$(call step,pyright --verifytypes,$(PYRIGHT) --verifytypes tarry --ignoreexternal)
	$(call step,import contracts,$(VENV)/bin/lint-imports --no-logo)

.PHONY: bare
bare: $(READY) ## Install the built wheel where nothing else is, and load every public name
	@rm -rf $(BARE)
	$(call step,wheel builds,$(PY) -m hatchling build -t wheel -d $(BARE)/dist)
	$(call step,wheel installs without extras,$(PY) -m venv --without-pip $(BARE)/venv && \
	  PIP_FIND_LINKS= $(PY) -m pip --python $(BARE)/venv/bin/python install --quiet --no-index \
	  --disable-pip-version-check $(BARE)/dist/*.whl)
	$(call step,and needs no third party,$(BARE)/venv/bin/python -I .ci/bare.py)

# The library's tests are measured; the others run beside them, on the second core.
MEASURED := tests/core tests/runtime tests/telemetry tests/testing
SERVICE  := tests/chaos tests/client tests/service
BESIDE   := $(filter-out $(MEASURED) $(SERVICE) %/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))

.PHONY: pytest
pytest: $(READY) ## Run the tests; ARGS are for pytest
	$(call step,browser,.ci/browser)
	@$(MAKE) -j 2 --output-sync=target beside measured service

.PHONY: measured
measured: $(READY)
	$(call step,tests of the library ($(VENV)),$(COVERAGE) run -m pytest -q $(ARGS) $(MEASURED) tests/test_*.py,tail -n 1)
	$(call step,coverage of the core is 100 %,$(COVERAGE) report --include='*/tarry/core/*' --fail-under=100)

.PHONY: beside
beside: $(READY)
	$(call step,tests of all else ($(VENV)),$(PY) -m pytest -q $(ARGS) $(BESIDE),tail -n 1)

.PHONY: service
service: $(READY)
	$(call step,tests of the service ($(VENV)),$(PY) -m pytest -q $(ARGS) $(SERVICE),tail -n 1)

.PHONY: serve
serve: $(SERVE)/.ready ## Start the retry service on this machine; ARGS are for `tarry serve`
	@echo 'For `tarry` in another terminal: export PATH="$$PWD/$(SERVE)/bin:$$PATH"'
	@$(SERVE)/bin/tarry serve --dev $(ARGS)

.PHONY: demo
demo: $(SERVE)/.ready ## See tasks being retried to success
	@$(SERVE)/bin/tarry demo $(ARGS)

.PHONY: chaos
chaos: $(READY) ## Simulate SEEDS runs of the service with faults, and kill a real one ROUNDS times
	@$(PY) -m tests.chaos.simulation --seeds $(SEEDS)
	@ROUNDS=$(ROUNDS) $(PY) -m pytest -q tests/chaos/test_real.py

.PHONY: test-all
test-all: ## Run the tests with every Python from 3.11 on that this machine has
	@found=$$(.ci/interpreters) || exit 1; failed=0; \
	while read -r version python; do \
	  $(MAKE) pytest PYTHON="$$python" VENV=".venv/$$version" < /dev/null || failed=1; \
	done <<< "$$found"; exit $$failed

.PHONY: format
format: $(READY) ## Format the code and apply safe fixes
	@$(PY) -m ruff check --quiet --fix-only .
	@$(PY) -m ruff format --quiet .

.PHONY: api
api: $(READY) ## Rewrite docs/public-api.txt from the code
	@mkdir -p docs
	@$(PY) -m tests.public_api > docs/public-api.txt.new && mv docs/public-api.txt.new docs/public-api.txt

.PHONY: tables
tables: $(READY) ## Rewrite the tables of docs/ that the simulator makes
	@$(PY) -m tests.contention_table

.PHONY: bench
bench: $(BENCH)/.ready ## Run the benchmarks beside the peers; ARGS are for them
	@$(BENCH)/bin/python -m benchmarks $(ARGS)

.PHONY: bench-service
bench-service: $(SERVED)/.ready ## Run the service beside its peers; ARGS are for it
	@$(SERVED)/bin/python -m benchmarks.service $(ARGS)

.PHONY: bench-sim
bench-sim: $(READY) ## Measure the simulator; ARGS are for it
	@$(PY) -m benchmarks.simulation $(ARGS)

.PHONY: clean
clean: ## Remove environments, caches and build results
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	@find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# An environment is ready when it has the pins and tarry itself, which is installed in place, so
# that only its metadata (pyproject.toml) can go stale.
$(READY): pyproject.toml requirements-dev.txt
	$(call step,environment $(VENV),$(call environment,$(VENV)) && \
	  $(PY) $(PIP) -r requirements-dev.txt && \
	  $(PY) $(PIP) --no-build-isolation --no-deps -e .)
	@touch $@

$(SERVE)/.ready: pyproject.toml requirements-dev.txt
	$(call step,environment $(SERVE) (once),$(call environment,$(SERVE)) && \
	  $(SERVE)/bin/python $(PIP) -c requirements-dev.txt -e '.[service]')
	@touch $@

$(BENCH)/.ready: pyproject.toml requirements-bench.txt
	$(call step,environment $(BENCH),$(call environment,$(BENCH)) && \
	  $(BENCH)/bin/python $(PIP) -r requirements-bench.txt && \
	  $(BENCH)/bin/python $(PIP) -e .)
	@touch $@

$(SERVED)/.ready: pyproject.toml requirements-bench-service.txt benchmarks/service/requirements-arq.txt
	$(call step,environment $(SERVED),$(call environment,$(SERVED)) && \
	  $(SERVED)/bin/python $(PIP) -r requirements-bench-service.txt && \
	  $(SERVED)/bin/python $(PIP) --no-warn-conflicts --upgrade --target $(SERVED)/arq \
	  -r benchmarks/service/requirements-arq.txt && \
	  $(SERVED)/bin/python $(PIP) -e '.[service]')
	@touch $@

# $(call environment,directory): make it unless a whole one is there.
define environment
{ $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "tarry needs Python 3.11 or newer; $(PYTHON) is not (set PYTHON=...)"; exit 1; }; } && \
{ $(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1); }
endef
