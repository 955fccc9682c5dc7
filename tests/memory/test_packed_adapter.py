"""A packed adapter: the factors unchanged, at 128-byte offsets, at their true ranks."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from memory.adapter_weights import AdapterWeights
from memory.extents import ALIGNMENT_BYTES, aligned
from memory.lora_targets import EXPERT_TARGETS, Target
from memory.packed_adapter import pack_adapter
from tests.memory.tiny_dims import TINY_MOE, TinyDims, random_adapter

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
    assert entries.a_ptrs.tolist() == [module.a.data_ptr() for module in packed.weights.modules]
    assert entries.b_ptrs.tolist() == [module.b.data_ptr() for module in packed.weights.modules]
    assert entries.layers.tolist() == [module.layer for module in weights.modules]
    assert entries.targets.tolist() == [module.target for module in weights.modules]
    assert entries.lora_ranks.tolist() == [module.rank for module in weights.modules]
    scalings = torch.tensor([module.scaling for module in weights.modules])
    assert torch.equal(entries.scalings, scalings)
    assert entries.experts.tolist() == [-1] * len(weights.modules)
    assert entries.outer_ptrs.numel() == 0


def shared(weights: AdapterWeights, target: Target, factor: str) -> AdapterWeights:
    """Every expert of `target` gets the same factor, one tensor object."""
    one = {}
    modules = [
        replace(m, **{factor: one.setdefault(m.layer, getattr(m, factor))})
        if m.target == target
        else m
        for m in weights.modules
    ]
    return AdapterWeights(weights.path, tuple(modules))


@pytest.mark.parametrize(
    ("target", "factor", "is_outer"),
    [
        (Target.EXPERT_GATE_PROJ, "a", True),
        (Target.EXPERT_DOWN_PROJ, "b", True),
        (Target.EXPERT_UP_PROJ, "b", False),
        (Target.EXPERT_DOWN_PROJ, "a", False),
    ],
)
def test_a_factor_that_experts_share_lies_once(target, factor, is_outer):
    weights = random_adapter(TINY_MOE, 3, EXPERT_TARGETS)
    own = pack_adapter(weights, torch.float32, pinned=False)
    assert own.offsets.outer_ptrs.numel() == 0
    packed = pack_adapter(shared(weights, target, factor), torch.float32, pinned=False)
    (one,) = {
        getattr(module, factor).data_ptr()
        for module in packed.weights.modules
        if module.target == target
    }
    size = next(getattr(m, factor).numel() for m in weights.modules if m.target == target)
    assert own.bytes - packed.bytes == 4 * aligned(4 * size)
    entries = packed.entries(packed.buffer.data_ptr())
    assert entries.outer_ptrs.tolist() == ([one] if is_outer else [])
    assert entries.outer_targets.tolist() == ([int(target)] if is_outer else [])
    assert entries.outer_ranks.tolist() == ([3] if is_outer else [])


def test_one_expert_alone_shares_nothing():
    weights = random_adapter(TINY_MOE, 3, EXPERT_TARGETS)
    first = tuple(module for module in weights.modules if module.expert == 0)
    packed = pack_adapter(AdapterWeights("one", first), torch.float32, pinned=False)
    assert packed.offsets.outer_ptrs.numel() == 0


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
