# make demo   decode one batch with six adapters, in an environment made for it
# make test   every test that this machine can run
# make lint   ruff and mypy
# make check  lint and test

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := .models/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: demo test lint check clean

demo: $(VENV)/.installed $(MODEL)
	$(BIN)/python -m engine.demo $(MODEL)

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

clean:
	rm -rf $(VENV) .models build *.egg-info .pytest_cache .ruff_cache .mypy_cache
