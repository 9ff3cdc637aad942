# The two commands of the README: `make demo` and `make test`. Both need only python3 >= 3.10 with venv and pip.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two workers on two cores beat two threads in one: the tests' matrices are small.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-slow lint format types clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	# torch first and alone: its pinned CPU build then satisfies everything that asks for torch.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python recipes/demo.py --out demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
