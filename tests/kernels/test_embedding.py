"""Embedding lookup: kernel against twin, twin against torch and Gemma's scaled lookup."""

import pytest
import torch
from torch.testing import assert_close
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

from kernels.embedding import embed, embed_torch, embed_triton
from tests.kernels.cross_compile import compile_launches

VOCAB = 11
IDS = [3, 0, 10, 3, -1, 11, 2**31 - 1, -(2**31)]
CLAMPED = [3, 0, 10, 3, 0, 10, 10, 0]


def _weight(hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(VOCAB, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("hidden", "dtype", "scale"),
    [
        (576, torch.float32, 1.0),
        (344, torch.bfloat16, 18.5),
        (1100, torch.float16, 1.0),
        (2049, torch.float32, 33.3),
    ],
)
def test_kernel_matches_twin(kernel_device, hidden, dtype, scale):
    ids = torch.tensor(IDS, dtype=torch.int32)
    table = torch.full((VOCAB, hidden + 8), torch.nan, dtype=dtype)  # rows apart in memory
    table[:, :hidden] = _weight(hidden, dtype)
    expected = torch.full((len(IDS), hidden), torch.nan, dtype=dtype)
    embed_torch(ids, table[:, :hidden], scale, expected)
    table = table.to(kernel_device)
    wide = torch.full((len(IDS), hidden + 8), torch.inf, dtype=dtype, device=kernel_device)
    embed_triton(ids.to(kernel_device), table[:, :hidden], scale, wide[:, :hidden])
    # One rounded product has one result; but Triton's interpreter truncates to bfloat16.
    truncated = kernel_device.type == "cpu" and dtype == torch.bfloat16
    rtol = torch.finfo(dtype).eps if truncated else 0
    assert_close(wide[:, :hidden].cpu(), expected, rtol=rtol, atol=0)
    assert (wide[:, hidden:] == torch.inf).all()


def test_op_clamps_ids_into_the_table():
    weight = _weight(24, torch.float32)
    out = torch.full((len(IDS), 24), torch.nan)
    embed(torch.tensor(IDS, dtype=torch.int32), weight, 1.0, out)
    assert torch.equal(out, weight[CLAMPED])


@torch.no_grad()
def test_op_matches_gemma_in_bfloat16():
    weight = _weight(24, torch.bfloat16)
    scale = torch.tensor(24**0.5).bfloat16().item()
    reference = GemmaTextScaledWordEmbedding(VOCAB, 24, None, embed_scale=24**0.5).bfloat16()
    reference.weight.copy_(weight)
    ids = torch.tensor([3, 0, 10, 3], dtype=torch.int32)
    out = torch.full((4, 24), torch.nan, dtype=torch.bfloat16)
    embed(ids, weight, scale, out)
    assert torch.equal(out, reference(ids))


def test_launcher_refuses_what_the_kernel_does_not_read():
    weight, out = torch.ones(VOCAB, 8), torch.empty(2, 8)
    with pytest.raises(AssertionError, match="int32"):
        embed_triton(torch.zeros(2, dtype=torch.int64), weight, 1.0, out)
    ids = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(AssertionError, match="ids"):
        embed_triton(ids[:1], weight, 1.0, out)
    with pytest.raises(AssertionError, match="weight is"):
        embed_triton(ids, torch.ones(VOCAB, 9), 1.0, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles(dtype):
    ids = torch.zeros(3, dtype=torch.int32)
    weight, out = torch.zeros(VOCAB, 576, dtype=dtype), torch.zeros(3, 576, dtype=dtype)
    assert compile_launches(embed_triton, ids, weight, 2.0, out) == 1
