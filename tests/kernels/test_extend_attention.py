"""Chunked prefill attention: kernel against twin, twin against dense attention."""

from itertools import pairwise

import pytest
import torch

from kernels.extend_attention import (
    extend_attention,
    extend_attention_torch,
    extend_attention_triton,
)
from tests.kernels.cross_compile import compile_launches
from tests.kernels.paged_cache import (
    PagedCache,
    assert_attention_close,
    dense_attention,
    dot_dtype,
    make_paged_cache,
)

NAN = float("nan")
# (tokens in the chunk, keys after it): first chunks, chunks after a cached prefix, single tokens
# as in decode, no tokens at all, and both sides of the borders of tiles.
CHUNKS = [(70, 70), (0, 9), (1, 130), (33, 161), (1, 1), (64, 128)]
CASES = [
    # Hq, Hkv, D, page_size, window, dtype
    (2, 2, 64, 16, 0, torch.float32),
    (9, 3, 64, 16, 0, torch.bfloat16),
    (4, 1, 80, 8, 20, torch.float16),
    (7, 1, 96, 5, 0, torch.bfloat16),
    (8, 1, 128, 16, 65, torch.bfloat16),
    (2, 1, 256, 32, 1, torch.float32),
]


def make_rows(cache: PagedCache, q_lens: list[int], num_heads: int, generator: torch.Generator):
    """Packed rows of q, k and v with NaN for k and v, three rows of no sequence, and q_indptr."""
    num_kv_heads, head_dim = cache.k.shape[2:]
    q_indptr = torch.tensor([0, *q_lens]).cumsum(0).int()
    num_rows, width = int(q_indptr[-1]), num_heads * head_dim
    q = torch.full((num_rows + 3, width + 2 * num_kv_heads * head_dim), NAN)
    q[:num_rows, :width] = torch.randn(num_rows, width, generator=generator)
    return q.to(cache.k.dtype), q_indptr


def attend(op, q, q_indptr, cache: PagedCache, num_heads: int, window: int, max_q_len: int):
    """Run `op` on a poisoned output: the sequences' rows; the others are checked to be intact."""
    num_rows, head_dim = int(q_indptr[-1]), cache.k.shape[3]
    padded_out = torch.full_like(q, NAN)
    out = padded_out[:, : num_heads * head_dim]
    op(
        q,
        cache.k,
        cache.v,
        cache.block_tables,
        cache.requests,
        q_indptr,
        cache.seq_lens,
        max_q_len,
        head_dim**-0.5,
        window,
        out,
    )
    assert padded_out[:, out.shape[1] :].isnan().all()
    assert padded_out[num_rows:].isnan().all()
    return out[:num_rows]


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size", "window", "dtype"), CASES
)
def test_kernel_matches_twin(
    kernel_device, num_heads, num_kv_heads, head_dim, page_size, window, dtype
):
    dtype = dot_dtype(dtype, kernel_device)
    generator = torch.Generator().manual_seed(0)
    q_lens, seq_lens = [list(lengths) for lengths in zip(*CHUNKS, strict=True)]
    cache = make_paged_cache(seq_lens, num_kv_heads, head_dim, page_size, dtype, generator)
    q, q_indptr = make_rows(cache, q_lens, num_heads, generator)
    expected = attend(
        extend_attention_torch, q.float(), q_indptr, cache.float(), num_heads, window, 70
    )
    out = attend(
        extend_attention_triton,
        q.to(kernel_device),
        q_indptr.to(kernel_device),
        cache.on(kernel_device),
        num_heads,
        window,
        70,
    )
    assert_attention_close(out, expected)


@pytest.mark.kernel
def test_a_sequence_has_the_same_bits_beside_any_others(kernel_device):
    dtype = dot_dtype(torch.bfloat16, kernel_device)
    generator = torch.Generator().manual_seed(1)
    cache = make_paged_cache([90, 40, 150], 1, 64, 16, dtype, generator)
    q, q_indptr = make_rows(cache, [50, 3, 40], 3, generator)
    q, cache = q.to(kernel_device), cache.on(kernel_device)
    together = attend(
        extend_attention_triton, q, q_indptr.to(kernel_device), cache, 3, 0, max_q_len=93
    )
    bounds = q_indptr.tolist()
    for seq, (begin, end) in enumerate(pairwise(bounds)):
        alone = cache.only(seq)
        indptr = torch.tensor([0, end - begin], dtype=torch.int32, device=kernel_device)
        out = attend(
            extend_attention_triton, q[begin:end], indptr, alone, 3, 0, max_q_len=end - begin
        )
        assert torch.equal(out, together[begin:end])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size", "window"),
    [(9, 3, 64, 16, 0), (4, 4, 80, 5, 17), (7, 1, 256, 8, 1)],
)
def test_op_on_cpu_matches_dense_attention(num_heads, num_kv_heads, head_dim, page_size, window):
    generator = torch.Generator().manual_seed(2)
    q_lens, seq_lens = [list(lengths) for lengths in zip(*CHUNKS, strict=True)]
    cache = make_paged_cache(seq_lens, num_kv_heads, head_dim, page_size, torch.float32, generator)
    q, q_indptr = make_rows(cache, q_lens, num_heads, generator)
    out = attend(extend_attention, q, q_indptr, cache, num_heads, window, 70)
    bounds = q_indptr.tolist()
    for seq, (begin, end) in enumerate(pairwise(bounds)):
        heads = q[begin:end, : num_heads * head_dim].view(-1, num_heads, head_dim)
        expected = dense_attention(
            heads, cache.dense_k[seq], cache.dense_v[seq], head_dim**-0.5, window
        )
        assert_attention_close(out[begin:end], expected.flatten(1))


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype"),
    [
        (64, 3, torch.bfloat16),
        (80, 1, torch.bfloat16),
        (96, 4, torch.bfloat16),
        (128, 7, torch.bfloat16),
        (256, 8, torch.bfloat16),
        (64, 3, torch.float32),
    ],
)
def test_compiles(head_dim, group, dtype):
    num_kv_heads, num_heads = 2, 2 * group
    cache = torch.zeros(3, 16, num_kv_heads, head_dim, dtype=dtype)
    launched = compile_launches(
        extend_attention_triton,
        torch.zeros(8, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
        cache,
        cache.clone(),
        torch.zeros(3, 8, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        8,
        0.125,
        0,
        torch.zeros(8, num_heads * head_dim, dtype=dtype),
    )
    assert launched == 1


def test_launcher_names_what_is_wrong():
    generator = torch.Generator().manual_seed(3)
    cache = make_paged_cache([3], 1, 64, 16, torch.float32, generator)
    q, q_indptr = make_rows(cache, [3], 2, generator)
    with pytest.raises(AssertionError, match=r"q_indptr: torch.int64, not int32"):
        attend(extend_attention_triton, q, q_indptr.long(), cache, 2, 0, 3)
    with pytest.raises(AssertionError, match=r"q_indptr: \(1,\), \[2\] needed"):
        attend(extend_attention_triton, q, q_indptr[1:], cache, 2, 0, 3)
