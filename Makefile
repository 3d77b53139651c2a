# Everything runs in virtual environments under .venv/, which are created with PYTHON.
# A step prints one line when it passes, and its whole output when it fails.

PYTHON ?= python3
VENV   ?= .venv/dev
ARGS   ?=
SEEDS  ?= 20000
ROUNDS ?= 50
EXTRA  ?= service
STORE_SEEDS ?= 100

SHELL       := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Images of containers often set this variable. Then each command and service that a test starts
# compiles all its modules again, which takes half of the processor time of a start.
unexport PYTHONDONTWRITEBYTECODE

PY       := $(VENV)/bin/python
READY    := $(VENV)/.ready
BENCH    := .venv/bench
SERVE    := .venv/serve
BENCH_SERVICE := .venv/bench-service
LOWEST   := .venv/lowest
BARE     := .venv/bare
DOCS     := .venv/docs
PACKAGE  := .venv/package
TYPESCRIPT := .venv/typescript
SBOM     := .venv/sbom
# --verifytypes uses the first `python` on PATH.
PYRIGHT   = PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m basedpyright
COVERAGE  = COVERAGE_FILE=$(VENV)/.coverage $(PY) -m coverage
NPM       = cd $(TYPESCRIPT) && $(abspath $(PY)) $(abspath .ci/npm.py)
PIP       = -m pip install --quiet --disable-pip-version-check

# $(call step,name,command[,filter]): on success print one line with the filtered output; on failure
# print the whole output.
define step
@printf '%-40s' '$(1)'; \
if out=$$( { $(2); } 2>&1 ); then echo ok$(if $(3),"  $$(echo "$$out" | $(3))"); \
else printf 'FAILED\n\n%s\n\n' "$$out"; exit 1; fi
endef

.PHONY: help
help: ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | \
	while IFS='|' read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

# Three at a time on two cores: tests with processes and servers wait for a third of their time.
PARALLEL = $(MAKE) -j 3 --output-sync=target

.PHONY: test
test: $(READY) ## Run the short checks and tests: lint and unit tests, stores with real servers
	@rm -rf $(LOGS)
	@$(PARALLEL) $(LINT_TARGETS) $(SHORT_TARGETS)
	@echo 'The ten slowest tests:'
	@grep -hE '^[0-9.]+s (setup|call|teardown)' $(LOGS)/*.log | sort -rn | sed -n '1,10s/^/  /p'

.PHONY: test-all
test-all: $(READY) ## Run all checks and tests that `make test` does not run
	@$(PARALLEL) $(DOCS)/.ready $(TYPESCRIPT)/.ready programs
	@$(PARALLEL) $(LONG_TARGETS) lint-pyright lint-verifytypes coverage bare

.PHONY: programs
programs: # one after another: each may need the lock of apt-get
	$(call step,programs,.ci/programs)
	$(call step,prometheus,.ci/unpack prometheus prometheus promtool -- prometheus)
	$(call step,valkey,.ci/unpack valkey valkey-server -- valkey-server valkey-tools)

LINT_TARGETS := lint-mypy lint-style

.PHONY: lint
lint: $(READY) ## Check formatting, lint rules, types and import contracts
	@$(PARALLEL) $(LINT_TARGETS) lint-pyright lint-verifytypes

.PHONY: lint-style
lint-style: $(READY)
	$(call step,ruff format,$(PY) -m ruff format --check .)
	$(call step,ruff check,$(PY) -m ruff check --quiet .)
	$(call step,import contracts,$(VENV)/bin/lint-imports --no-logo)
	$(call step,sql files,$(PY) .ci/format_sql.py --check)

.PHONY: lint-mypy
lint-mypy: $(READY)
	$(call step,mypy (strict),$(PY) -m mypy)

.PHONY: lint-pyright
lint-pyright: $(READY)
	$(call step,pyright (strict),$(PYRIGHT))

.PHONY: lint-verifytypes
lint-verifytypes: $(READY)
	$(call step,pyright --verifytypes,$(PYRIGHT) --verifytypes tarry --ignoreexternal)

.PHONY: bare
bare: $(READY) ## Install the wheel without extras and load every public name
	@rm -rf $(BARE)
	$(call step,wheel builds,$(PY) -m hatchling build -t wheel -d $(BARE)/dist)
	$(call step,wheel installs without extras,$(PY) -m venv --without-pip $(BARE)/venv && \
	  PIP_FIND_LINKS= $(PY) -m pip --python $(BARE)/venv/bin/python install --quiet --no-index \
	  --disable-pip-version-check $(BARE)/dist/*.whl)
	$(call step,public names load without extras,$(BARE)/venv/bin/python -I .ci/bare.py)

# --- tests ---
# `make test` runs all tests, except those that `make test-all` runs:
# - in tests/integration and tests/chaos, unless their module is listed here,
# - with a marker of LONG_MARKERS, see pyproject.toml; in tests/core, also the properties.
SHORT_SIMULATION := tests/chaos/test_simulation.py
SHORT_SERVERS    := $(foreach name,postgres_store redis_store idempotency_postgres idempotency_redis, \
  tests/integration/test_$(name).py)
LONG_MARKERS     := long_run or programs

# Groups of `make test`. A group is one process of pytest. The longest come first.
SHORT_cli       := tests/cli tests/deploy
SHORT_engine    := tests/service/engine tests/service/stores
SHORT_service   := tests/client $(filter-out $(SHORT_engine) %/__pycache__, \
  $(patsubst %/,%,$(wildcard tests/service/*/)) $(wildcard tests/service/test_*.py))
