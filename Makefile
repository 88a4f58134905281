# Two commands do everything from a fresh clone: `make train` and `make test`. Both set up .venv by themselves
# and are quick when it is there. Everything else is in README.md.

PYTHON ?= python3
RECIPE ?= recipes/tiny.yaml
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A change of any of these rebuilds the kernels and reinstalls the package (editable: Python sources need nothing).
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(wildcard csrc/* csrc/*/*)
TORCH := torch==2.13.*
# Errors only; byte code is made when a module is first imported, which saves half a minute of set-up.
PIP_OPTIONS := -qq --no-compile

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: help train test lint bench setup clean

help:
	@echo "make train [RECIPE=recipes/tiny.yaml] [ARGS='train.lag=8 ...']   set up, then train into a fresh runs/ folder"
	@echo "make test                                                        set up, lint, types, tests"
	@echo "make lint | bench | clean"

# A run never overwrites another: the output folder is the first free one of runs/<name>-001, -002, ...
train: setup
	@name=$$(basename $(RECIPE) .yaml); n=1; \
	while [ -e "runs/$$name-$$(printf %03d $$n)" ]; do n=$$((n + 1)); done; \
	exec $(BIN)/zerogap train $(RECIPE) --output-dir "runs/$$name-$$(printf %03d $$n)" $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/zerogap bench kernels $(ARGS)
	$(BIN)/zerogap bench learner $(ARGS)
	$(BIN)/zerogap bench rollout $(ARGS)
	$(BIN)/zerogap bench context --shape tiny $(ARGS)
	$(BIN)/zerogap bench step --recipe recipes/tiny.yaml $(ARGS)

setup: $(STAMP)

$(STAMP): $(BUILD_INPUTS)
	@echo "setting up $(VENV) (torch, Ray, kernels; some minutes the first time)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3 -m venv failed; install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install $(PIP_OPTIONS) --upgrade pip
	@$(BIN)/python -m pip install $(PIP_OPTIONS) "$(TORCH)"
	@$(BIN)/python -m pip install $(PIP_OPTIONS) -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
