"""A packed adapter: the factors unchanged, at 128-byte offsets, at their true ranks."""

import pytest
import torch
from safetensors.torch import save_file

from memory.adapter_weights import AdapterWeights
from memory.extents import ALIGNMENT_BYTES
from memory.lora_targets import Target
from memory.packed_adapter import pack_adapter
from tests.memory.tiny_dims import TinyDims, random_adapter

DIMS = TinyDims()


def mixed_ranks() -> AdapterWeights:
    """A different rank on each target, and one only in the second layer."""
    parts = [
        random_adapter(DIMS, 3, [Target.Q_PROJ], layers=[0]),
        random_adapter(DIMS, 5, [Target.V_PROJ, Target.DOWN_PROJ]),
        random_adapter(DIMS, 1, [Target.UP_PROJ], layers=[1]),
    ]
    return AdapterWeights("mixed", tuple(module for part in parts for module in part.modules))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_lie_whole_at_aligned_offsets(dtype):
    weights = mixed_ranks()
    packed = pack_adapter(weights, dtype, pinned=False)
    assert packed.buffer.dtype == dtype
    taken = torch.zeros(packed.buffer.numel(), dtype=torch.bool)
    for index, module in enumerate(weights.modules):
        for factor, offset in (
            (module.a, packed.a_offsets[index]),
            (module.b, packed.b_offsets[index]),
        ):
            assert offset % ALIGNMENT_BYTES == 0
            start = offset // dtype.itemsize
            where = slice(start, start + factor.numel())
            assert torch.equal(packed.buffer[where], factor.to(dtype).flatten())
            assert not taken[where].any()
            taken[where] = True
    assert (packed.buffer[~taken] == 0).all()


def test_weights_are_views_of_the_buffer_and_the_callers_are_untouched():
    weights = mixed_ranks()
    packed = pack_adapter(weights, torch.float32, pinned=False)
    base = packed.buffer.untyped_storage().data_ptr()
    for module, original in zip(packed.weights.modules, weights.modules, strict=True):
        for factor in (module.a, module.b):
            assert factor.untyped_storage().data_ptr() == base
        assert torch.equal(module.a, original.a)
        assert torch.equal(module.b, original.b)
        assert (module.layer, module.target, module.scaling) == (
            original.layer,
            original.target,
            original.scaling,
        )
    packed.buffer.zero_()
    assert weights.modules[0].a.abs().sum() > 0


def test_entries_are_addresses_of_the_factors():
    weights = mixed_ranks()
    packed = pack_adapter(weights, torch.float32, pinned=False)
    base = packed.buffer.data_ptr()
    entries = packed.entries(base)
    for entry, module, original in zip(
        entries, packed.weights.modules, weights.modules, strict=True
    ):
        assert entry.a_address == module.a.data_ptr()
        assert entry.b_address == module.b.data_ptr()
        assert (entry.layer, entry.target) == (original.layer, original.target)
        assert (entry.rank, entry.scaling) == (original.rank, original.scaling)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 5, 16, 64])
def test_bytes_are_those_of_the_file(rank, dtype, tmp_path):
    """Wide enough that a file's header and the alignment are both small beside the factors."""
    dims = TinyDims(hidden_size=960, intermediate_size=1720, num_q_heads=8, head_dim=96)
    weights = random_adapter(dims, rank, dtype=dtype)
    tensors = {}
    for module in weights.modules:
        tensors[f"{module.layer}.{module.target.name}.A"] = module.a
        tensors[f"{module.layer}.{module.target.name}.B"] = module.b
    path = tmp_path / "adapter_model.safetensors"
    save_file(tensors, path)
    exact = sum(tensor.numel() * dtype.itemsize for tensor in tensors.values())
    packed = pack_adapter(weights, dtype, pinned=False)
    assert exact <= packed.bytes <= 1.05 * path.stat().st_size