SHORT_library   := tests/runtime tests/telemetry tests/testing $(wildcard tests/test_*.py)
SHORT_simulator := tests/simulator $(SHORT_SIMULATION)
SHORT_servers   := $(SHORT_SERVERS)
SHORT_core      := tests/core
SHORT_adapters  := $(filter-out $(SHORT_cli) $(SHORT_service) $(SHORT_library) $(SHORT_simulator) \
  $(SHORT_core) tests/chaos tests/integration tests/service %/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))
SHORT_TARGETS   := $(addprefix short-,engine cli service servers adapters simulator library core)

# Groups of `make test-all`.
LONG_stores      := $(filter-out $(SHORT_SERVERS),$(foreach name,idempotency migrate pgbouncer postgres \
  redis rolling,$(wildcard tests/integration/test_$(name)*.py)))
LONG_pages       := $(foreach name,in_browser docs client,$(wildcard tests/integration/test_*$(name)*.py))
LONG_integration := $(filter-out $(SHORT_SERVERS) $(LONG_stores) $(LONG_pages), \
  $(wildcard tests/integration/test_*.py))
LONG_chaos       := $(filter-out $(SHORT_SIMULATION),$(wildcard tests/chaos/test_*.py))
LONG_TARGETS     := $(addprefix long-,chaos pages integration stores marked core)
# Only the modules with a marked test are collected.
LONG_marked       = $(filter-out tests/core/% $(LONG_stores) $(LONG_pages) $(LONG_integration) $(LONG_chaos), \
  $(shell grep -rlE --include='test_*.py' 'mark\.($(subst $() or $(),|,$(LONG_MARKERS)))' tests))

# Only the tests of the service use the plugin of schemathesis; its import takes 1 s.
NO_SCHEMATHESIS := -p no:schemathesis
LOGS            := $(VENV)/tests

# $(call pytest,group,paths,marker expression): ARGS may select no test, for which pytest exits with 5.
define pytest
@mkdir -p $(LOGS)
$(call step,tests: $(1) ($(VENV)),{ $(PY) -m pytest -q --durations=10 $(if $(filter %service,$(1)),,$(NO_SCHEMATHESIS)) \
  $(if $(3),-m '$(3)') $(ARGS) $(2) $(if $(ARGS),|| [[ $$? == 5 ]]); } | tee $(LOGS)/$(1).log,tail -n 1)
endef

