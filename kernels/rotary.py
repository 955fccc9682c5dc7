"""From a fused q/k/v product to rotated queries and written KV entries, in one launch.

Knows pages only as numbers: who owns a page, and which pages a request holds, is not its matter.
`lora_arguments` says what the LoRA arguments are, `lora_expand` how a delta is added.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_arguments import LORA_TABLES, lora_of, part_blocks, row_blocks
from kernels.lora_expand import find_slice, first_ranks, row_delta, row_product, row_sums
from kernels.op import define_op
from kernels.rotary_heads import copy_heads, load_angles, rotate_heads

_FEW_ROWS = 32  # up to so many there are few programs, which wait for memory alone
_HALF_ELEMENTS = 256  # columns of a program's half heads
_FEW_ROWS_HALF_ELEMENTS = 64  # with deltas and without norms
_MANY_ROWS_HALF_ELEMENTS = 512
_HALF_ELEMENTS_PER_WARP = 128  # with 16 ranks of a 16-bit B, 64 registers a thread


@triton.jit(do_not_specialize_on_alignment=LORA_TABLES)
def _rotary_kv_write_kernel(
    qkv,  # [T, (Hq + 2 Hkv) · D], q in place
    shrunk,  # this and the next tensors None without LoRA
    arena,
    b_ptrs,
    lora_ranks,
    scalings,
    row_slot,
    q_norm_weight,  # [D], or None
    k_norm_weight,  # [D], or None
    norm_eps,
    norm_weight_offset,
    cos_sin,  # [max_pos, D] float32
    positions,  # [T] int32
    kv_slots,  # [T] int32
    k_cache,  # [P, page_size, Hkv, D] in place
    v_cache,  # [P, page_size, Hkv, D] in place
    qkv_stride,
    page_stride,
    entry_stride,
    max_position,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # D/2
    PAGE_SIZE: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    VECTOR: tl.constexpr,
    GROUP: tl.constexpr,  # heads a program
    BLOCK: tl.constexpr,  # columns of half a head, a power of two
    BLOCK_R: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # of shrunk
    PART_STRIDE: tl.constexpr,
    EARLY: tl.constexpr,  # angles are in registers while the kernel before this ends
    PDL: tl.constexpr,
):
    Q_GROUPS: tl.constexpr = (NUM_Q_HEADS + GROUP - 1) // GROUP
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + GROUP - 1) // GROUP
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)  # the groups of q, then of k, then of v: none holds two kinds
    q = qkv + token * qkv_stride
    k = q + NUM_Q_HEADS * 2 * HALF
    v = k + NUM_KV_HEADS * 2 * HALF
    position = tl.minimum(tl.maximum(tl.load(positions + token), 0), max_position)
    slot = tl.load(kv_slots + token)
    angles = cos_sin + position.to(tl.int64) * (2 * HALF)
    if EARLY:
        cos, sin = load_angles(angles, HALF, GROUP, BLOCK)
    if shrunk is not None:
        after_q = (group >= Q_GROUPS).to(tl.int32)
        after_k = (group >= Q_GROUPS + KV_GROUPS).to(tl.int32)
        kind = after_q + after_k
        heads = tl.where(after_q > 0, NUM_KV_HEADS, NUM_Q_HEADS)
        lane = tl.arange(0, GROUP * BLOCK)
        head = (group - after_q * Q_GROUPS - after_k * KV_GROUPS) * GROUP + lane // BLOCK
        inside = (head < heads) & (lane % BLOCK < HALF)
        n = head * (2 * HALF) + lane % BLOCK
        adapter = tl.load(row_slot + token)
        address, rank, scaling = find_slice(b_ptrs, lora_ranks, scalings, adapter, kind, MAX_LORAS)
        left_first = first_ranks(address, arena, rank, n, inside, VECTOR, BLOCK_R)
        right_first = first_ranks(address, arena, rank, n + HALF, inside, VECTOR, BLOCK_R)
    wait_for_inputs(PDL)
    if shrunk is not None:
        source = shrunk + token * SHRUNK_STRIDE + kind * MAX_RANK
        sums = row_sums(source, rank, VECTOR, BLOCK_R, 0, PARTS, PART_STRIDE)
        left_delta = row_delta(
            row_product(left_first, sums),
            address,
            arena,
            rank,
            scaling,
            source,
            n,
            inside,
            VECTOR,
            BLOCK_R,
            ONE_BLOCK,
            PARTS,
            PART_STRIDE,
        ).reshape(GROUP, BLOCK)
        right_delta = row_delta(
            row_product(right_first, sums),
            address,
            arena,
            rank,
            scaling,
            source,
            n + HALF,
            inside,
            VECTOR,
            BLOCK_R,
            ONE_BLOCK,
            PARTS,
            PART_STRIDE,
        ).reshape(GROUP, BLOCK)
    else:
        left_delta, right_delta, rank = None, None, 0
    if not EARLY:
        cos, sin = load_angles(angles, HALF, GROUP, BLOCK)
    if group < Q_GROUPS:
        rotate_heads(
            q,
            q,
            left_delta,
            right_delta,
            rank,
            q_norm_weight,
            norm_eps,
            norm_weight_offset,
            cos,
            sin,
            group * GROUP,
            NUM_Q_HEADS,
            HALF,
            GROUP,
            BLOCK,
        )
    elif slot >= 0:
        page = (slot // PAGE_SIZE).to(tl.int64)
        entry = page * page_stride + (slot % PAGE_SIZE) * entry_stride
        if group < Q_GROUPS + KV_GROUPS:
            rotate_heads(
                k,
                k_cache + entry,
                left_delta,
                right_delta,
                rank,
                k_norm_weight,
                norm_eps,
                norm_weight_offset,
                cos,
                sin,
                (group - Q_GROUPS) * GROUP,
                NUM_KV_HEADS,
                HALF,
                GROUP,
                BLOCK,
            )
        else:
            copy_heads(
                v,
                v_cache + entry,
                left_delta,
                right_delta,
                rank,
                (group - Q_GROUPS - KV_GROUPS) * GROUP,
                NUM_KV_HEADS,
                HALF,
                GROUP,
                BLOCK,
            )


def _check(
    qkv: torch.Tensor,
    norm_weights: tuple[torch.Tensor | None, torch.Tensor | None],
    cos_sin: torch.Tensor,
    indices: tuple[torch.Tensor, torch.Tensor],
    num_q_heads: int,
    num_kv_heads: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    num_tokens, width = qkv.shape
    head_dim = k_cache.shape[3]
    assert head_dim % 2 == 0, f"head_dim is even, not {head_dim}"
    assert width == (num_q_heads + 2 * num_kv_heads) * head_dim, (
        f"qkv is [T, ({num_q_heads} + 2 · {num_kv_heads}) · {head_dim}], not {tuple(qkv.shape)}"
    )
    assert qkv.stride(1) == 1, "rows are contiguous"
    for cache in (k_cache, v_cache):
        assert cache.shape == (*k_cache.shape[:2], num_kv_heads, head_dim), (
            f"caches are [P, page_size, {num_kv_heads}, {head_dim}], not {tuple(cache.shape)}"
        )
        assert cache.dtype == qkv.dtype, f"caches are {qkv.dtype}, not {cache.dtype}"
        assert cache.stride() == (*k_cache.stride()[:2], head_dim, 1), (
            f"caches differ in strides or an entry is not contiguous: {cache.stride()}"
        )
    assert cos_sin.shape[1:] == (head_dim,), (
        f"cos_sin is [max_pos, {head_dim}], not {tuple(cos_sin.shape)}"
    )
    assert cos_sin.dtype == torch.float32, f"cos_sin is float32, not {cos_sin.dtype}"
    assert cos_sin.is_contiguous(), "cos_sin is contiguous"
    for weight in norm_weights:
        if weight is not None:
            assert weight.shape == (head_dim,), (
                f"norm weights are [{head_dim}], not {tuple(weight.shape)}"
            )
            assert weight.is_contiguous(), "norm weights are contiguous"
    for index in indices:
        assert index.shape == (num_tokens,), (
            f"positions and kv_slots are [{num_tokens}], not {tuple(index.shape)}"
        )
        assert index.dtype == torch.int32, f"positions and kv_slots are int32, not {index.dtype}"
        assert index.is_contiguous(), "positions and kv_slots are contiguous"


def rotary_kv_write_triton(
    qkv: torch.Tensor,
    shrunk: torch.Tensor | None,
    arena: torch.Tensor | None,
    b_ptrs: torch.Tensor | None,
    lora_ranks: torch.Tensor | None,
    scalings: torch.Tensor | None,
    row_slot: torch.Tensor | None,
    row_order: torch.Tensor | None,
    seg_indptr: torch.Tensor | None,
    weight_indices: torch.Tensor | None,
    num_segments: torch.Tensor | None,
    max_rank: int,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    norm_eps: float,
    norm_weight_offset: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Rotate q in place; write rotated k, and v as it is, to each token's KV slot.

    For a head h with halves (a, b) and the angles θ of the token's position:
    `h <- (a · cos θ - b · sin θ, b · cos θ + a · sin θ)`; before that, where a norm's weight is
    given, `h <- h / sqrt(mean(h²) + norm_eps) · (weight + norm_weight_offset)`. All in float32,
    rounded once on the store.

    qkv: [T, (Hq + 2 Hkv) · D], rows contiguous, any row stride; its q part is written, its k and
    v parts are only read. From shrunk to max_rank LoRA of three slices, whose deltas are added to
    q, k and v before all that; takes shrunk in parts. cos_sin: [max_pos, D] float32, a row holds
    cos of the D/2 angles, then sin. positions, kv_slots: [T] int32; a position is clamped into
    [0, max_pos), a slot is page · page_size + offset, and nothing is written for a negative one.
    k_cache, v_cache: [P, page_size, Hkv, D] of qkv's dtype, any page and entry stride, written;
    tokens with equal slots leave one of their values there. norm weights: [D] of any float dtype.

    One program a token and group of heads, which reads its part of that token's B. Moves
    2 · T · (Hq + 2 Hkv) · D elements, and rank · (Hq + 2 Hkv) · D of B for each row with an
    adapter. As the LoRA arguments but `shrunk`, positions and kv_slots must be two launches old.
    Raises AssertionError on other shapes, dtypes or strides. Method: Su et al., "RoFormer" (2021),
    with the pairs (i, i + D/2) of GPT-NeoX; norm of heads: Henry et al., "Query-Key Normalization
    for Transformers" (2020), in its RMS form.
    """
    weights = (q_norm_weight, k_norm_weight)
    indices = (positions, kv_slots)
    _check(qkv, weights, cos_sin, indices, num_q_heads, num_kv_heads, k_cache, v_cache)
    rows = (row_slot, row_order, seg_indptr, weight_indices, num_segments)
    num_tokens = qkv.shape[0]
    tables = (shrunk, arena, b_ptrs, lora_ranks, scalings)
    lora = lora_of(num_tokens, 3, *tables, *rows, max_rank, takes_parts=True)
    half = k_cache.shape[3] // 2
    block = triton.next_power_of_2(half)
    # A norm adds up squares in an order that goes by the program's columns and warps, which with
    # one are therefore the same with and without LoRA.
    half_elements, few_rows = _HALF_ELEMENTS, num_tokens <= _FEW_ROWS
    if lora is not None and q_norm_weight is None and k_norm_weight is None:
        half_elements = _FEW_ROWS_HALF_ELEMENTS if few_rows else _MANY_ROWS_HALF_ELEMENTS
    group = max(half_elements // block, 1)
    num_groups = triton.cdiv(num_q_heads, group) + 2 * triton.cdiv(num_kv_heads, group)
    _rotary_kv_write_kernel[(num_tokens, num_groups)](
        qkv,
        shrunk,
        arena,
        b_ptrs,
        lora_ranks,
        scalings,
        row_slot,
        q_norm_weight,
        k_norm_weight,
        norm_eps,
        norm_weight_offset,
        cos_sin,
        positions,
        kv_slots,
        k_cache,
        v_cache,
        qkv.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        cos_sin.shape[0] - 1,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        PAGE_SIZE=k_cache.shape[1],
        MAX_RANK=max_rank,
        GROUP=group,
        BLOCK=block,
        **row_blocks(lora),
        **part_blocks(lora),
        EARLY=lora is None or few_rows,
        num_warps=triton.cdiv(max(half_elements, block), _HALF_ELEMENTS_PER_WARP),
        **dependent_launch(qkv.device),
    )


def _norm_torch(
    heads: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float
) -> torch.Tensor:
    if weight is None:
        return heads
    inverse_rms = torch.rsqrt(heads.square().mean(dim=-1, keepdim=True) + eps)  # [T, heads, 1]
    return heads * inverse_rms * (weight.float() + weight_offset)


def _rotate_torch(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    left, right = heads.chunk(2, dim=-1)
    cos, sin = angles.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def rotary_kv_write_torch(
    qkv: torch.Tensor,
    shrunk: torch.Tensor | None,
    arena: torch.Tensor | None,
    b_ptrs: torch.Tensor | None,
    lora_ranks: torch.Tensor | None,
    scalings: torch.Tensor | None,
    row_slot: torch.Tensor | None,
    row_order: torch.Tensor | None,
    seg_indptr: torch.Tensor | None,
    weight_indices: torch.Tensor | None,
    num_segments: torch.Tensor | None,
    max_rank: int,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    norm_eps: float,
    norm_weight_offset: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Twin of `rotary_kv_write_triton`."""
    weights = (q_norm_weight, k_norm_weight)
    indices = (positions, kv_slots)
    _check(qkv, weights, cos_sin, indices, num_q_heads, num_kv_heads, k_cache, v_cache)
    rows = (row_slot, row_order, seg_indptr, weight_indices, num_segments)
    num_tokens = qkv.shape[0]
    tables = (shrunk, arena, b_ptrs, lora_ranks, scalings)
    lora = lora_of(num_tokens, 3, *tables, *rows, max_rank, takes_parts=True)
    page_size, head_dim = k_cache.shape[1], k_cache.shape[3]
    heads = qkv.view(-1, num_q_heads + 2 * num_kv_heads, head_dim)  # [T, Hq + 2 Hkv, D]
    angles = cos_sin[positions.clamp(0, cos_sin.shape[0] - 1)]  # [T, D]
    values = heads[:, num_q_heads + num_kv_heads :]  # [T, Hkv, D]
    if lora is None:
        rotated = heads[:, : num_q_heads + num_kv_heads].float()  # [T, Hq + Hkv, D]
    else:
        kv_width = num_kv_heads * head_dim
        delta = lora.delta([num_q_heads * head_dim, kv_width, kv_width])
        wide = heads.float() + delta.view(heads.shape)
        rotated = wide[:, : num_q_heads + num_kv_heads]
        values = wide[:, num_q_heads + num_kv_heads :].to(qkv.dtype)
    if q_norm_weight is not None or k_norm_weight is not None:
        q, k = rotated[:, :num_q_heads], rotated[:, num_q_heads:]
        q = _norm_torch(q, q_norm_weight, norm_eps, norm_weight_offset)
        k = _norm_torch(k, k_norm_weight, norm_eps, norm_weight_offset)
        rotated = torch.cat((q, k), dim=1)
    rotated = _rotate_torch(rotated, angles.unsqueeze(1)).to(qkv.dtype)
    heads[:, :num_q_heads] = rotated[:, :num_q_heads]
    writes = (kv_slots >= 0).nonzero().squeeze(1)
    slots = kv_slots[writes]
    at = (slots // page_size, slots % page_size)
    k_cache[at] = rotated[writes, num_q_heads:]
    v_cache[at] = values[writes]


rotary_kv_write = define_op(
    rotary_kv_write_triton, rotary_kv_write_torch, mutates=("qkv", "k_cache", "v_cache")
)
