"""Where the real test model lies: SmolLM2-135M-Instruct, `python -m engine.demo.model_file`."""

import os
from pathlib import Path

import pytest

from engine.demo.model_file import MODEL_FILE

ROOT = Path(__file__).parent.parent


def smollm2_path() -> Path:
    """The GGUF file at $ENCORE_SMOLLM2 or in .models/; skips the test if it is at neither."""
    named = os.environ.get("ENCORE_SMOLLM2")
    path = Path(named) if named else ROOT / ".models" / MODEL_FILE
    if not path.is_file():
        pytest.skip(f"no {path}: run python -m engine.demo.model_file .models")
    return path
