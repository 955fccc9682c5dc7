"""The experts' weighted sum: kernel against twin, twin against a sum in float64."""

import pytest
import torch
from torch.testing import assert_close

from kernels.moe_combine import moe_combine, moe_combine_torch, moe_combine_triton
from tests.kernels.cross_compile import compile_launches


def _inputs(tokens: int, top_k: int, hidden: int, dtype: torch.dtype, parts: str) -> list:
    """Some pairs without expert, holding NaN; weights that are not a power of two."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(tokens * top_k, hidden, generator=generator).to(dtype)
    ids = torch.randint(0, 6, (tokens, top_k), generator=generator, dtype=torch.int32)
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    shared = torch.randn(tokens, hidden, generator=generator).to(dtype)
    gate = torch.randn(tokens, 1, generator=generator).to(dtype)
    ids[tokens // 2, top_k // 2] = -1
    if tokens > 1:
        ids[-1] = -1  # a row of padding
    pairs[ids.flatten() < 0] = torch.nan
    weights[ids < 0] = torch.nan
    return [
        pairs,
        ids,
        weights,
        shared if "shared" in parts else None,
        gate if "gate" in parts else None,
    ]


def _moved(inputs: list, device: torch.device) -> list:
    return [None if tensor is None else tensor.to(device) for tensor in inputs]


def _reference(pairs, ids, weights, shared, gate) -> torch.Tensor:
    tokens, top_k = ids.shape
    rows = []
    for t in range(tokens):
        row = torch.zeros(pairs.shape[1], dtype=torch.float64)
        for j in range(top_k):
            if ids[t, j] >= 0:
                row += weights[t, j].double() * pairs[t * top_k + j].double()
        if shared is not None:
            factor = 1.0 if gate is None else torch.sigmoid(gate[t, 0].double())
            row += shared[t].double() * factor
        rows.append(row)
    return torch.stack(rows)


CASES = [
    (1, 1, 40, torch.float32, "shared gate"),
    (3, 8, 520, torch.float32, "shared"),
    (5, 10, 96, torch.float32, ""),
    (2, 2, 1030, torch.float16, "shared gate"),
    (3, 8, 512, torch.bfloat16, "shared gate"),
    (4, 4, 96, torch.bfloat16, ""),
]


@pytest.mark.parametrize(("tokens", "top_k", "hidden", "dtype", "parts"), CASES)
def test_op_equals_the_sum_by_hand(tokens, top_k, hidden, dtype, parts):
    inputs = _inputs(tokens, top_k, hidden, dtype, parts)
    out = torch.full((tokens, hidden), torch.nan, dtype=dtype)
    moe_combine(*inputs, out)
    eps = torch.finfo(dtype).eps
    assert_close(out.double(), _reference(*inputs), rtol=eps, atol=4e-6)


@pytest.mark.kernel
@pytest.mark.parametrize(("tokens", "top_k", "hidden", "dtype", "parts"), CASES)
def test_kernel_matches_twin(kernel_device, tokens, top_k, hidden, dtype, parts):
    inputs = _inputs(tokens, top_k, hidden, dtype, parts)
    expected = torch.empty(tokens, hidden, dtype=dtype)
    moe_combine_torch(*inputs, expected)
    wide = torch.full((tokens, hidden + 8), torch.inf, dtype=dtype, device=kernel_device)
    moe_combine_triton(*_moved(inputs, kernel_device), wide[:, :hidden])
    eps = torch.finfo(dtype).eps
    assert_close(wide[:, :hidden].cpu(), expected, rtol=eps, atol=2e-6)
    assert (wide[:, hidden:] == torch.inf).all()


@pytest.mark.kernel
def test_rows_of_a_wider_buffer(kernel_device):
    inputs = _inputs(3, 2, 48, torch.float32, "shared gate")
    expected = torch.empty(3, 48)
    moe_combine_torch(*inputs, expected)
    pairs, ids, weights, shared, gate = _moved(inputs, kernel_device)

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.full((len(tensor), tensor.shape[1] + 5), torch.nan, device=kernel_device)
        wide[:, : tensor.shape[1]] = tensor
        return wide[:, : tensor.shape[1]]

    out = torch.empty(3, 48, device=kernel_device)
    moe_combine_triton(widened(pairs), ids, weights, widened(shared), widened(gate), out)
    assert_close(out.cpu(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.kernel
def test_a_row_does_not_see_its_neighbours(kernel_device):
    inputs = _inputs(5, 4, 96, torch.float32, "shared gate")
    out, alone = (torch.empty(rows, 96, device=kernel_device) for rows in (5, 1))
    moved = _moved(inputs, kernel_device)
    moe_combine_triton(*moved, out)
    for row in range(5):
        pairs, ids, weights, shared, gate = moved
        one = slice(row, row + 1)
        moe_combine_triton(
            pairs[row * 4 : row * 4 + 4], ids[one], weights[one], shared[one], gate[one], alone
        )
        assert torch.equal(out[row], alone[0])


def test_sums_stay_wide_and_are_rounded_once():
    """256 + 1 - 256 in bfloat16 steps would leave 0."""
    pairs = torch.tensor([[256.0], [1.0]]).bfloat16()
    ids, weights = torch.tensor([[0, 1]], dtype=torch.int32), torch.ones(1, 2)
    out = torch.empty(1, 1, dtype=torch.bfloat16)
    moe_combine(pairs, ids, weights, torch.tensor([[-256.0]]).bfloat16(), None, out)
    assert out.item() == 1


def test_launcher_refuses_what_the_kernel_does_not_read():
    pairs, ids, weights, shared, gate = _inputs(2, 2, 16, torch.float32, "shared gate")
    out = torch.empty(2, 16)
    with pytest.raises(AssertionError, match="pairs has shape"):
        moe_combine_triton(pairs[:3], ids, weights, None, None, out)
    with pytest.raises(AssertionError, match="topk_ids is"):
        moe_combine_triton(pairs, ids.long(), weights, None, None, out)
    with pytest.raises(AssertionError, match="without shared"):
        moe_combine_triton(pairs, ids, weights, None, gate, out)
    with pytest.raises(AssertionError, match="shared_gate has shape"):
        moe_combine_triton(pairs, ids, weights, shared, gate[:, 0], out)


@pytest.mark.parametrize("parts", ["", "shared", "shared gate"])
def test_compiles(parts):
    inputs = _inputs(2, 8, 2048, torch.bfloat16, parts)
    out = torch.empty(2, 2048, dtype=torch.bfloat16)
    assert compile_launches(moe_combine_triton, *inputs, out) == 1
