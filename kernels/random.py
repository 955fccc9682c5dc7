"""A counter generator: the same random bits in Triton and in torch, without any state.

Philox-4x32 with ten rounds (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as
1, 2, 3", SC 2011) turns a 128-bit counter and a 64-bit key into four 32-bit words. Here the key
is a request's seed and the counter (token id // 4, position, sample index, 0); word `token id
% 4` belongs to the token. So a draw depends on what it is for and on nothing else: not on the
batch, the row, the device or how often the engine has drawn before.

    uniform = min((float32(word) + 1/2) / 2^32, 1 - 2^-24)        strictly inside (0, 1)
    gumbel  = -log(-log(1 - uniform))

Both are float32. The small uniforms, spaced 2^-32, give the large Gumbel values, which are those
that win an argmax: the spacing near 1 would be 2^-24 and tie on large vocabularies. Uniforms
are equal bit for bit everywhere; Gumbel values up to the rounding of the two logarithms.
"""

import torch
import triton
import triton.language as tl

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_SCALE = 2.0**-32
_LARGEST = 1.0 - 2.0**-24
_SCALE_KERNEL = tl.constexpr(_SCALE)
_LARGEST_KERNEL = tl.constexpr(_LARGEST)


def philox_torch(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four words for a counter of four and a key of two; all hold 32 bits, tensors as int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product2 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # wrap at 2^64
        c0 = ((product2 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = product2 & _MASK, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _draw_words(
    seed: int, groups: torch.Tensor, position: int, sample_index: int
) -> torch.Tensor:  # int64 [..., 4]
    zero = torch.zeros_like(groups)
    counter = (groups, zero + (position & _MASK), zero + (sample_index & _MASK), zero)
    return torch.stack(philox_torch(counter, (seed & _MASK, (seed >> 32) & _MASK)), dim=-1)


def _word_to_uniform(words: torch.Tensor) -> torch.Tensor:
    return ((words.float() + 0.5) * _SCALE).clamp_max(_LARGEST)


def _uniform_to_gumbel(uniform: torch.Tensor) -> torch.Tensor:
    return -torch.log(-torch.log1p(-uniform))


def uniform_torch(
    seed: int, token_ids: torch.Tensor, position: int, sample_index: int
) -> torch.Tensor:
    """The uniforms of `token_ids` (any shape, int64), float32 of the same shape."""
    words = _draw_words(seed, token_ids // 4, position, sample_index)
    return _word_to_uniform(words.gather(-1, (token_ids % 4).unsqueeze(-1)).squeeze(-1))


def gumbel_torch(
    seed: int, token_ids: torch.Tensor, position: int, sample_index: int
) -> torch.Tensor:
    """Standard Gumbel noise of `token_ids` (any shape, int64), float32 of the same shape."""
    return _uniform_to_gumbel(uniform_torch(seed, token_ids, position, sample_index))


def gumbel_row_torch(
    seed: int, vocab_size: int, position: int, sample_index: int, device: torch.device
) -> torch.Tensor:
    """`gumbel_torch` of all ids below `vocab_size`: each four of them share one draw."""
    groups = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=device)
    words = _draw_words(seed, groups, position, sample_index).view(-1)[:vocab_size]
    return _uniform_to_gumbel(_word_to_uniform(words))


@triton.jit
def uniform_block(seed, first_id, position, sample_index, SIZE: tl.constexpr):
    """Uniforms of the ids first_id .. first_id + SIZE - 1, float32 [SIZE]; both multiples of 4."""
    groups = first_id // 4 + tl.arange(0, SIZE // 4)
    zero = groups * 0
    w0, w1, w2, w3 = tl.philox(seed, groups, zero + position, zero + sample_index, zero)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (SIZE,))
    return tl.minimum((words.to(tl.float32) + 0.5) * _SCALE_KERNEL, _LARGEST_KERNEL)


@triton.jit
def gumbel_block(seed, first_id, position, sample_index, SIZE: tl.constexpr):
    """Standard Gumbel noise of the ids first_id .. first_id + SIZE - 1, float32 [SIZE]."""
    uniform = uniform_block(seed, first_id, position, sample_index, SIZE)
    # log1p(-u) = log(w) * -u / (1 - w) with w the rounded 1 - u: the errors of both cancel
    # (Goldberg, "What Every Computer Scientist Should Know About Floating-Point Arithmetic",
    # theorem 4).
    rest = 1.0 - uniform
    gap = 1.0 - rest
    exact = -tl.log(rest) * (uniform / tl.where(gap > 0.0, gap, 1.0))
    return -tl.log(tl.where(gap > 0.0, exact, uniform))
