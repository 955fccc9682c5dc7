"""lora_metadata: launcher against twin, twin against a plain sort of Python tuples."""

import pytest
import torch

from kernels.lora_metadata import lora_metadata, lora_metadata_torch, lora_metadata_triton
from tests.kernels.cross_compile import compile_launches

OUTPUTS = (
    "seg_indptr",
    "weight_indices",
    "permutation",
    "num_segments",
    "pair_row",
    "pair_slot",
    "row_slot",
    "row_order",
)
PATTERNS = ("none", "identical", "distinct", "uniform", "skewed", "out_of_range")
SHAPES = [(1, 1), (1, 8), (5, 3), (16, 16), (33, 7), (64, 256), (129, 5), (300, 200)]


def row_adapters(pattern: str, num_rows: int, max_loras: int) -> list[int]:
    generator = torch.Generator().manual_seed(num_rows * 1000 + max_loras)
    if pattern == "none":
        return [-1] * num_rows
    if pattern == "identical":
        return [max_loras - 1] * num_rows
    if pattern == "distinct":  # descending, so that the permutation is not the identity
        return [max_loras - 1 - row % max_loras for row in range(num_rows)]
    if pattern == "uniform":
        return torch.randint(-1, max_loras, (num_rows,), generator=generator).tolist()
    if pattern == "out_of_range":
        return torch.randint(-3, max_loras + 3, (num_rows,), generator=generator).tolist()
    popular = torch.rand(num_rows, generator=generator) < 0.8
    others = torch.randint(0, max_loras, (num_rows,), generator=generator)
    return torch.where(popular, max_loras // 2, others).tolist()


def enabled_slots(max_loras: int, some_off: bool) -> list[int]:
    return [0 if some_off and slot % 3 == 1 else 1 for slot in range(max_loras)]


def poisoned_outputs(num_rows: int, max_loras: int, device) -> list[torch.Tensor]:
    segments = min(num_rows, max_loras)
    lengths = (segments + 1, segments, num_rows, 1, *[num_rows] * 4)
    return [torch.full((n,), -77, dtype=torch.int32, device=device) for n in lengths]


def run(op, rows: list[int], enabled: list[int], device="cpu") -> dict[str, list[int]]:
    outputs = poisoned_outputs(len(rows), len(enabled), device)
    as_tensor = [torch.tensor(v, dtype=torch.int32, device=device) for v in (rows, enabled)]
    op(*as_tensor, *outputs)
    return {name: tensor.tolist() for name, tensor in zip(OUTPUTS, outputs, strict=True)}


def plain_sort(rows: list[int], enabled: list[int]) -> dict[str, list[int]]:
    pairs = sorted(
        (slot, row) for row, slot in enumerate(rows) if 0 <= slot < len(enabled) and enabled[slot]
    )
    padding = [-1] * (len(rows) - len(pairs))
    slots = sorted({slot for slot, _ in pairs})
    starts = [sum(other < slot for other, _ in pairs) for slot in slots]
    segments = min(len(rows), len(enabled))
    sorted_rows = [row for _, row in pairs]
    slot_of = {row: slot for slot, row in pairs}
    others = [row for row in range(len(rows)) if row not in slot_of]
    return {
        "seg_indptr": starts + [len(pairs)] * (segments + 1 - len(slots)),
        "weight_indices": slots + [-1] * (segments - len(slots)),
        "permutation": sorted_rows + padding,
        "num_segments": [len(slots)],
        "pair_row": sorted_rows + padding,
        "pair_slot": [slot for slot, _ in pairs] + padding,
        "row_slot": [slot_of.get(row, -1) for row in range(len(rows))],
        "row_order": sorted_rows + others,
    }


@pytest.mark.parametrize("some_off", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("shape", SHAPES)
def test_twin_sorts_pairs_and_cuts_segments(shape, pattern, some_off):
    rows, enabled = row_adapters(pattern, *shape), enabled_slots(shape[1], some_off)
    assert run(lora_metadata_torch, rows, enabled) == plain_sort(rows, enabled)


def test_order_of_pairs_is_not_the_order_of_rows():
    result = run(lora_metadata, [3, -1, 0, 3, 1, 0], [1, 0, 1, 1])
    assert result == {
        "seg_indptr": [0, 2, 4, 4, 4],
        "weight_indices": [0, 3, -1, -1],
        "permutation": [2, 5, 0, 3, -1, -1],
        "num_segments": [2],
        "pair_row": [2, 5, 0, 3, -1, -1],
        "pair_slot": [0, 0, 3, 3, -1, -1],
        "row_slot": [3, -1, 0, 3, -1, 0],
        "row_order": [2, 5, 0, 3, 1, 4],
    }


@pytest.mark.kernel
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_matches_twin(kernel_device, shape, pattern):
    rows = row_adapters(pattern, *shape)
    for some_off in (False, True):
        enabled = enabled_slots(shape[1], some_off)
        found = run(lora_metadata_triton, rows, enabled, kernel_device)
        assert found == run(lora_metadata_torch, rows, enabled)


@pytest.mark.kernel
def test_kernel_sorts_the_longest_prefill(kernel_device):
    num_rows = 8192 if kernel_device.type == "cuda" else 1024  # the interpreter takes 13 s for 8192
    rows, enabled = row_adapters("uniform", num_rows, 256), enabled_slots(256, True)
    assert run(lora_metadata_triton, rows, enabled, kernel_device) == plain_sort(rows, enabled)


@pytest.mark.kernel
def test_buffers_used_before_leave_no_trace(kernel_device):
    outputs = poisoned_outputs(40, 6, kernel_device)
    for rows in ([5, 4, 3, 2] * 10, [-1] * 40, [2] * 39 + [0]):
        enabled = [1] * 6
        inputs = [torch.tensor(v, dtype=torch.int32, device=kernel_device) for v in (rows, enabled)]
        lora_metadata_triton(*inputs, *outputs)
        found = {name: tensor.tolist() for name, tensor in zip(OUTPUTS, outputs, strict=True)}
        assert found == plain_sort(rows, enabled)


def test_launcher_refuses_wrong_shapes_and_dtypes():
    outputs = poisoned_outputs(4, 3, "cpu")
    enabled = torch.ones(3, dtype=torch.int32)
    with pytest.raises(AssertionError, match="row_adapter is"):
        lora_metadata_triton(torch.zeros(4, dtype=torch.int64), enabled, *outputs)
    with pytest.raises(AssertionError, match=r"seg_indptr has shape \(4,\), not \(3,\)"):
        lora_metadata_triton(torch.zeros(2, dtype=torch.int32), enabled, *outputs)


@pytest.mark.parametrize("shape", [(8, 16), (64, 256), (2048, 100)])
def test_compiles_for_every_target(shape):
    inputs = [torch.zeros(n, dtype=torch.int32) for n in shape]
    assert compile_launches(lora_metadata_triton, *inputs, *poisoned_outputs(*shape, "cpu")) == 1
