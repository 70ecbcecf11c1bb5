# `make run`, `make pair`, `make test`, `make test-all`, `make test-clients` and `make test-vulkan`; each makes its own virtual environment in .venv first.
PYTHON ?= python3
PROMPT ?= Why is the sky blue? Answer in three sentences.
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
DROP := 10-13
# Tests that need no streaming, no fork and no POSIX shell; tests/test_on_windows.py imports them as Windows would.
ON_WINDOWS := $(addsuffix .py,$(addprefix tests/test_,tree verify sampling text planner specexec sssd lossless_reference \
  datastore saved remembered json_lines user_folders registry server python_api))
ORDER ?= -p no:randomly

.PHONY: run pair test test-all test-clients test-vulkan lint docs check-mac check-windows dist check-wheel check-tag clean

run: .venv/run
	@$(BIN)/edgespec run smollm2-135m "$$PROMPT" --max-tokens 128

# A pair that needs no download: the small model streamed, and a draft made of it. A table, and build/pair.png.
pair: .venv/pair build/draft.gguf
	$(BIN)/edgespec pair smollm2-135m build/draft.gguf --memory 400M --ctx 1024 --questions 1 -n 48 --budget 8 --png build/pair.png

# Four layers from its middle are left out.
build/draft.gguf: .venv/run
	mkdir -p build
	rm -f $@
	$(BIN)/edgespec convert smollm2-135m $@ --to gguf --quant Q4_0 --requantise --drop-layers $(DROP)

# In two processes at once: a module's tests mostly run in one of them, and share what they load. They start some
# hundred programs, which find what is compiled.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: .venv/test
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ORDER)

# Also whole grids, long searches and soaks: half an hour.
test-all: .venv/test
	$(BIN)/python -m pytest -n 2 --dist worksteal --exhaustive $(ORDER)

# Real agents and SDKs, with a model that follows a script: needs Node 20 and npm; installs into build/clients.
test-clients: .venv/test
	PYTHONPATH=tests:scripts nice $(BIN)/python tests/clients/run.py

# Experts in a GPU's memory, with a build of llama.cpp for Vulkan in build/vulkan and Mesa's software GPU: half an hour.
test-vulkan: .venv/test
	PYTHONPATH=tests:scripts nice $(BIN)/python tests/vulkan/run.py

# MLX and Metal on a Mac: ten minutes.
check-mac: .venv/test
	$(BIN)/python scripts/check-mac --quick
	$(BIN)/edgespec run smollm2-135m "$$PROMPT" --max-tokens 32

# What is supported on Windows: models that fit into memory, the server, the Python interface.
check-windows: .venv/run
	$(BIN)/pip install --quiet --disable-pip-version-check pytest hypothesis httpx openai anthropic gguf
	$(BIN)/python -m pytest $(ON_WINDOWS)
	$(BIN)/edgespec run smollm2-135m "$$PROMPT" --max-tokens 32

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages as a site: build/site/index.html.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f docs/site/mkdocs.yml

# A source archive and a wheel in dist/.
dist: .venv/dist
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

# The wheel in empty environments, by pip and, where they are installed, by pipx and uv. Before, without extras.
check-wheel: TRIED = edgespec[convert,hub,server] @ file://$$(ls $(CURDIR)/dist/*.whl)
check-wheel: export PIPX_HOME = $(CURDIR)/build/wheel/pipx
check-wheel: export PIPX_BIN_DIR = $(CURDIR)/build/wheel/pipx/bin
check-wheel: export PIPX_MAN_DIR = $(CURDIR)/build/wheel/pipx/man
check-wheel: export UV_TOOL_DIR = $(CURDIR)/build/wheel/uv
check-wheel: export UV_TOOL_BIN_DIR = $(CURDIR)/build/wheel/uv/bin
check-wheel: export PIP_FIND_LINKS = $(CURDIR)/build/wheel/llama
check-wheel: export UV_FIND_LINKS = $(CURDIR)/build/wheel/llama
check-wheel: dist
	rm -rf build/wheel
	$(BIN)/pip wheel --quiet --no-deps --cache-dir "$${XDG_CACHE_HOME:-$$HOME/.cache}/edgespec/pip" -w build/wheel/llama llama-cpp-python
	$(PYTHON) -m venv build/wheel/pip
	build/wheel/pip/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	cd / && $(CURDIR)/build/wheel/pip/bin/edgespec models > /dev/null
	build/wheel/pip/bin/pip install --quiet --disable-pip-version-check "$(TRIED)"
	$(BIN)/python tests/check_wheel.py build/wheel/pip
	if command -v pipx; then pipx install --python $(PYTHON) "$(TRIED)" && $(BIN)/python tests/check_wheel.py build/wheel/pipx/venvs/edgespec; fi
	if command -v uv; then uv tool install --python $(PYTHON) "$(TRIED)" && $(BIN)/python tests/check_wheel.py build/wheel/uv/edgespec; fi

# Of a release: the tag names the version.
check-tag: .venv/run
	test "$(TAG)" = "v$$($(BIN)/python -c 'import edgespec; print(edgespec.__version__)')"

.venv/dist: .venv/run
	$(BIN)/pip install --quiet --disable-pip-version-check build twine pytest
	touch $@

.venv/run: pyproject.toml
	@$(PYTHON) scripts/install
	touch $@

.venv/pair: .venv/run
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[bench]"
	touch $@

.venv/docs: .venv/run
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch $@

.venv/test: .venv/run Makefile
	$(BIN)/pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev,convert,mlx,nf4,server,torch]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info

export PROMPT
