"""Attention of a prompt's next tokens over the paged KV cache that already holds them.

Knows nothing about requests beyond a row of the block table, and writes no keys or values: the
chunk's own keys are in the cache when this runs.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.op import define_op
from kernels.paged_attention import LOG2_E
from kernels.paged_cache import (
    cached_range,
    check_cache,
    check_index,
    load_pages,
    token_offsets,
)


@triton.jit
def _attend(
    q,
    query_positions,
    top,
    total,
    acc,
    k_ptr,
    v_ptr,
    table_ptr,
    seq_len,
    page_stride,
    slot_stride,
    scale_log2,
    window,
    low,
    high,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Take the key tiles low..high into (top, total, acc); unmasked, every query sees them all."""
    dims = tl.arange(0, BLOCK_D)
    # Pages two tiles ahead, offsets one ahead, as in decode.
    positions = low * BLOCK_N + tl.arange(0, BLOCK_N)
    pages = load_pages(table_ptr, positions, seq_len, PAGE_SIZE)
    tokens = token_offsets(pages, positions, page_stride, slot_stride, PAGE_SIZE)
    pages = load_pages(table_ptr, positions + BLOCK_N, seq_len, PAGE_SIZE)
    for tile in range(low, high):
        positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        offsets = tokens[:, None] + dims[None, :]
        if MASKED:
            mask = (positions < seq_len)[:, None] & (dims < HEAD_DIM)[None, :]
        else:
            mask = (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if MASKED:
            distance = query_positions[:, None] - positions[None, :]
            seen = (distance >= 0) & ((window <= 0) | (distance < window))
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A query that has seen no key yet keeps its top at -inf, and -inf less -inf is NaN.
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - pivot)
        weights = tl.exp2(scores - pivot[:, None])
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
        ahead = positions + BLOCK_N
        tokens = token_offsets(pages, ahead, page_stride, slot_stride, PAGE_SIZE)
        pages = load_pages(table_ptr, ahead + BLOCK_N, seq_len, PAGE_SIZE)
    return top, total, acc


