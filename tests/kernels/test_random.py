"""The counter generator: published vectors, equal bits in Triton and torch, its distribution."""

import math

import pytest
import torch
import triton
import triton.language as tl

from kernels.random import (
    gumbel_block,
    gumbel_row_torch,
    gumbel_torch,
    philox_torch,
    uniform_block,
    uniform_torch,
)

# philox4x32-10 of the Random123 distribution's kat_vectors: counter, key, result.
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
STREAMS = [(0, 0, 0), (-1, 17, 3), (2**63 - 1, 2**31 - 1, 0), (0x0123456789ABCDEF, 4095, 7)]


@triton.jit
def _words_kernel(out, seed, c0, c1, c2, c3):
    words = tl.philox(tl.load(seed), tl.load(c0), tl.load(c1), tl.load(c2), tl.load(c3))
    for i in tl.static_range(4):
        tl.store(out + i, words[i].to(tl.int64))


@triton.jit
def _noise_kernel(uniform, gumbel, seed, position, sample_index, SIZE: tl.constexpr):
    first_id = tl.program_id(0) * SIZE
    ids = first_id + tl.arange(0, SIZE)
    tl.store(uniform + ids, uniform_block(seed, first_id, position, sample_index, SIZE))
    tl.store(gumbel + ids, gumbel_block(seed, first_id, position, sample_index, SIZE))


def _as_int32(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_torch_gives_the_published_words(counter, key, expected):
    words = philox_torch(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(word) for word in words) == expected


@pytest.mark.kernel
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_triton_gives_the_published_words(kernel_device, counter, key, expected):
    out = torch.zeros(4, dtype=torch.int64, device=kernel_device)
    seed = key[0] | _as_int32(key[1]) << 32
    words = [torch.tensor([_as_int32(c)], dtype=torch.int32, device=kernel_device) for c in counter]
    _words_kernel[(1,)](out, torch.tensor([seed], device=kernel_device), *words)
    assert tuple(out.tolist()) == expected


@pytest.mark.kernel
@pytest.mark.parametrize(("seed", "position", "sample_index"), STREAMS)
def test_triton_draws_the_bits_of_torch(kernel_device, seed, position, sample_index):
    size, blocks = 64, 3
    uniform = torch.full((size * blocks,), torch.nan, device=kernel_device)
    gumbel = uniform.clone()
    _noise_kernel[(blocks,)](uniform, gumbel, seed, position, sample_index, SIZE=size)
    ids = torch.arange(size * blocks)
    expected = uniform_torch(seed, ids, position, sample_index)
    assert torch.equal(uniform.cpu(), expected)
    # Against float64, so that a logarithm that is poor near 1 shows; float32's own rounding of
    # values up to 23 is below 2e-6.
    exact = -torch.log(-torch.log1p(-expected.double()))
    assert (gumbel.cpu() - exact).abs().max() < 1e-5
    assert (gumbel_torch(seed, ids, position, sample_index) - exact).abs().max() < 1e-5


def test_draws_depend_on_each_part_of_the_counter_and_only_on_it():
    ids = torch.arange(1003)
    base = uniform_torch(5, ids, 9, 0)
    for other in ((6, 9, 0), (5 + 2**32, 9, 0), (5, 10, 0), (5, 9, 1)):
        seed, position, sample_index = other
        assert (uniform_torch(seed, ids, position, sample_index) != base).float().mean() > 0.99
    some = torch.tensor([[7, 1002], [0, 500]])
    assert torch.equal(uniform_torch(5, some, 9, 0), base[some])
    row = gumbel_row_torch(5, 1003, 9, 0, torch.device("cpu"))
    assert torch.equal(row, gumbel_torch(5, ids, 9, 0))


def test_uniforms_are_uniform_and_strictly_inside():
    uniform = torch.cat(
        [uniform_torch(seed, torch.arange(50_000), seed, 0) for seed in range(4)]
    ).double()
    assert uniform.min() > 0.0
    assert uniform.max() < 1.0
    counts = torch.histc(uniform.float(), bins=100, min=0.0, max=1.0)
    expected = len(uniform) / 100
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 40 < chi_square < 180  # 99 degrees of freedom: beyond either in one of 10^6 trials
    gumbel = -torch.log(-torch.log1p(-uniform))
    deviation = math.pi / math.sqrt(6.0) / math.sqrt(len(uniform))
    assert abs(gumbel.mean() - 0.5772156649) < 5 * deviation


def test_extreme_words_stay_inside_the_open_interval(monkeypatch):
    for word, expected in ((0, 2.0**-33), (2**32 - 1, 1.0 - 2.0**-24)):
        words = tuple(torch.full((1,), word) for _ in range(4))
        monkeypatch.setattr("kernels.random.philox_torch", lambda *_, words=words: words)
        assert float(uniform_torch(0, torch.zeros(1, dtype=torch.int64), 0, 0)) == expected
        assert gumbel_torch(0, torch.zeros(1, dtype=torch.int64), 0, 0).isfinite()
