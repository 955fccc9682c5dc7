"""Decode attention over a paged KV cache: one query token a row, its keys split over programs.

Knows nothing about requests beyond a row of the block table, and writes no keys or values.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

from kernels.arrivals import arrives_last, check_arrivals
from kernels.attention_tiles import attention_tiles, min_split_tokens
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
LOW = tl.constexpr(-1.0e30)  # below any score; its exp2 is 0 beside one


@triton.jit
def _tile_pages(table_ptr, tile, limit, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages of a tile's tokens below `limit`: a single one where no tile crosses a border."""
    positions = tile * BLOCK_N
    if PAGE_SIZE % BLOCK_N != 0:
        positions += tl.arange(0, BLOCK_N)
    return load_pages(table_ptr, positions, limit, PAGE_SIZE)


@triton.jit
def _attend_tile(q, k, v, held, scale_log2, top, total, acc):
    """Online softmax (Milakov and Gimelshein, 2018) after the N tokens of k and v [.., N, D] that
    are `held` [N] too: top [.., G] the highest score so far, total [.., G] the sum of
    exp2(score - top), acc [.., G, D] the values' sum in those weights, rounded to v's dtype."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [.., G, N]
    scores = tl.where(held, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, -1))
    fade = tl.exp2(top - new_top)
    weights = tl.exp2(scores - tl.expand_dims(new_top, -1))
    total = total * fade + tl.sum(weights, -1)
    faded = acc * tl.expand_dims(fade, -1)
    acc = tl.dot(weights.to(v.dtype), v, faded, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _load_part(partial_out_ptr, partial_lse_ptr, slot, dim, split, filled, mask, D: tl.constexpr):
    """One split's part of each element, and its weight's log2."""
    there = mask & (tl.zeros(mask.shape, tl.int32) + split < filled)
    lse = tl.load(partial_lse_ptr + slot + split, there, float("-inf"), cache_modifier=".cg")
    places = (slot + split) * D + dim
    part = tl.load(partial_out_ptr + places, there, 0.0, cache_modifier=".cg")
    return lse, part


@triton.jit
def _combine(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    first_head,
    num_splits,
    filled,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds up the parts of GROUP heads in the order of splits, two asked for at a time."""
    i = tl.arange(0, BLOCK)
    mask = i < GROUP * HEAD_DIM
    dim = i % HEAD_DIM
    slot = (first_head + i // HEAD_DIM).to(tl.int64) * num_splits
    top = tl.full([BLOCK], LOW, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    for split in range(0, filled, 2):
        lse0, part0 = _load_part(
            partial_out_ptr, partial_lse_ptr, slot, dim, split, filled, mask, HEAD_DIM
        )
        lse1, part1 = _load_part(
            partial_out_ptr, partial_lse_ptr, slot, dim, split + 1, filled, mask, HEAD_DIM
        )
        new_top = tl.maximum(tl.maximum(lse0, lse1), top)
        fade = tl.exp2(top - new_top)
        weight0, weight1 = tl.exp2(lse0 - new_top), tl.exp2(lse1 - new_top)
        total = total * fade + (weight0 + weight1)
        acc = acc * fade + (part0 * weight0 + part1 * weight1)
        top = new_top
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + first_head * HEAD_DIM + i, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["min_tiles"])
def _paged_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    row_request_ptr,
    seq_lens_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    arrivals_ptr,
    out_ptr,
    q_stride,
    page_stride,
    slot_stride,
    head_stride,
    table_stride,
    out_stride,
    scale_log2,
    window,
    min_tiles,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    # Heads run fastest: those of one token lie side by side in memory.
    first_kv = tl.program_id(0) * HEADS
    row = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    # First position, first tile, end tile, tiles a split, splits with keys: of one row alone.
    seq_len = tl.load(seq_lens_ptr + row)
    start = tl.where(window > 0, tl.maximum(seq_len - window, 0), 0)
    first = start // BLOCK_N
    end = tl.cdiv(seq_len, BLOCK_N)
    split_tiles = tl.maximum(tl.cdiv(end - first, num_splits), min_tiles)
    filled = tl.cdiv(end - first, split_tiles)
    low = first + split * split_tiles
    high = tl.minimum(low + split_tiles, end)
    request = tl.load(row_request_ptr + row)
    table_ptr = tables_ptr + request.to(tl.int64) * table_stride
    # Pages are looked up two tiles ahead and turned into offsets one ahead: looked up where they
    # are used, every prefetch of keys would first wait for its pages. Which pages is known since
    # the step began, so the first are under way before the newest key is written.
    first_pages = _tile_pages(table_ptr, low, seq_len, PAGE_SIZE, BLOCK_N)
    pages = _tile_pages(table_ptr, low + 1, seq_len, PAGE_SIZE, BLOCK_N)
    wait_for_inputs(PDL)
    if SPLIT:  # noqa: SIM102 - one is decided by the compiler, the other on the device
        if (low >= high) & (split > 0):
            return

    # Several kv heads are a leading dimension of all that follows; a single one has none.
    group = tl.arange(0, BLOCK_G)[:, None]
    kv_heads, head_mask = 0, group < GROUP
    if HEADS > 1:
        kv_heads = tl.arange(0, HEADS)[:, None, None]
        head_mask = head_mask & (kv_heads < HEADS)  # [.., G, 1]
    dims = tl.arange(0, BLOCK_D)[None, :]
    dim_mask = dims < HEAD_DIM
    row_mask = head_mask & dim_mask
    heads = (first_kv + kv_heads) * GROUP + group
    columns = heads * HEAD_DIM + dims  # [.., G, D]
    q = tl.load(q_ptr + row.to(tl.int64) * q_stride + columns, mask=row_mask, other=0.0)

    cache_columns = (first_kv + kv_heads) * head_stride + dims  # [.., 1, D]
    acc = tl.zeros(columns.shape, tl.float32)
    total = tl.sum(acc, -1)
    top = total + float("-inf")
    positions = low * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = token_offsets(first_pages, positions, page_stride, slot_stride, PAGE_SIZE)
    for tile in range(low, high):
        positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        held = (positions >= start) & (positions < seq_len)
        offsets = tokens[:, None] + cache_columns  # [.., N, D]
        mask = held[:, None] & dim_mask
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        top, total, acc = _attend_tile(q, k, v, held, scale_log2, top, total, acc)
        ahead = positions + BLOCK_N
        tokens = token_offsets(pages, ahead, page_stride, slot_stride, PAGE_SIZE)
        pages = _tile_pages(table_ptr, tile + 2, seq_len, PAGE_SIZE, BLOCK_N)

    acc = acc / tl.expand_dims(tl.where(total > 0, total, 1.0), -1)
    out_ptr += row.to(tl.int64) * out_stride
    is_whole = True
    if SPLIT:
        is_whole = filled <= 1
    if is_whole:
        tl.store(out_ptr + columns, acc.to(out_ptr.dtype.element_ty), mask=row_mask)
    else:
        row_heads = row * tl.num_programs(0) * HEADS * GROUP
        slots = (row_heads + heads).to(tl.int64) * num_splits + split
        lse = tl.expand_dims(top + tl.log2(total), -1)
        tl.store(partial_out_ptr + slots * HEAD_DIM + dims, acc, mask=row_mask)
        tl.store(partial_lse_ptr + slots, lse, mask=head_mask)
        if arrives_last(arrivals_ptr + row * tl.num_programs(0) + tl.program_id(0), filled):
            row_slot = row_heads.to(tl.int64) * num_splits
            _combine(
                partial_out_ptr + row_slot * HEAD_DIM,
                partial_lse_ptr + row_slot,
                out_ptr,
                first_kv * GROUP,
                num_splits,
                filled,
                HEADS * GROUP,
                HEAD_DIM,
                BLOCK_ALL,
            )


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
    arrivals: torch.Tensor,
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
    written and read, where more than one does; and arrivals int32, at least B * Hkv, which must
    hold zeros and does so again afterwards. Softmax and sums are float32.

    A program takes one row, one or several kv heads (`attention_tiles`) and one contiguous part
    of the row's tiles of BLOCK_N keys. A kv head's query heads are the rows of one matrix
    product, several kv heads' products a batch: every key is read once, 2 * Hkv * D * itemsize
    bytes a token, which is what bounds the time. Which part is a function of seq_lens[b],
    window, S, B and the shapes, and the last program of a row's heads to arrive, whichever it
    is, adds the parts in their order, so a row's bits depend on no other row. The method is
    flash-decoding's: Dao et al., "Flash-Decoding for long-context inference", 2023.
    """
    check_cache(q, k_cache, v_cache, block_tables, out)
    _check_rows(q, k_cache, row_request, seq_lens, partial_out, partial_lse, arrivals, out)
    batch_size = q.shape[0]
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    num_heads = out.shape[1] // head_dim
    num_splits = partial_out.shape[2]
    group = num_heads // num_kv_heads
    tiles = attention_tiles(batch_size, num_heads, num_kv_heads, head_dim, q.dtype, q.device)
    if batch_size == 0:
        return
    _paged_attention_kernel[(num_kv_heads // tiles.heads, batch_size, num_splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        row_request,
        seq_lens,
        partial_out,
        partial_lse,
        arrivals,
        out,
        q.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_tables.stride(0),
        out.stride(0),
        scale * LOG2_E,
        window,
        triton.cdiv(min_split_tokens(batch_size, num_kv_heads), tiles.block_n),
        HEADS=tiles.heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        SPLIT=num_splits > 1,
        BLOCK_G=max(triton.next_power_of_2(group), 16),
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_N=tiles.block_n,
        BLOCK_ALL=triton.next_power_of_2(tiles.heads * group * head_dim),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
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
    arrivals: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The twin of `paged_attention_triton`, row by row; leaves the workspaces alone."""
    check_cache(q, k_cache, v_cache, block_tables, out)
    _check_rows(q, k_cache, row_request, seq_lens, partial_out, partial_lse, arrivals, out)
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
    arrivals: torch.Tensor,
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
    check_arrivals(arrivals, batch_size * k_cache.shape[2] if num_splits > 1 else 0)


paged_attention = define_op(
    paged_attention_triton,
    paged_attention_torch,
    mutates=("partial_out", "partial_lse", "arrivals", "out"),
)
