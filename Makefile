# make help says what there is. Everything happens in .venv, which the first target to need it makes.

PYTHON ?= python3
SHELL := /bin/bash
BIN := .venv/bin

# What `make run` hands to `tandem up`; by environment, so that a password in REDIS_URL shows in no process list.
SETTINGS := MODEL PORT PREFILL DECODE MIXED DEVICE TRANSFER DTYPE REDIS_URL
$(foreach name,$(SETTINGS),$(if $($(name)),$(eval run: export TANDEM_$(name) := $$($(name)))))

# A file's tests share what they started, so a file stays together; slow files come first (tests/conftest.py). Tests wait for
# a third of their time, so that three at once keep two cores busy; each more would import and collect all of them again.
PARALLEL := --numprocesses 3 --dist loadfile --no-loadscope-reorder

.PHONY: help run setup dev test test-quick check docs format test-compose sanitize clients bench lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "Variables of make run: $(SETTINGS)"
	@echo "  make run MODEL=./Qwen3-0.6B PORT=9000 PREFILL=2 DECODE=2 TRANSFER=shm DTYPE=float32"
	@echo "TORCH_INDEX_URL names another index for torch, PyTorch's CPU index say; PYTHON another interpreter."

run: setup ## start Redis, coordinator, workers and gateway; Ctrl-C ends them all
	@exec $(BIN)/python -m tandem up

setup: ## .venv with the locked dependencies
	@$(PYTHON) tools/bootstrap.py

dev:
	@$(PYTHON) tools/bootstrap.py dev otel

test: dev ## all tests but those of the composed system; needs no Docker
	-$(BIN)/python -m tools.separate_environment deploy
	$(BIN)/python -m pytest $(PARALLEL) -m "not compose" $(ARGS)

test-quick: dev ## the tests of files that take less than five seconds: for a change of one line
	$(BIN)/python -m pytest $(PARALLEL) -m "not compose and not slow" $(ARGS)

check: dev ## lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: dev ## the documentation as a site in build/docs; a warning is an error
	$(BIN)/python -m tools.configuration
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env docs build/docs

format: dev ## let ruff put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-compose: dev ## build the image, bring the composed system up, test it, take it down
	$(BIN)/python -m pytest -m compose tests/compose $(ARGS)

sanitize: dev ## the native CPU kernels' tests under AddressSanitizer and UBSan, then ThreadSanitizer; needs g++ or clang++
	$(BIN)/python -m tools.sanitize memory $(ARGS)
	$(BIN)/python -m tools.sanitize threads $(ARGS)

clients: dev ## openai-python, anthropic, litellm, LangChain and schemathesis against a pair that runs; prints a table
	$(BIN)/python -m tools.clients $(ARGS)

bench: dev ## measure; results go to bench/results
	$(BIN)/python -m bench $(ARGS)

lock: ## resolve the dependencies anew and pin them
	$(PYTHON) tools/lock.py

clean: ## remove .venv and everything that tools left behind
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