@triton.jit
def _extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    seq_request_ptr,
    q_indptr_ptr,
    seq_lens_ptr,
    out_ptr,
    q_stride,
    page_stride,
    slot_stride,
    head_stride,
    table_stride,
    out_stride,
    scale_log2,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    # The last tile of queries sees the most keys, so it starts first.
    tile_m = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    q_start = tl.load(q_indptr_ptr + seq)
    q_len = tl.load(q_indptr_ptr + seq + 1) - q_start
    first_query = tile_m * BLOCK_M // GROUP
    if first_query >= q_len:
        return

    # Rows of a tile are (query, head of the group) pairs: any group size fills it.
    pairs = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    dims = tl.arange(0, BLOCK_D)
    row_mask = (queries < q_len)[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (q_start + queries).to(tl.int64)
    columns = heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + rows[:, None] * q_stride + columns, mask=row_mask, other=0.0)

    seq_len = tl.load(seq_lens_ptr + seq)
    cached = seq_len - q_len
    last_query = tl.minimum((tile_m * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    high = tl.cdiv(cached + last_query + 1, BLOCK_N)
    oldest = cached + first_query
    low = tl.where(window > 0, tl.maximum(oldest + 1 - window, 0) // BLOCK_N, 0)
    whole = tl.where(window > 0, low, (oldest + 1) // BLOCK_N)

    request = tl.load(seq_request_ptr + seq)
    table_ptr = tables_ptr + request.to(tl.int64) * table_stride
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    query_positions = cached + queries
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # fmt: off
    top, total, acc = _attend(
        q, query_positions, top, total, acc, k_ptr, v_ptr, table_ptr, seq_len, page_stride,
        slot_stride, scale_log2, window, low, whole, False, HEAD_DIM, PAGE_SIZE, BLOCK_D, BLOCK_N,
    )
    top, total, acc = _attend(
        q, query_positions, top, total, acc, k_ptr, v_ptr, table_ptr, seq_len, page_stride,
        slot_stride, scale_log2, window, whole, high, True, HEAD_DIM, PAGE_SIZE, BLOCK_D, BLOCK_N,
    )
    # fmt: on
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out = out_ptr + rows[:, None] * out_stride + columns
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_mask)


def extend_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_request: torch.Tensor,
    q_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    scale: float,
    window: int,
    out: torch.Tensor,
) -> None:
    """out[t, h] = softmax(scale * q[t, h] K_n^T) V_n over the keys that token t may see.

    N sequences lie packed in T rows: rows q_indptr[n] to q_indptr[n + 1] are the newest tokens
    of sequence n, whose cache holds seq_lens[n] keys, theirs included. So row q_indptr[n] + i
    sits at position seq_lens[n] - q_len + i and sees the keys up to its own, with window > 0
    only the last `window` of them.

    q [T, >= Hq * D]: the first Hq * D columns. k_cache, v_cache [P, page_size, Hkv, D]: equal
    strides, the last 1; Hq / Hkv query heads share a kv head. block_tables int32
    [R, max_pages]: position p of sequence n lies in page
    block_tables[seq_request[n], p // page_size]. seq_request, seq_lens int32 [N]; q_indptr
    int32 [N + 1]; max_q_len: at least the longest chunk's tokens, which bounds the grid.

    Written in place: out [T, Hq * D] of q's dtype (float32, float16 or bfloat16); rows from
    q_indptr[N] on are left alone. Softmax and sums are float32.

    A program takes BLOCK_M pairs of a query and a head of one kv head's group, and walks the
    keys in tiles of BLOCK_N with a running maximum: each key is read once per program, and
    tiles that all its queries see skip the mask. Rows do not depend on other sequences. The
    method is FlashAttention-2's: Dao, "FlashAttention-2: Faster Attention with Better
    Parallelism and Work Partitioning", 2023.
    """
    check_cache(q, k_cache, v_cache, block_tables, out)
    num_seqs = seq_request.shape[0]
    _check_sequences(num_seqs, seq_request, q_indptr, seq_lens)
    if num_seqs == 0 or max_q_len == 0:
        return
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = out.shape[1] // (num_kv_heads * head_dim)
    block_d = triton.next_power_of_2(head_dim)
    tile_bytes = block_d * q.element_size()
    if q.dtype == torch.float32:  # no tensor cores: small tiles, sums in registers
        block_m, block_n, num_warps, num_stages = 32, max(8192 // tile_bytes, 16), 4, 2
    elif block_d > 128:
        block_m, block_n, num_warps, num_stages = 64, 32, 8, 3
    else:
        block_m, block_n, num_warps, num_stages = 128, 64, 8, 3
    _extend_kernel[(triton.cdiv(max_q_len * group, block_m), num_kv_heads, num_seqs)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_request,
        q_indptr,
        seq_lens,
        out,
        q.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_tables.stride(0),
        out.stride(0),
        scale * LOG2_E,
        window,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        **dependent_launch(q.device),
    )


def extend_attention_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_request: torch.Tensor,
    q_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    scale: float,
    window: int,
    out: torch.Tensor,
) -> None:
    """The twin of `extend_attention_triton`, sequence by sequence."""
    check_cache(q, k_cache, v_cache, block_tables, out)
    _check_sequences(seq_request.shape[0], seq_request, q_indptr, seq_lens)
    head_dim = k_cache.shape[3]
    bounds = q_indptr.tolist()
    sequences = zip(seq_request.tolist(), bounds[:-1], bounds[1:], seq_lens.tolist(), strict=True)
    for request, begin, end, seq_len in sequences:
        q_len = end - begin
        if q_len == 0:
            continue
        cached = seq_len - q_len
        start = max(cached + 1 - window, 0) if window > 0 else 0
        table = block_tables[request]
        k = cached_range(k_cache, table, start, seq_len).transpose(0, 1)  # [Hkv, n, D]
        v = cached_range(v_cache, table, start, seq_len).transpose(0, 1)
        heads = q[begin:end, : out.shape[1]].unflatten(1, (-1, head_dim)).transpose(0, 1)
        distance = (
            torch.arange(cached, seq_len, device=q.device)[:, None]
            - torch.arange(start, seq_len, device=q.device)[None, :]
        )  # [q_len, n]
        seen = distance >= 0
        if window > 0:
            seen &= distance < window
        attended = scaled_dot_product_attention(
            heads.float()[None], k[None], v[None], attn_mask=seen, scale=scale, enable_gqa=True
        )[0]  # [Hq, q_len, D]
        out[begin:end] = attended.transpose(0, 1).flatten(1)


def _check_sequences(
    num_seqs: int, seq_request: torch.Tensor, q_indptr: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    check_index("seq_request", seq_request, num_seqs)
    check_index("q_indptr", q_indptr, num_seqs + 1)
    check_index("seq_lens", seq_lens, num_seqs)


extend_attention = define_op(extend_attention_triton, extend_attention_torch, mutates=("out",))
