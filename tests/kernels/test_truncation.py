"""Where rows are cut: kernel against twin, twin against a sort and Hugging Face's processors."""

import math

import pytest
import torch
import triton
import triton.language as tl
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.truncation import truncation_threshold, truncation_threshold_torch
from tests.kernels.cross_compile import compile_launches

# top_k, top_p, min_p; 515 is the vocabulary.
FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (40, 1.0, 0.0),
    (514, 1.0, 0.0),
    (9999, 1.0, 0.0),
    (0, 0.0, 0.0),
    (0, 0.3, 0.0),
    (0, 0.95, 0.0),
    (0, 0.9999, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (30, 0.8, 0.0),
    (200, 0.9, 0.1),
    (5, 0.99, 0.001),
]


@triton.jit
def _threshold_kernel(
    rows,
    candidates,
    out,
    top_k,
    top_p,
    min_p,
    VOCAB: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    rows += row * VOCAB
    top = tl.full([], -float("inf"), tl.float32)
    count = tl.full([], 0, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        block = tl.load(rows + ids, mask=ids < VOCAB, other=-float("inf"))
        top = tl.maximum(top, tl.max(block))
        count += tl.sum((block > -float("inf")).to(tl.int32))
    weight = tl.full([], 0.0, tl.float32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        block = tl.load(rows + ids, mask=ids < VOCAB, other=-float("inf"))
        weight += tl.sum(tl.exp(block - top))
    threshold = truncation_threshold(
        rows,
        candidates + row * CANDIDATES,
        top,
        count,
        weight,
        top_k,
        top_p,
        min_p,
        VOCAB,
        CANDIDATES,
        BLOCK,
    )
    tl.store(out + row, threshold)


def _launch(rows, candidates, out, top_k: int, top_p: float, min_p: float, block: int) -> None:
    _threshold_kernel[(len(rows),)](
        rows,
        candidates,
        out,
        top_k,
        top_p,
        min_p,
        VOCAB=rows.shape[1],
        CANDIDATES=candidates.shape[1],
        BLOCK=block,
        num_warps=4,
    )


def _rows(vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    normal = torch.randn(vocab, generator=generator)
    masked = normal * 4
    masked[torch.randperm(vocab, generator=generator)[: vocab - 25]] = -math.inf
    rows = [
        normal * 4 + 12,
        normal * 0.01,  # nearly flat
        normal * 1e-20,  # around zero, where floats are dense
        normal * 1e5 - 3e6,
        masked,
        torch.where(normal > 0, normal, -1e38),  # banned by a large bias
        torch.zeros(vocab),
        (normal * 2).round(),  # many ties
        torch.where(torch.arange(vocab) == 3, 3.4028234663852886e38, normal),
    ]
    return torch.stack(rows)


def _kept_by_sort(scaled: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Which entries to keep, filter by filter, with ties at each threshold kept."""
    kept = scaled > -math.inf
    values = scaled[kept].sort(descending=True).values
    if 0 < top_k < len(values):
        kept &= scaled >= values[top_k - 1]
        values = values[values >= values[top_k - 1]]
    if top_p < 1.0:
        mass = torch.softmax(values.double(), 0).cumsum(0)
        kept &= scaled >= values[int((mass < top_p).sum().clamp_max(len(values) - 1))]
    if min_p > 0.0:
        kept &= scaled >= scaled.max() + math.log(min_p)
    return kept


def _assert_kept_alike(scaled, threshold: float, expected: torch.Tensor, top_k, top_p) -> None:
    """Equal sets, or sets that top-p cuts apart where the mass is top_p up to float32's sum."""
    kept = scaled >= threshold
    if not torch.equal(kept, expected):
        weights = torch.exp(scaled.double() - scaled.max())
        weights *= _kept_by_sort(scaled, top_k, 1.0, 0.0)
        boundary = scaled[kept ^ expected]
        assert boundary.min() == boundary.max(), "differs by more than one value"
        mass = float(weights[scaled > boundary.max()].sum() / weights.sum())
        assert abs(mass - top_p) < 1e-6, (mass, top_p)


@pytest.mark.kernel
@pytest.mark.parametrize(("candidates", "block", "first"), [(16, 128, 0), (1024, 1024, 1)])
def test_kernel_keeps_what_the_twin_keeps(kernel_device, candidates, block, first):
    rows = _rows(515)
    workspace = torch.full((len(rows), candidates), torch.nan, device=kernel_device)
    for index, (top_k, top_p, min_p) in list(enumerate(FILTERS))[first::2]:
        some = rows[index // 2 % 2 :: 2].contiguous()  # the interpreter takes its time
        out = torch.full((len(some),), torch.nan, device=kernel_device)
        _launch(some.to(kernel_device), workspace, out, top_k, top_p, min_p, block)
        for scaled, threshold in zip(some, out.tolist(), strict=True):
            twin = truncation_threshold_torch(scaled, top_k, top_p, min_p)
            _assert_kept_alike(scaled, threshold, scaled >= twin, top_k, top_p)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_twin_keeps_what_a_sort_keeps(top_k, top_p, min_p):
    for scaled in [*_rows(515), *_rows(1), *_rows(64)]:
        threshold = truncation_threshold_torch(scaled, top_k, top_p, min_p)
        expected = _kept_by_sort(scaled, top_k, top_p, min_p)
        _assert_kept_alike(scaled, threshold, expected, top_k, top_p)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_twin_keeps_what_hugging_face_keeps(top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(20, 515, generator=generator) * 3  # distinct: it drops some of the tied
    processors = []
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        processors.append(MinPLogitsWarper(min_p))
    for scaled in rows:
        scores = scaled.unsqueeze(0)
        for processor in processors:
            scores = processor(None, scores)
        threshold = truncation_threshold_torch(scaled, top_k, top_p, min_p)
        _assert_kept_alike(scaled, threshold, scores[0] > -math.inf, top_k, top_p)


def test_ties_at_the_threshold_are_all_kept():
    scaled = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert truncation_threshold_torch(scaled, 2, 1.0, 0.0) == 2.0
    assert truncation_threshold_torch(scaled, 0, 0.1, 0.0) == 2.0
    assert truncation_threshold_torch(torch.zeros(100), 7, 0.5, 0.9) == 0.0


def test_kernel_compiles():
    rows, candidates = torch.empty(2, 515), torch.empty(2, 64)
    assert compile_launches(_launch, rows, candidates, torch.empty(2), 5, 0.9, 0.1, 128) == 1