.PHONY: pytest
pytest: $(READY) ## Run the tests of `make test` and `make test-all`; ARGS is passed to pytest
	@$(PARALLEL) $(DOCS)/.ready $(TYPESCRIPT)/.ready programs
	@$(PARALLEL) $(LONG_TARGETS) $(SHORT_TARGETS)

.PHONY: $(SHORT_TARGETS) $(LONG_TARGETS)
$(SHORT_TARGETS): short-%: $(READY)
	$(call pytest,$*,$(SHORT_$*),not ($(LONG_MARKERS)$(if $(filter core,$*), or hypothesis)))

long-chaos long-integration long-pages long-stores: long-%: $(READY)
	$(call pytest,$@,$(LONG_$*))

long-marked: $(READY)
	$(call pytest,$@,$(LONG_marked),$(LONG_MARKERS))

long-core: $(READY)
	$(call pytest,$@,$(SHORT_core),$(LONG_MARKERS) or hypothesis)

# A measurement, with the tests of `make test`. Coverage triples their time.
.PHONY: coverage
coverage: $(READY) ## Check that the short tests of the core cover all its branches
	$(call step,short tests of the core,$(COVERAGE) run -m pytest -q $(NO_SCHEMATHESIS) \
	  -m 'not ($(LONG_MARKERS) or hypothesis)' $(SHORT_core),tail -n 1)
	$(call step,coverage of the core is 100 %,$(COVERAGE) report --fail-under=100)

.PHONY: mutants
mutants: $(READY) ## List faults in the source that no test notices; ARGS is passed to .ci/mutate.py
	@$(PY) .ci/mutate.py $(ARGS)

.PHONY: serve
serve: $(SERVE)/.ready ## Start the retry service on this machine; ARGS is passed to `tarry serve`
	@echo 'For `tarry` in another terminal: export PATH="$$PWD/$(SERVE)/bin:$$PATH"'
	@$(SERVE)/bin/tarry serve --dev $(ARGS)

.PHONY: demo
demo: $(SERVE)/.ready ## Run `tarry demo`: tasks are retried until they succeed
	@$(SERVE)/bin/tarry demo $(ARGS)

.PHONY: chaos
chaos: $(READY) ## Simulate SEEDS runs with faults, STORE_SEEDS on each engine; kill real services and stores ROUNDS times (SEED=n repeats rounds)
	@$(PY) -m tests.chaos.simulation --seeds $(SEEDS)
	@for store in sqlite postgres redis; do \
	  $(PY) -m tests.chaos.simulation --store $$store --seeds $(STORE_SEEDS) || exit 1; \
	done
	@ROUNDS=$(ROUNDS) $(PY) -m pytest -q tests/chaos/test_killed_service.py
	@ROUNDS=$(ROUNDS) $(PY) -m pytest -q --log-cli-level=INFO tests/chaos/test_many_processes.py

.PHONY: test-pythons
test-pythons: ## Run the tests with each installed Python from 3.11 on, and with the lowest versions
	@found=$$(.ci/interpreters) || exit 1; failed=0; \
	while read -r version python; do \
	  $(MAKE) pytest PYTHON="$$python" VENV=".venv/$$version" < /dev/null || failed=1; \
	done <<< "$$found"; $(MAKE) test-lowest || failed=1; exit $$failed

.PHONY: test-lowest
test-lowest: ## Run the tests with the lowest allowed version of each dependency
	@$(PARALLEL) $(LOWEST)/.ready $(DOCS)/.ready $(TYPESCRIPT)/.ready programs
	$(call step,tests ($(LOWEST)),$(LOWEST)/bin/python -m pytest -q $(ARGS) tests,tail -n 1)

.PHONY: format
format: $(READY) ## Format the code and apply safe fixes
	@$(PY) -m ruff check --quiet --fix-only .
	@$(PY) -m ruff format --quiet .
	@$(PY) .ci/format_sql.py

.PHONY: api
api: $(READY) ## Update docs/public-api.txt from the code
	@mkdir -p docs
	@$(PY) -m tests.public_api > docs/public-api.txt.new && mv docs/public-api.txt.new docs/public-api.txt

