"""Reading a paged KV cache: what both attention ops share.

Knows nothing about attention itself: where a token's keys and values lie, and what the tensors
must look like.
"""

import torch
import triton
import triton.language as tl

from kernels.op import FLOATS


@triton.jit
def load_pages(table_ptr, positions, limit, PAGE_SIZE: tl.constexpr):
    """The page of each position below `limit`, 0 from there on."""
    return tl.load(table_ptr + positions // PAGE_SIZE, mask=positions < limit, other=0)


@triton.jit
def token_offsets(pages, positions, page_stride, slot_stride, PAGE_SIZE: tl.constexpr):
    """Where the tokens at `positions` start in the cache, int64: it may pass 2^31 elements."""
    return pages.to(tl.int64) * page_stride + (positions % PAGE_SIZE) * slot_stride


def cached_range(cache: torch.Tensor, table: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Positions start..end of one request in `cache`, gathered as float32 [n, Hkv, D]."""
    page_size = cache.shape[1]
    first = start // page_size
    pages = cache[table[first : triton.cdiv(end, page_size)]]
    return pages.flatten(0, 1)[start - first * page_size : end - first * page_size].float()


def check_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """What queries, a paged cache, its tables and an output must look like to attention."""
    dtypes = [tensor.dtype for tensor in (q, k_cache, v_cache, out)]
    assert len(set(dtypes)) == 1, f"dtypes of q, k_cache, v_cache and out differ: {dtypes}"
    assert q.dtype in FLOATS, f"dtype: {q.dtype}"
    assert block_tables.dtype == torch.int32, f"block_tables: {block_tables.dtype}, not int32"
    for name, tensor, dims in (
        ("q", q, 2),
        ("k_cache", k_cache, 4),
        ("block_tables", block_tables, 2),
        ("out", out, 2),
    ):
        assert tensor.dim() == dims, f"{name}: {tuple(tensor.shape)}, {dims} dimensions needed"
        assert tensor.stride(-1) == 1, f"{name}: last stride {tensor.stride(-1)}, not 1"
    assert v_cache.shape == k_cache.shape, f"v_cache: {v_cache.shape}, k_cache: {k_cache.shape}"
    assert v_cache.stride() == k_cache.stride(), (
        f"strides of v_cache: {v_cache.stride()}, of k_cache: {k_cache.stride()}"
    )
    kv_width = k_cache.shape[2] * k_cache.shape[3]
    assert out.shape[1] % kv_width == 0, f"out: {out.shape[1]} columns, multiple of {kv_width} due"
    assert q.shape[1] >= out.shape[1], f"q: {q.shape[1]} columns, at least {out.shape[1]} needed"
    assert q.shape[0] == out.shape[0], f"q: {q.shape[0]} rows, out: {out.shape[0]}"


def check_index(name: str, index: torch.Tensor, length: int) -> None:
    """An index vector is int32, contiguous and of the length that the others imply."""
    assert index.shape == (length,), f"{name}: {tuple(index.shape)}, [{length}] needed"
    assert index.dtype == torch.int32, f"{name}: {index.dtype}, not int32"
    assert index.is_contiguous(), f"{name}: stride {index.stride()}"
