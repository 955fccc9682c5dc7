"""Expert LoRA of few rows, first half: x A^T of each pair, `moe_lora_pairs` says where things lie.

A program multiplies one row with a few rows of one A over one part of K. There is no tile of
rows, since pairs are not sorted: a matrix-vector product on the ordinary cores, whose time is
that of reading A. Parts are partial sums, and the last of a tile to arrive adds them up in their
order, whichever it is: what reads x A^T next reads one sum.
"""

import torch
import triton
import triton.language as tl

from kernels.arrivals import arrives_last, check_arrivals, sum_in_order
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_segments import as_weights, weight_view
from kernels.moe_lora_pairs import PAIR_TABLES, check_pairs, check_rows, walk_pairs
from kernels.op import define_op

SPLIT_PAIRS = (16, 32, 64, 128)  # up to each of these, fewer splits of K
SHRINK_WARPS = 4  # of a program: bits depend on how many there are
MOST_K = 512  # columns of A that a program reads at once
_LEAST_K = 128  # and that it reads at least


def moe_shrink_split_k(num_pairs: int, in_features: int) -> int:
    """How many parts `moe_lora_shrink` should split K into: many for few pairs.

    The workspace `shrunk` takes splits * P * stack * max_rank * 4 bytes; splits * P stays at or
    below max(P, 256), so one of max(P, 256) pairs serves every P up to its own.
    """
    splits = next((256 // limit for limit in SPLIT_PAIRS if num_pairs <= limit), 1)
    return max(1, min(splits, in_features // _LEAST_K))


def _rank_block(max_rank: int) -> int:
    """Ranks of a slice in a tile."""
    return min(16, max(4, triton.next_power_of_2(max_rank)))


def moe_shrink_arrivals(num_pairs: int, stack: int, max_rank: int) -> int:
    """How many counters of arrivals a launch of more than one split needs."""
    return num_pairs * stack * triton.cdiv(max_rank, _rank_block(max_rank))


@triton.jit
def pair_shrink_tile(
    x,  # [P / PAIRS_PER_ROW, K]
    arena,
    a_ptrs,
    lora_ranks,
    outer_ptrs,
    outer_ranks,
    row_adapter,
    adapter_enabled,
    topk_ids,
    shrunk,  # float32[splits, P, STACK * MAX_RANK]; the sums end in the first
    arrivals,  # int32, zero before and after: one for each pair, slice and tile of ranks
    split_rows,
    blocks_per_split,
    splits,
    pair,
    place,
    split,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    STACK: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    RANK_PROGRAMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    """`place` counts the RANK_PROGRAMS programs of each slice of the pair, which take its tiles of
    BLOCK_R ranks in turn; splits take `blocks_per_split` blocks of BLOCK_A elements of K."""
    rank_tiles: tl.constexpr = (MAX_RANK + BLOCK_R - 1) // BLOCK_R
    stacked = place // RANK_PROGRAMS
    first_rank = place % RANK_PROGRAMS * BLOCK_R
    slot = tl.load(row_adapter + pair // TOP_K)
    expert = tl.load(topk_ids + pair)
    known = (slot >= 0) & (slot < MAX_LORAS)
    chosen = known & (expert >= 0) & (expert < NUM_EXPERTS)
    # All that a program may need of the tables in one wait, not one wait each.
    enabled = tl.load(adapter_enabled + slot, mask=known, other=0)
    entry = (stacked * MAX_LORAS + slot) * NUM_EXPERTS + expert
    rank = tl.load(lora_ranks + entry, mask=chosen, other=0)
    address = tl.load(a_ptrs + entry, mask=chosen, other=0)
    if outer_ranks is not None:
        outer_entry = stacked * MAX_LORAS + slot
        outer_rank = tl.load(outer_ranks + outer_entry, mask=known, other=0)
        outer_address = tl.load(outer_ptrs + outer_entry, mask=known, other=0)
        # A shared A works once a row, at its first pair, whether or not the slot has that expert.
        once = tl.where(pair % PAIRS_PER_ROW == 0, outer_rank, 0)
        rank = tl.where(outer_rank > 0, once, rank)
        address = tl.where(outer_rank > 0, outer_address, address)
    # No early return, for nothing to do: a function that has one is not inlined.
    rank = tl.where(enabled != 0, rank, 0)
    a = as_weights(address, arena)
    x_row = x + (pair // PAIRS_PER_ROW).to(tl.int64) * X_STRIDE
    sums = shrunk + pair.to(tl.int64) * SHRUNK_STRIDE + stacked * MAX_RANK
    split_stride = split_rows.to(tl.int64) * SHRUNK_STRIDE
    counters = arrivals + (pair * STACK + stacked) * rank_tiles
    first_k = split * blocks_per_split * BLOCK_A
    end_k = tl.minimum(first_k + blocks_per_split * BLOCK_A, K)
    for tile in range(first_rank, rank, RANK_PROGRAMS * BLOCK_R):
        ranks = tile + tl.arange(0, BLOCK_R)
        part = tl.zeros([BLOCK_R], tl.float32)
        for start in range(first_k, end_k, BLOCK_A):
            k = start + tl.arange(0, BLOCK_A)
            a_places = a + ranks[:, None] * K + k[None, :]
            a_mask = (ranks < rank)[:, None] & (k < K)[None, :]
            a_block = tl.load(a_places, mask=a_mask, other=0.0)  # [BLOCK_R, BLOCK_A]
            x_block = tl.load(x_row + k, mask=k < K, other=0.0)  # [BLOCK_A]
            part += tl.sum(a_block.to(tl.float32) * x_block.to(tl.float32)[None, :], axis=1)
        places, live = sums + ranks, ranks < rank
        tl.store(places + split * split_stride, part, mask=live)
        if splits > 1:  # noqa: SIM102 - `and` would count the arrival either way
            if arrives_last(counters + tile // BLOCK_R, splits):
                tl.store(places, sum_in_order(places, live, splits, split_stride), mask=live)


@triton.jit(
    do_not_specialize=["split_rows", "blocks_per_split", "splits"],
    do_not_specialize_on_alignment=PAIR_TABLES,
)
def _moe_lora_shrink_kernel(
    x,
    arena,
    a_ptrs,
    lora_ranks,
    outer_ptrs,
    outer_ranks,
    row_adapter,
    adapter_enabled,
    topk_ids,
    shrunk,
    arrivals,
    split_rows,
    blocks_per_split,
    splits,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    STACK: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    RANK_PROGRAMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    pair_shrink_tile(
        x,
        arena,
        a_ptrs,
        lora_ranks,
        outer_ptrs,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        shrunk,
        arrivals,
        split_rows,
        blocks_per_split,
        splits,
        tl.program_id(0),
        tl.program_id(1),
        tl.program_id(2),
        K,
        X_STRIDE,
        SHRUNK_STRIDE,
        STACK,
        MAX_RANK,
        MAX_LORAS,
        NUM_EXPERTS,
        TOP_K,
        PAIRS_PER_ROW,
        RANK_PROGRAMS,
        BLOCK_R,
        BLOCK_A,
    )


def check_pair_shrink(
    x: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    pairs_per_row: int,
    max_rank: int,
    shrunk: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    check_pairs(
        arena,
        a_ptrs,
        lora_ranks,
        None,
        outer_ptrs,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        max_rank,
        shrunk,
    )
    top_k = topk_ids.shape[1]
    assert pairs_per_row in (1, top_k), f"pairs_per_row is {pairs_per_row}, not 1 or {top_k}"
    assert (outer_ptrs is None) == (outer_ranks is None), "outer_ptrs and outer_ranks go together"
    assert outer_ranks is None or pairs_per_row == top_k, "a shared A needs one row for all pairs"
    assert shrunk.dim() == 3, f"shrunk has {shrunk.dim()} dims, not 3: splits, pairs, ranks"
    needed = moe_shrink_arrivals(topk_ids.numel(), a_ptrs.shape[0], max_rank)
    check_arrivals(arrivals, needed if shrunk.shape[0] > 1 else 0)
    check_rows("x", x, (topk_ids.numel() // pairs_per_row, x.shape[1]))


def pair_shrink_arguments(
    x: torch.Tensor, a_ptrs: torch.Tensor, max_rank: int, shrunk: torch.Tensor
) -> dict[str, int]:
    """`pair_shrink_tile`'s numbers and constexprs, but those that `x` and the pairs give any
    kernel of theirs (K, X_STRIDE, TOP_K, PAIRS_PER_ROW)."""
    (stack, max_loras, num_experts), in_features = a_ptrs.shape, x.shape[1]
    splits, num_pairs, _ = shrunk.shape
    block_r, part = _rank_block(max_rank), triton.cdiv(in_features, splits)
    block_a = MOST_K if part % MOST_K == 0 else 256 if part > _LEAST_K else _LEAST_K
    # Few pairs: every tile of ranks has a program. Many: a program takes them all, since most of
    # those programs would find that the true rank ends before their tile.
    rank_programs = triton.cdiv(max_rank, block_r) if num_pairs <= 256 else 1
    return {
        "split_rows": shrunk.stride(0) // shrunk.stride(1),
        "blocks_per_split": triton.cdiv(triton.cdiv(in_features, block_a), splits),
        "splits": splits,
        "SHRUNK_STRIDE": shrunk.stride(1),
        "STACK": stack,
        "MAX_RANK": max_rank,
        "MAX_LORAS": max_loras,
        "NUM_EXPERTS": num_experts,
        "RANK_PROGRAMS": rank_programs,
        "BLOCK_R": block_r,
        "BLOCK_A": block_a,
    }


def moe_lora_shrink_triton(
    x: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    pairs_per_row: int,
    max_rank: int,
    shrunk: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """Shrink: shrunk[0, p, j * max_rank + r] = x[p // pairs_per_row] . A_j[r].

    A_j is that of slice j, of pair p's expert and of its row's slot. x [P // pairs_per_row, K]:
    pairs_per_row is k where a row's pairs read the same x (gate and up), 1 where every pair has
    its own (down); the latter takes None for both outer tables. Writes `shrunk` in place, up to
    the true rank of each pair that has an expert, an enabled slot and a rank: split i of K, the
    i-th of shrunk.shape[0] equal ranges, into shrunk[i], whose sum then stands in shrunk[0].
    `arrivals` int32, one for each pair, slice and tile of ranks where there is more than one
    split, is zero before and after. Where outer_ranks is not 0, only pair t * k of row t is
    written, with the shared A. Products and sums in float32, in one order: a pair's sums depend
    on its x, its A and the shapes alone. Reads rank * K elements of A a pair and slice. Raises
    AssertionError on other shapes, dtypes or strides.
    """
    check_pair_shrink(
        x,
        arena,
        a_ptrs,
        lora_ranks,
        outer_ptrs,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        pairs_per_row,
        max_rank,
        shrunk,
        arrivals,
    )
    splits, num_pairs, _ = shrunk.shape
    arguments = pair_shrink_arguments(x, a_ptrs, max_rank, shrunk)
    places = a_ptrs.shape[0] * arguments["RANK_PROGRAMS"]
    _moe_lora_shrink_kernel[(num_pairs, places, splits)](
        x,
        arena,
        a_ptrs,
        lora_ranks,
        outer_ptrs,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        shrunk,
        arrivals,
        K=x.shape[1],
        X_STRIDE=x.stride(0),
        TOP_K=topk_ids.shape[1],
        PAIRS_PER_ROW=pairs_per_row,
        **arguments,
        num_warps=SHRINK_WARPS,
        **dependent_launch(x.device),
    )


def moe_lora_shrink_torch(
    x: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    pairs_per_row: int,
    max_rank: int,
    shrunk: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """Torch twin of `moe_lora_shrink_triton`; the whole sum goes to the first split."""
    check_pair_shrink(
        x,
        arena,
        a_ptrs,
        lora_ranks,
        outer_ptrs,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        pairs_per_row,
        max_rank,
        shrunk,
        arrivals,
    )
    addresses, ranks = a_ptrs.tolist(), lora_ranks.tolist()
    shared = None if outer_ptrs is None else outer_ptrs.tolist()
    shared_ranks = None if outer_ranks is None else outer_ranks.tolist()
    for pair, slot, expert in walk_pairs(row_adapter, adapter_enabled, topk_ids):
        for j in range(len(ranks)):
            rank = ranks[j][slot][expert] if expert >= 0 else 0
            address = addresses[j][slot][expert]
            if shared and shared_ranks and shared_ranks[j][slot]:
                rank = shared_ranks[j][slot] if pair % pairs_per_row == 0 else 0
                address = shared[j][slot]
            if rank:
                a = weight_view(arena, address, rank, x.shape[1])  # [rank, K]
                target = shrunk[:, pair, j * max_rank : j * max_rank + rank]
                target[0] = a @ x[pair // pairs_per_row].float()
                target[1:] = 0


moe_lora_shrink = define_op(
    moe_lora_shrink_triton, moe_lora_shrink_torch, mutates=("shrunk", "arrivals")
)
