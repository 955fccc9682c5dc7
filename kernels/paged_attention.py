"""Decode attention over a paged KV cache: one query token a row, its keys split over programs.

Knows nothing about requests beyond a row of the block table, and writes no keys or values.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.op import define_op
from kernels.paged_cache import (
    cached_range,
    check_cache,
    check_index,
    load_pages,
    token_offsets,
)

LOG2_E = 1.4426950408889634
MIN_SPLIT_TOKENS = 128
MAX_SPLITS = 64
TILE_BYTES = 16384
"""Of a tile of keys: with values and three stages, three programs fit in an H200's shared memory
and keep 64 KiB in flight each."""


def decode_splits(batch_size: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """How many ways the keys of a row are split in the graph of `batch_size`.

    The smallest power of two that gives four programs per multiprocessor (two of them fit at a
    time, so two waves), but never splits shorter than MIN_SPLIT_TOKENS at `max_seq_len` and
    never more than MAX_SPLITS. A row with a shorter context leaves its last splits empty.
    """
    wanted = -(-4 * num_sms // (batch_size * num_kv_heads))
    longest = max(1, max_seq_len // MIN_SPLIT_TOKENS)
    return min(1 << (wanted - 1).bit_length(), 1 << (longest.bit_length() - 1), MAX_SPLITS)


@triton.jit
def _split_plan(seq_len, window, num_splits, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr):
    """First position, first tile, end tile and tiles per split: a function of one row alone."""
    start = tl.where(window > 0, tl.maximum(seq_len - window, 0), 0)
    first = start // BLOCK_N
    end = tl.cdiv(seq_len, BLOCK_N)
    return start, first, end, tl.maximum(tl.cdiv(end - first, num_splits), MIN_TILES)


@triton.jit
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    row_request_ptr,
    seq_lens_ptr,
    partial_out_ptr,
    partial_lse_ptr,
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
    DIRECT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Heads run fastest: those of one token lie side by side in memory.
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    seq_len = tl.load(seq_lens_ptr + row)
    start, first, end, split_tiles = _split_plan(seq_len, window, num_splits, BLOCK_N, MIN_TILES)
    low = first + split * split_tiles
    high = tl.minimum(low + split_tiles, end)
    request = tl.load(row_request_ptr + row)
    table_ptr = tables_ptr + request.to(tl.int64) * table_stride
    # Pages are looked up two tiles ahead and turned into offsets one ahead: looked up where they
    # are used, every prefetch of keys would first wait for its pages. Which pages is known since
    # the step began, so the first are under way before the newest key is written.
    positions = low * BLOCK_N + tl.arange(0, BLOCK_N)
    first_pages = load_pages(table_ptr, positions, seq_len, PAGE_SIZE)
    pages = load_pages(table_ptr, positions + BLOCK_N, seq_len, PAGE_SIZE)
    wait_for_inputs(PDL)
    if not DIRECT:  # noqa: SIM102 - one is decided by the compiler, the other on the device
        if low >= high:
            return

    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    columns = (kv_head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    head_mask = heads < GROUP
    dim_mask = dims < HEAD_DIM
    row_mask = head_mask[:, None] & dim_mask[None, :]
    q = tl.load(q_ptr + row.to(tl.int64) * q_stride + columns, mask=row_mask, other=0.0)

    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    tokens = token_offsets(first_pages, positions, page_stride, slot_stride, PAGE_SIZE)
    for tile in range(low, high):
        positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        held = (positions >= start) & (positions < seq_len)
        offsets = tokens[:, None] + dims[None, :]
        mask = held[:, None] & dim_mask[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(held[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
        ahead = positions + BLOCK_N
        tokens = token_offsets(pages, ahead, page_stride, slot_stride, PAGE_SIZE)
        pages = load_pages(table_ptr, ahead + BLOCK_N, seq_len, PAGE_SIZE)

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if DIRECT:
        out = out_ptr + row.to(tl.int64) * out_stride + columns
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_mask)
    else:
        num_heads = tl.num_programs(0) * GROUP
        slots = (row * num_heads + kv_head * GROUP + heads).to(tl.int64) * num_splits + split
        out = partial_out_ptr + slots[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out, acc, mask=row_mask)
        tl.store(partial_lse_ptr + slots, top + tl.log2(total), mask=head_mask)


@triton.jit
def _combine_kernel(
    seq_lens_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    out_stride,
    window,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + row)
    wait_for_inputs(PDL)
    _, first, end, split_tiles = _split_plan(seq_len, window, num_splits, BLOCK_N, MIN_TILES)
    # Splits from here on were never written in this step: they hold what an older one left.
    filled = tl.cdiv(end - first, split_tiles)

    slot = (row * tl.num_programs(0) + head).to(tl.int64) * num_splits
    splits = tl.arange(0, BLOCK_S)
    lse = tl.load(partial_lse_ptr + slot + splits, mask=splits < filled, other=float("-inf"))
    top = tl.where(filled > 0, tl.max(lse, 0), 0.0)
    total = tl.sum(tl.exp2(lse - top), 0)

    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_DIM
    acc = tl.zeros([BLOCK_D], tl.float32)
    for base in range(0, filled, CHUNK_S):
        chunk = base + tl.arange(0, CHUNK_S)
        held = chunk < filled
        part_lse = tl.load(partial_lse_ptr + slot + chunk, mask=held, other=float("-inf"))
        part = tl.load(
            partial_out_ptr + (slot + chunk)[:, None] * HEAD_DIM + dims[None, :],
            mask=held[:, None] & dim_mask[None, :],
            other=0.0,
        )
        acc += tl.sum(part * tl.exp2(part_lse - top)[:, None], 0)
    acc = acc / tl.where(total > 0, total, 1.0)
    out = out_ptr + row.to(tl.int64) * out_stride + head * HEAD_DIM + dims
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=dim_mask)


def paged_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_request: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out[b, h] = softmax(scale * q[b, h] K_b^T) V_b over the keys that row b attends to.

    q [B, >= Hq * D]: the first Hq * D columns, so a row of q, k and v together will do.
    k_cache, v_cache [P, page_size, Hkv, D]: equal strides, the last 1; Hq / Hkv query heads
    share a kv head. block_tables int32 [R, max_pages]: position p of row b lies in page
    block_tables[row_request[b], p // page_size]. row_request, seq_lens int32 [B]: keys at
    positions below seq_lens[b] count (the row's own token is the last), and with window > 0
    only the last `window` of them. A row without keys gives zeros.
    Tables, requests and lengths are read before the kernel ahead is complete
    (`kernels.dependent_launch`): what wrote them last was launched before that one.

    Written in place: out [B, Hq * D] of q's dtype (float32, float16 or bfloat16), and with S
    splits > 1 the workspaces partial_out float32 [B, Hq, S, D] and partial_lse float32
    [B, Hq, S] (base 2), whose shape decides S and of which only splits that hold keys are
    written and read. Softmax and sums are float32.

    A program takes one row, one kv head and one contiguous part of the row's tiles of BLOCK_N
    keys, with the group's query heads as rows of one matrix product: every key is read once,
    2 * Hkv * D * itemsize bytes a token, which is what bounds the time. Which part is a
    function of seq_lens[b], window, S and BLOCK_N, and a second kernel adds the parts in their
    order, so a row's bits depend on no other row. The method is flash-decoding's: Dao et al.,
    "Flash-Decoding for long-context inference", 2023.
    """
    check_cache(q, k_cache, v_cache, block_tables, out)
    _check_rows(q, k_cache, row_request, seq_lens, partial_out, partial_lse, out)
    batch_size = q.shape[0]
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    num_heads = out.shape[1] // head_dim
    num_splits = partial_out.shape[2]
    block_d = triton.next_power_of_2(head_dim)
    block_n = min(max(TILE_BYTES // (block_d * q.element_size()), 16), 128)
    min_tiles = triton.cdiv(MIN_SPLIT_TOKENS, block_n)
    if batch_size == 0:
        return
    _split_kernel[(num_kv_heads, batch_size, num_splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        row_request,
        seq_lens,
        partial_out,
        partial_lse,
        out,
        q.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_tables.stride(0),
        out.stride(0),
        scale * LOG2_E,
        window,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        DIRECT=num_splits == 1,
        BLOCK_G=max(triton.next_power_of_2(num_heads // num_kv_heads), 16),
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        MIN_TILES=min_tiles,
        num_warps=4,
        num_stages=3,
        **dependent_launch(q.device),
    )
    if num_splits == 1:
        return
    block_s = triton.next_power_of_2(num_splits)
    _combine_kernel[(num_heads, batch_size)](
        seq_lens,
        partial_out,
        partial_lse,
        out,
        out.stride(0),
        window,
        num_splits,
        HEAD_DIM=head_dim,
        BLOCK_S=block_s,
        CHUNK_S=min(block_s, max(2048 // block_d, 1)),
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        MIN_TILES=min_tiles,
        num_warps=4,
        **dependent_launch(q.device),
    )


def paged_attention_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_request: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The twin of `paged_attention_triton`, row by row; leaves the workspaces alone."""
    check_cache(q, k_cache, v_cache, block_tables, out)
    _check_rows(q, k_cache, row_request, seq_lens, partial_out, partial_lse, out)
    num_kv_heads, head_dim = k_cache.shape[2:]
    rows = zip(row_request.tolist(), seq_lens.tolist(), strict=True)
    for row, (request, seq_len) in enumerate(rows):
        if seq_len == 0:
            out[row] = 0
            continue
        start = max(seq_len - window, 0) if window > 0 else 0
        table = block_tables[request]
        k = cached_range(k_cache, table, start, seq_len).transpose(0, 1)  # [Hkv, n, D]
        v = cached_range(v_cache, table, start, seq_len).transpose(0, 1)
        heads = q[row, : out.shape[1]].view(num_kv_heads, -1, head_dim)  # [Hkv, G, D]
        attended = scaled_dot_product_attention(heads.float()[None], k[None], v[None], scale=scale)
        out[row] = attended.flatten()


def _check_rows(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    row_request: torch.Tensor,
    seq_lens: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
) -> None:
    batch_size, head_dim = q.shape[0], k_cache.shape[3]
    num_heads = out.shape[1] // head_dim
    check_index("row_request", row_request, batch_size)
    check_index("seq_lens", seq_lens, batch_size)
    num_splits = partial_out.shape[2]
    for name, partial, shape in (
        ("partial_out", partial_out, (batch_size, num_heads, num_splits, head_dim)),
        ("partial_lse", partial_lse, (batch_size, num_heads, num_splits)),
    ):
        assert partial.shape == shape, f"{name}: {tuple(partial.shape)}, {shape} needed"
        assert partial.dtype == torch.float32, f"{name}: {partial.dtype}, not float32"
        assert partial.is_contiguous(), f"{name}: {partial.stride()}"


paged_attention = define_op(
    paged_attention_triton,
    paged_attention_torch,
    mutates=("partial_out", "partial_lse", "out"),
)
