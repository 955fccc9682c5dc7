"""Where the real test model lies: SmolLM2-135M-Instruct, `python -m engine.demo.model_file`."""

import os
from pathlib import Path

import pytest
import torch
import transformers

from engine.demo.model_file import MODEL_FILE

ROOT = Path(__file__).parent.parent


def smollm2_path() -> Path:
    """The GGUF file at $ENCORE_SMOLLM2 or in .models/; skips the test if it is at neither."""
    named = os.environ.get("ENCORE_SMOLLM2")
    path = Path(named) if named else ROOT / ".models" / MODEL_FILE
    if not path.is_file():
        pytest.skip(f"no {path}: run python -m engine.demo.model_file .models")
    return path


def smollm2_reference(path: Path) -> torch.nn.Module:
    """transformers' own model of the file, in float32."""
    options = {}
    if hasattr(transformers, "GgufConfig"):  # else weights are never kept packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, **options
    )
    return model.eval()
