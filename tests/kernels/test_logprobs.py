"""Log-probabilities: kernel against twin, twin against log_softmax and a stable sort."""

import math

import pytest
import torch
from torch.testing import assert_close

from kernels import logprobs as module
from kernels.log_normalizer import log_normalizer_torch
from kernels.logprobs import MAX_LOGPROBS, logprobs, logprobs_torch, logprobs_triton
from tests.kernels.cross_compile import compile_launches

NUM_LOGPROBS = [-1, 0, 1, 5, 20, 25]


def _rows(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """One row for each of NUM_LOGPROBS and some odd ones, in a wider matrix with NaN between."""
    generator = torch.Generator().manual_seed(vocab)
    rows = torch.randn(len(NUM_LOGPROBS) + 6, vocab, generator=generator) * 3
    rows[-6] = (rows[-6] / 3).round()  # ties, some of them of -0.0 and 0.0
    rows[-5] = 2.5
    rows[-4, vocab // 3 :] = -torch.inf
    rows[-3, vocab // 2] = torch.nan
    rows[-2] = -torch.inf
    rows[-1] += 1e4  # exp overflows without a shift
    wide = torch.full((len(rows), vocab + 8), torch.nan, dtype=dtype)
    wide[:, :vocab] = rows
    return wide[:, :vocab]


def _requests(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch_size, vocab = rows.shape
    targets = torch.arange(batch_size, dtype=torch.int32) * 37 % vocab
    targets[1], targets[2] = -1, vocab
    number = torch.full((batch_size,), 7, dtype=torch.int32)
    number[: len(NUM_LOGPROBS)] = torch.tensor(NUM_LOGPROBS)
    return targets, number


def _outputs(batch_size: int, device="cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.full((batch_size,), torch.nan, device=device),
        torch.full((batch_size, MAX_LOGPROBS), torch.nan, device=device),
        torch.full((batch_size, MAX_LOGPROBS), -7, dtype=torch.int32, device=device),
    )


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("vocab", "dtype", "block"),
    [(515, torch.bfloat16, 128), (515, torch.float32, 8192), (7, torch.float16, 128)],
)
def test_kernel_matches_twin(kernel_device, monkeypatch, vocab, dtype, block):
    monkeypatch.setattr(module, "BLOCK", block)
    rows = _rows(vocab, dtype)
    targets, number = _requests(rows)
    expected = _outputs(len(rows))
    logprobs_torch(rows, targets, number, None, *expected)
    for normalizer in (None, log_normalizer_torch(rows.float()).to(kernel_device)):
        actual = _outputs(len(rows), kernel_device)
        inputs = (part.to(kernel_device) for part in (rows, targets, number))
        logprobs_triton(*inputs, normalizer, *actual)
        for mine, twins in zip(actual[:2], expected[:2], strict=True):
            assert_close(mine.cpu(), twins, rtol=2e-6, atol=2e-6, equal_nan=True)
        assert torch.equal(actual[2].cpu(), expected[2])


@pytest.mark.kernel
def test_kernel_takes_the_normalizer_it_is_given(kernel_device):
    rows = _rows(515, torch.float32)[:2].to(kernel_device)
    rows[:, 0], rows[:, 1] = 1.0, torch.nan  # a row that is summed again would give NaN
    targets = torch.zeros(2, dtype=torch.int32, device=kernel_device)
    normalizer = torch.tensor([[0.25, 2.0], [1.0, 1e-6]], device=kernel_device)
    for asked in (-1, 1):
        target_logprob, top_values, top_ids = _outputs(2, kernel_device)
        number = torch.full_like(targets, asked)
        logprobs_triton(rows, targets, number, normalizer, target_logprob, top_values, top_ids)
        assert target_logprob.tolist() == [-1.25, pytest.approx(-1e-6, rel=1e-6)]


@pytest.mark.kernel
def test_row_does_not_depend_on_its_neighbours(kernel_device):
    rows = _rows(515, torch.float32)[: len(NUM_LOGPROBS)].to(kernel_device)
    targets, number = (part[: len(rows)].to(kernel_device) for part in _requests(rows))
    batch, alone = _outputs(len(rows), kernel_device), _outputs(1, kernel_device)
    logprobs_triton(rows, targets, number, None, *batch)
    logprobs_triton(rows[4:5], targets[4:5], number[4:5], None, *alone)
    for together, single in zip(batch, alone, strict=True):
        assert torch.equal(together[4], single[0])


@pytest.mark.parametrize(("vocab", "dtype"), [(515, torch.float32), (7, torch.bfloat16)])
def test_twin_matches_log_softmax_and_a_sort(vocab, dtype):
    rows = _rows(vocab, dtype)
    targets, number = _requests(rows)
    target_logprob, top_values, top_ids = _outputs(len(rows))
    logprobs(rows, targets, number, None, target_logprob, top_values, top_ids)
    reference = torch.log_softmax(rows.double(), dim=1)
    for row, (target, asked) in enumerate(zip(targets.tolist(), number.tolist(), strict=True)):
        if rows[row].isnan().any():
            assert target_logprob[row].isnan()
            assert top_ids[row, :7].tolist() == _sorted_ids(rows[row].nan_to_num(-torch.inf))[:7]
            continue
        if 0 <= target < vocab:
            assert_close(
                target_logprob[row].double(), reference[row, target], rtol=1e-6, atol=1e-5,
                equal_nan=True,
            )  # fmt: skip
        else:
            assert target_logprob[row] == -torch.inf
        wanted = max(0, min(asked, MAX_LOGPROBS, vocab))
        ids = _sorted_ids(rows[row])[:wanted]
        assert top_ids[row].tolist() == ids + [-1] * (MAX_LOGPROBS - wanted)
        assert_close(
            top_values[row, :wanted].double(), reference[row, ids], rtol=1e-6, atol=1e-5,
            equal_nan=True,
        )  # fmt: skip
        assert (top_values[row, wanted:] == -torch.inf).all()


def _sorted_ids(values: torch.Tensor) -> list[int]:
    listed = values.tolist()
    return sorted(range(len(listed)), key=lambda token: (-listed[token], token))


@pytest.mark.kernel
def test_likely_tokens_keep_their_logprobs(kernel_device):
    """1000 tokens of 1e-9 each beside one that holds the rest, far from zero."""
    rows = torch.full((1, 1001), 1e4 + math.log(1e-9))
    rows[0, 7] = 1e4
    exact = torch.log_softmax(rows.double(), 1)[0, 7].item()
    assert exact == pytest.approx(-1e-6, rel=0.1)
    rows = rows.to(kernel_device)
    target = torch.full((1,), 7, dtype=torch.int32, device=kernel_device)
    for normalizer in (None, log_normalizer_torch(rows)):
        outputs = _outputs(1, kernel_device)
        logprobs_triton(rows, target, target * 0, normalizer, *outputs)
        assert outputs[0].item() == pytest.approx(exact, abs=2e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_compiles(dtype):
    rows = torch.empty(2, 128256, dtype=dtype)
    targets = torch.zeros(2, dtype=torch.int32)
    for normalizer in (None, torch.zeros(2, 2)):
        arguments = (rows, targets, targets, normalizer, *_outputs(2))
        assert compile_launches(logprobs_triton, *arguments) == 1