.PHONY: client
client: $(READY) ## Generate the blocking client from the asynchronous client
	@$(PY) .ci/generate_client.py > $(VENV)/client.py && mv $(VENV)/client.py src/tarry/client/client.py

.PHONY: docs
docs: $(DOCS)/.ready ## Build the documentation site in site/
	$(call step,documentation site,NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --quiet --strict)
	@echo 'Read it at http://127.0.0.1:8000: $(DOCS)/bin/python -m http.server --bind 127.0.0.1 --directory site 8000'

.PHONY: typescript
typescript: $(TYPESCRIPT)/.ready ## Build the TypeScript client into dist/
	@rm -rf $(TYPESCRIPT)/src $(TYPESCRIPT)/dist && cp -R clients/typescript/. $(TYPESCRIPT) && mkdir -p dist
	$(call step,OpenAPI document,$(PY) -m tests.openapi_document > $(TYPESCRIPT)/openapi.json)
	$(call step,TypeScript client,( $(NPM) run generate ) && ( $(NPM) run build ) && \
	  ( $(NPM) pack --pack-destination $(abspath dist) ))

.PHONY: tables
tables: $(READY) ## Update the tables in docs/ that are simulator output
	@$(PY) -m tests.contention_table

.PHONY: bench
bench: $(BENCH)/.ready ## Compare tarry with other retry libraries; ARGS is passed to the benchmarks
	@$(BENCH)/bin/python -m benchmarks $(ARGS)

.PHONY: bench-service
bench-service: $(BENCH_SERVICE)/.ready ## Compare the service with job queues; ARGS is passed to the benchmark
	@$(BENCH_SERVICE)/bin/python -m benchmarks.service $(ARGS)

.PHONY: bench-sim
bench-sim: $(READY) ## Measure the speed of the simulator; ARGS is passed to the benchmark
	@$(PY) -m benchmarks.simulation $(ARGS)

# The time stamps in the packages: of the last commit, or a fixed time outside of a repository.
EPOCH = $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null || echo 1700000000))
BUILD = SOURCE_DATE_EPOCH=$(EPOCH) $(PACKAGE)/bin/python -m build --no-isolation --outdir

