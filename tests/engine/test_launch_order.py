"""What kernels read before they wait was not written by the launch before theirs, in real steps.

`kernels.dependent_launch` lets a kernel read early what is two launches old. Which kernels read
what, `tests.kernels.test_dependent_launch` finds in their sources.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import SamplingParams
from tests.engine.adapted_model import AdaptedModel, prompt_of
from tests.engine.backends import TestedBackend as Backend
from tests.kernels.test_dependent_launch import may_be_read_early


def span(tensor):
    """(storage, first byte, end) of what a tensor covers; row strides and all."""
    if not tensor.numel():
        return tensor.untyped_storage().data_ptr(), 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return (
        tensor.untyped_storage().data_ptr(),
        first,
        first + (last + 1) * tensor.element_size(),
    )


def overlap(one, two):
    return one[0] == two[0] and one[1] < two[2] and two[1] < one[2]


class LaunchOrder(TorchDispatchMode):
    """Notes every op whose early inputs the op before it wrote."""

    def __init__(self):
        super().__init__()
        self.names, self.faults, self._written, self._last = [], [], [], ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.is_view:
            return func(*args, **(kwargs or {}))
        arguments = {a.name: a for a in func._schema.arguments}
        given = dict(zip(arguments, args, strict=False)) | (kwargs or {})
        tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
        name = func._schema.name.split("::")[1]
        if func.namespace == "encore":
            for early in tensors.keys() & may_be_read_early(name):
                if any(overlap(span(tensors[early]), written) for written in self._written):
                    self.faults.append(f"{name} reads {early}, which {self._last} has just written")
        self.names.append(name)
        self._last = name
        self._written = [
            span(tensor)
            for at, tensor in tensors.items()
            if arguments[at].alias_info is not None and arguments[at].alias_info.is_write
        ]
        return func(*args, **(kwargs or {}))


def order_of(launch):
    order = LaunchOrder()
    with torch.inference_mode(), order:
        launch()
    return order


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["qwen3", "olmoe", "qwen2_moe"])
def test_nothing_is_read_early_that_the_launch_before_wrote(name, dtype, tmp_path):
    model = AdaptedModel.make(name, tmp_path, {"a": {"rank": 3}})
    with model.engine(Backend("cpu", "off", 0.0), dtype=dtype, debug=False) as engine:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        engine.generate([prompt_of(4), prompt_of(5)], params, ["a", None])  # staged
        for lora in (True, False):
            order = order_of(lambda lora=lora: engine.runner.step_eagerly(2, lora))
            assert order.names[0] == "gather_step_inputs"
            assert "rotary_kv_write" in order.names
            assert ("lora_metadata" in order.names) == lora
            assert order.faults == []
        order = order_of(lambda: engine.runner.prefill.warm_up(7))
        assert "extend_attention" in order.names
        assert order.faults == []


def test_a_fault_is_found():
    positions = torch.zeros(2, dtype=torch.int32)
    qkv, caches = torch.zeros(2, 12), torch.zeros(2, 1, 4, 1, 4)
    none, cos_sin = [None] * 10, torch.zeros(3, 4)

    def rotate():
        rotary = torch.ops.encore.rotary_kv_write
        norms = (None, None, 1e-6, 0.0)
        rotary(qkv, *none, 0, *norms, cos_sin, positions, positions, 1, 1, *caches)

    def late():
        positions.zero_()
        qkv.zero_()
        rotate()

    def early():
        qkv.zero_()
        positions[1:].zero_()
        rotate()

    assert order_of(late).faults == []
    assert sorted(order_of(early).faults) == [
        "rotary_kv_write reads kv_slots, which zero_ has just written",
        "rotary_kv_write reads positions, which zero_ has just written",
    ]
