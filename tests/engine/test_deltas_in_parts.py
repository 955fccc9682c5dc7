"""x A^T in parts, as products on Hopper leave it: what the engine makes of it, on the twins."""

from types import SimpleNamespace

import pytest
import torch

import engine.lora_delta
from engine.lora_delta import LoRADelta
from kernels.linear_shrink_parts import linear_shrink_parts
from tests.engine.adapted_model import AdaptedModel, greedy, prompt_of
from tests.engine.backends import TestedBackend as Backend


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(("holds", "parts"), [(True, 4), (False, 4), (True, 8)])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_norms_and_rotary_add_them_up(name, holds, parts, tmp_path, monkeypatch):
    """Of query, key and value where parts are few, and of output and down where it is the norm
    that adds deltas."""
    shapes = []

    def shrink_parts(*arguments):
        shapes.append(tuple(arguments[-1].shape))
        linear_shrink_parts(*arguments)

    monkeypatch.setattr(engine.lora_delta, "linear_shrink_parts", shrink_parts)
    monkeypatch.setattr(LoRADelta, "_parts_in_product", lambda *_: parts)
    monkeypatch.setattr("engine.decoder.holds_delta", lambda *_: holds)
    backend = Backend("cpu", "tape", 1e-4)
    model = AdaptedModel.make(name, tmp_path, {"a": {"rank": 8}, "b": {"rank": 5}})
    with model.engine(backend) as served:
        prompts = [prompt_of(5 + row, row) for row in range(4)]
        outputs = served.generate(prompts, greedy(6), adapters=["a", None, "b", "a"])
    model.check(outputs, backend)
    expected = {(parts, 48)} if parts <= 4 else set()
    if holds:
        expected.add((parts, 16))
    assert {shape[1:] for shape in shapes} == expected


def test_adapters_of_the_models_dtype_alone():
    x = torch.empty(100, 4096, dtype=torch.bfloat16).as_subclass(OnGPU)
    weight, tables = torch.empty(4096, 4096), SimpleNamespace(a_ptrs=torch.empty(1, 8))
    for dtype, parts in ((torch.bfloat16, 8), (torch.float32, 0)):
        delta = SimpleNamespace(arena=torch.empty(1, dtype=dtype), max_rank=16)
        found = LoRADelta._parts_in_product(delta, x, weight, tables, torch.empty(2, 100, 4096))
        assert found == parts
