"""What the caller set in torch leaves no mark on memory that is allocated meanwhile."""

import pytest
import torch

from memory.adapter_store import AdapterStore
from memory.readback import ReadbackRing
from memory.staging import StagingRing
from memory.step_outputs import StepOutputs
from tests.memory.test_manager import make_manager
from tests.memory.tiny_dims import TinyDims

CPU = torch.device("cpu")
DTYPES = {torch.float32, torch.int32, torch.int64}


def all_tensors() -> list[torch.Tensor]:
    """Of a manager and of both rings."""
    manager, readback = make_manager(), ReadbackRing(4, CPU, depth=1)
    readback.start(StepOutputs.allocate(4, CPU), 4, with_top=True)
    readback.start(StepOutputs.allocate(4, CPU), 4, with_top=True)  # one that joins the ring
    rings = [value for slot in readback._slots for value in vars(slot).values()]
    rings += [
        *StagingRing(4, CPU)._buffers,
        *manager.staging._buffers,
        *manager.adapters.tables.staging._buffers,
    ]
    groups = (manager.tables, manager.kv_cache, manager.adapters.tables, manager.step_buffers(4))
    tensors = [tensor for group in groups for tensor in group.tensors().values()]
    tensors += [manager.adapters.arena, manager.adapters.tables.staged, manager._packed]
    return tensors + [value for value in rings if isinstance(value, torch.Tensor)]


def test_nothing_allocated_in_inference_mode_is_an_inference_tensor():
    with torch.inference_mode():
        tensors = all_tensors()
        assert torch.zeros(1).is_inference()
    assert not [tensor for tensor in tensors if tensor.is_inference()]
    for tensor in tensors:
        tensor.zero_()


def test_every_dtype_is_named():
    torch.set_default_dtype(torch.float64)
    try:
        assert {tensor.dtype for tensor in all_tensors()} == DTYPES
    finally:
        torch.set_default_dtype(torch.float32)


def test_host_buffers_and_columns_stay_on_the_host():
    torch.set_default_device("meta")
    try:
        manager, staging = make_manager(), StagingRing(4, CPU)
        readback = ReadbackRing(4, CPU, depth=1)
        destination = torch.zeros(4, dtype=torch.int32, device="cpu")
        staging.upload([1, 2, 3], destination)
        store = AdapterStore(TinyDims(), 1, 8, 4096, torch.float32, CPU)
        with store.synthetic():
            ranks = store.tables.linear.lora_ranks.tolist()
    finally:
        torch.set_default_device(None)
    assert destination.tolist() == [1, 2, 3, 0]
    assert ranks[0][0] == [8]
    assert readback._slots[0].top_values.device == CPU
    assert manager.workspace.logits.device == CPU


@pytest.mark.gpu
def test_host_buffers_are_pinned_where_the_default_device_is_a_gpu():
    torch.set_default_device("cuda")
    try:
        device = torch.device("cuda")
        staging, readback = StagingRing(4, device), ReadbackRing(4, device, depth=1)
        destination = torch.zeros(4, dtype=torch.int32)
        staging.upload([1, 2, 3], destination)
    finally:
        torch.set_default_device(None)
    assert destination.tolist() == [1, 2, 3, 0]
    assert staging._buffers[1].is_pinned()
    assert readback._slots[0].chosen.is_pinned()
