# make demo      decode one batch with six adapters, in an environment made for it
# make demo-moe  the same with a mixture of experts and an adapter of its experts
# make test      every test that this machine can run
# make lint      ruff and mypy
# make check     lint and test

PYTHON ?= python3
# What pip installs as torch, and the index it is on; empty: pip's own.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
VENV ?= .venv
BIN := $(VENV)/bin
# Named after the build of torch, so that another one is installed when it is asked for.
INSTALLED := $(VENV)/.installed-$(shell printf %s '$(TORCH) $(TORCH_INDEX)' | cksum | cut -d' ' -f1)
MODEL := .models/SmolLM2-135M-Instruct.Q4_1.gguf
MOE_MODEL := .models/SmolLM2-135M-Instruct-4x2

.PHONY: demo demo-moe test lint check clean

demo: $(INSTALLED) $(MODEL)
	$(BIN)/python -m engine.demo $(MODEL)

demo-moe: $(INSTALLED) $(MOE_MODEL)
	$(BIN)/python -m engine.demo --moe $(MOE_MODEL)

test: $(INSTALLED) $(MODEL)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

# torch first and by itself: the packages after it must not choose another build of it.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[test,lint,train]"
	touch $@

$(MODEL): | $(INSTALLED)
	$(BIN)/python -m engine.demo.model_file .models

$(MOE_MODEL): | $(INSTALLED) $(MODEL)
	$(BIN)/python -m engine.demo.upcycle $(MODEL) $@

clean:
	rm -rf $(VENV) .models build *.egg-info .pytest_cache .ruff_cache .mypy_cache
