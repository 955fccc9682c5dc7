# make demo      decode one batch with six adapters, in an environment made for it
# make demo-moe  the same with a mixture of experts and an adapter of its experts
# make test      every test that this machine can run
# make lint      ruff and mypy
# make check     lint and test

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := .models/SmolLM2-135M-Instruct.Q4_1.gguf
MOE_MODEL := .models/SmolLM2-135M-Instruct-4x2

.PHONY: demo demo-moe test lint check clean

demo: $(VENV)/.installed $(MODEL)
	$(BIN)/python -m engine.demo $(MODEL)

demo-moe: $(VENV)/.installed $(MOE_MODEL)
	$(BIN)/python -m engine.demo --moe $(MOE_MODEL)

test: $(VENV)/.installed $(MODEL)
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

# torch first and by itself: the packages after it must not choose another build of it.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[test,lint,train]"
	touch $@

$(MODEL): | $(VENV)/.installed
	$(BIN)/python -m engine.demo.model_file .models

$(MOE_MODEL): | $(VENV)/.installed $(MODEL)
	$(BIN)/python -m engine.demo.upcycle $(MODEL) $@

clean:
	rm -rf $(VENV) .models build *.egg-info .pytest_cache .ruff_cache .mypy_cache