.PHONY: package
package: $(PACKAGE)/.ready ## Build, check and install wheel and sdist, and write the SBOM, into dist/
	@rm -rf dist $(PACKAGE)/again $(PACKAGE)/from-wheel $(PACKAGE)/from-sdist
	$(call step,wheel and sdist build,$(BUILD) dist)
	$(call step,build is reproducible,$(BUILD) $(PACKAGE)/again && diff -r dist $(PACKAGE)/again)
	$(call step,twine check --strict,$(PACKAGE)/bin/python -m twine --no-color check --strict dist/*)
	$(call step,wheel installs,$(call install_alone,$(PACKAGE)/from-wheel,dist/*.whl))
	$(call step,sdist installs,$(call install_alone,$(PACKAGE)/from-sdist,dist/*.tar.gz))
	@$(MAKE) sbom
	@cd dist && sha256sum *.whl *.tar.gz *.cdx.json > SHA256SUMS && cat SHA256SUMS

# $(call install_alone,directory,file): install a file in a new environment; load all public names.
define install_alone
$(PYTHON) -m venv --without-pip $(1) && \
  $(PACKAGE)/bin/python -m pip --python $(1)/bin/python install --quiet --disable-pip-version-check $(2) && \
  $(1)/bin/python -I .ci/bare.py
endef

.PHONY: sbom
sbom: $(PACKAGE)/.ready ## Write the CycloneDX SBOM of an environment with the extra EXTRA (service)
	@rm -rf $(SBOM) && mkdir -p dist
	$(call step,environment with tarry[$(EXTRA)],$(PYTHON) -m venv --without-pip $(SBOM) && \
	  $(PACKAGE)/bin/python -m pip --python $(SBOM)/bin/python install --quiet \
	  --disable-pip-version-check -c requirements-dev.txt '.[$(EXTRA)]')
	$(call step,SBOM,$(PACKAGE)/bin/cyclonedx-py environment --pyproject pyproject.toml \
	  --output-reproducible --spec-version 1.6 --output-format JSON \
	  --output-file dist/tarry-$(EXTRA).cdx.json $(SBOM)/bin/python)

.PHONY: clean
clean: ## Remove environments, caches and build results
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist site
	@find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# tarry is installed in editable mode, so an environment is outdated only when its requirements file
# or pyproject.toml has changed. xds-protos has old copies of files of opentelemetry-proto, so it is
# installed first.
$(READY): pyproject.toml requirements-dev.txt
	$(call step,environment $(VENV),$(call environment,$(VENV)) && \
	  .ci/install $(PY) --no-deps -c requirements-dev.txt xds-protos && \
	  .ci/install $(PY) -r requirements-dev.txt && \
	  .ci/install $(PY) --no-build-isolation --no-deps -e .)
	@touch $@

$(SERVE)/.ready: pyproject.toml requirements-serve.txt
	@$(require_python)
	@echo 'Installing the service in $(SERVE) (once):'
	@.ci/install-service $(PYTHON) $(SERVE)
	@touch $@

$(BENCH)/.ready: pyproject.toml requirements-bench.txt
	$(call step,environment $(BENCH),$(call environment,$(BENCH)) && \
	  $(BENCH)/bin/python $(PIP) -r requirements-bench.txt && \
	  $(BENCH)/bin/python $(PIP) -e .)
	@touch $@

$(BENCH_SERVICE)/.ready: pyproject.toml requirements-bench-service.txt benchmarks/service/requirements-arq.txt
	$(call step,environment $(BENCH_SERVICE),$(call environment,$(BENCH_SERVICE)) && \
	  $(BENCH_SERVICE)/bin/python $(PIP) -r requirements-bench-service.txt && \
	  $(BENCH_SERVICE)/bin/python $(PIP) --no-warn-conflicts --upgrade --target $(BENCH_SERVICE)/arq \
	  -r benchmarks/service/requirements-arq.txt && \
	  $(BENCH_SERVICE)/bin/python $(PIP) -e '.[service]')
	@touch $@

# The reference pages are generated from the installed service.
$(DOCS)/.ready: pyproject.toml requirements-docs.txt requirements-dev.txt
	$(call step,environment $(DOCS),$(call environment,$(DOCS)) && \
	  $(DOCS)/bin/python $(PIP) -r requirements-docs.txt && \
	  $(DOCS)/bin/python $(PIP) -c requirements-dev.txt -e '.[service]')
	@touch $@

$(TYPESCRIPT)/.ready: clients/typescript/package.json clients/typescript/.npmrc | $(READY)
	@rm -rf $(TYPESCRIPT) && mkdir -p $(TYPESCRIPT) && cp $^ $(TYPESCRIPT)
	$(call step,environment $(TYPESCRIPT),$(NPM) install --no-audit --no-fund)
	@touch $@

$(PACKAGE)/.ready: requirements-package.txt
	$(call step,environment $(PACKAGE),$(call environment,$(PACKAGE)) && \
	  $(PACKAGE)/bin/python $(PIP) -r requirements-package.txt)
	@touch $@

$(LOWEST)/.ready: pyproject.toml requirements-lowest.txt
	$(call step,environment $(LOWEST),$(call environment,$(LOWEST)) && \
	  $(LOWEST)/bin/python $(PIP) --no-deps -c requirements-lowest.txt xds-protos && \
	  $(LOWEST)/bin/python $(PIP) -r requirements-lowest.txt && \
	  $(LOWEST)/bin/python $(PIP) --no-build-isolation --no-deps -e .)
	@touch $@

# Fail, with a reason, if PYTHON is too old.
define require_python
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "tarry needs Python 3.11 or newer; $(PYTHON) is not (set PYTHON=...)"; exit 1; }
endef

# $(call environment,directory): create a virtual environment unless a complete one exists.
define environment
{ $(require_python); } && \
{ $(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1); }
endef
