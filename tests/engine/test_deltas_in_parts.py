"""x A^T in parts, as products on Hopper leave it: what the engine makes of it, on the twins."""

import pytest

import engine.lora_delta
from engine.lora_delta import LoRADelta
from kernels.linear_shrink_parts import linear_shrink_parts
from tests.engine.adapted_model import AdaptedModel, greedy, prompt_of
from tests.engine.backends import TestedBackend as Backend


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_norms_add_them_up(name, tmp_path, monkeypatch):
    """Output and down: twice a layer of each step that is small enough to fold deltas in."""
    shapes = []

    def shrink_parts(*arguments):
        shapes.append(tuple(arguments[-1].shape))
        linear_shrink_parts(*arguments)

    monkeypatch.setattr(engine.lora_delta, "linear_shrink_parts", shrink_parts)
    monkeypatch.setattr(LoRADelta, "_parts_in_product", lambda *_: 4)
    monkeypatch.setattr("engine.decoder.holds_delta", lambda *_: True)
    backend = Backend("cpu", "tape", 1e-4)
    model = AdaptedModel.make(name, tmp_path, {"a": {"rank": 8}, "b": {"rank": 5}})
    with model.engine(backend) as served:
        prompts = [prompt_of(5 + row, row) for row in range(4)]
        outputs = served.generate(prompts, greedy(6), adapters=["a", None, "b", "a"])
    model.check(outputs, backend)
    assert shapes
    assert all(shape[1:] == (4, 16) for shape in shapes)
