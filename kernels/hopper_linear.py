"""The product with a base weight, and x A^T in the same launch, on Hopper: `linear`'s and
`linear_shrink`'s results to the bit, sooner.

Two things are sooner than in Triton's kernels, which serve other cards: the first blocks of a
weight are under way while the kernel before still runs (`hopper_multiply`), and x A^T takes few
programs (`hopper_shrink`).
"""

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.hopper_multiply import end_barriers, multiply, new_barriers, product_layout
from kernels.hopper_shrink import hopper_shrink_tile
from kernels.linear_arrangement import Arrangement, product_programs
from kernels.linear_config import HOPPER, LinearConfig, card
from kernels.lora_segments import TABLES
from kernels.lora_shrink import shrink_arguments
from kernels.partials import rows_a_split, splits_of

ALIGNMENT = 16  # bytes, at which rows that are copied begin

NO_TABLES = (None,) * 8
NO_SHRINK = {
    "max_segments": 0,
    "shrunk_rows": 0,
    "split_blocks": 0,
    "splits": 0,
    "SHRUNK_STRIDE": 0,
    "STACK": 0,
    "MAX_RANK": 0,
    "MAX_LORAS": 0,
}
"""What the kernel is told of x A^T where there is none."""


@gluon.jit
def first_sums(
    bias,
    first_n,
    is_first_split,
    N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """[BLOCK_N, BLOCK_M] that a tile's product is added to: of the first split of K the bias."""
    layout: gl.constexpr = product_layout(BLOCK_M, gl.num_warps())
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    if bias is not None:
        row = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
        biased = row < gl.where(is_first_split, N, 0)
        acc += gl.load(bias + row, mask=biased, other=0.0).to(gl.float32)[:, None]
    return acc


@gluon.jit
def store_tile(
    acc,
    out,
    first_n,
    num_tokens,
    N: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """`acc` [BLOCK_N, BLOCK_M] to `out` [T, N], from column `first_n` on."""
    # Through shared memory: lanes beside one another then hold columns that lie so in `out`.
    layout: gl.constexpr = gl.BlockedLayout(
        [8, 1], [BLOCK_N // 8, 256 // BLOCK_N], [1, gl.num_warps()], [0, 1]
    )
    result = gl.convert_layout(acc.to(out.dtype.element_ty), layout)
    n = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
    mask = (n >= 0)[:, None] & (m < num_tokens)[None, :]
    if N % BLOCK_N != 0:
        mask = mask & (n < N)[:, None]
    gl.store(out + m[None, :] * OUT_STRIDE + n[:, None], result, mask=mask)


@gluon.jit
def hopper_product_tile(
    x,
    weight,
    bias,
    out,
    num_tokens,
    split_rows,
    program,
    N: gl.constexpr,
    K: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """`linear_tile`, of x and W behind descriptors."""
    SPLIT_K: gl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    first_n, split = program // SPLITS * BLOCK_N, program % SPLITS
    first_k = split * SPLIT_K
    acc = first_sums(bias, first_n, split == 0, N, BLOCK_M, BLOCK_N)
    last_k = gl.minimum(first_k + SPLIT_K, K)
    ready = new_barriers(STAGES)
    acc = multiply(
        x,
        weight,
        first_n,
        None,
        None,
        first_k,
        last_k,
        acc,
        ready,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        STAGES,
        PDL,
    )
    places = out + (split * split_rows).to(gl.int64) * OUT_STRIDE
    store_tile(acc, places, first_n, num_tokens, N, OUT_STRIDE, BLOCK_M, BLOCK_N)
    end_barriers(ready)


@gluon.jit(
    do_not_specialize=[
        "num_tokens",
        "split_rows",
        "max_segments",
        "shrunk_rows",
        "split_blocks",
        "splits",
    ],
    do_not_specialize_on_alignment=[*TABLES, "row_slot"],
)
def _hopper_linear_kernel(
    x,  # descriptor of [T, K]
    weight,  # descriptor of [N, K]
    bias,  # [N] or None
    out,  # [T, N], or [splits, T, N]
    arena,  # None, as all up to `arrivals`: without x A^T
    a_ptrs,
    lora_ranks,
    seg_indptr,
    weight_indices,
    row_slot,
    shrunk,
    arrivals,
    num_tokens,
    split_rows,
    max_segments,
    shrunk_rows,
    split_blocks,
    splits,
    N: gl.constexpr,
    K: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SHRINK_FIRST: gl.constexpr,
    SHRUNK_STRIDE: gl.constexpr,
    STACK: gl.constexpr,
    MAX_RANK: gl.constexpr,
    MAX_LORAS: gl.constexpr,
    PDL: gl.constexpr,
):
    products: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * SPLITS
    program = gl.program_id(0)
    if SHRINK_FIRST:
        product, shrink = program - (gl.num_programs(0) - products), program
        shrinks = product < 0
    else:
        product, shrink = program, program - products
        shrinks = shrink >= 0
    if not shrinks:
        hopper_product_tile(
            x,
            weight,
            bias,
            out,
            num_tokens,
            split_rows,
            product,
            N,
            K,
            OUT_STRIDE,
            SPLITS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            STAGES,
            PDL,
        )
    elif arena is not None:
        hopper_shrink_tile(
            x,
            arena,
            a_ptrs,
            lora_ranks,
            seg_indptr,
            weight_indices,
            row_slot,
            shrunk,
            arrivals,
            num_tokens,
            max_segments,
            shrunk_rows,
            split_blocks,
            splits,
            shrink,
            K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            STAGES,
            SHRUNK_STRIDE,
            STACK,
            MAX_RANK,
            MAX_LORAS,
            PDL,
        )
    else:
        wait_for_inputs(PDL)  # without x A^T there is no such program


def is_for_hopper(
    config: LinearConfig, x: torch.Tensor, weight: torch.Tensor, arena: torch.Tensor | None = None
) -> bool:
    """Whether `_hopper_linear_kernel` can compute a product, and x A^T of weights in `arena`."""
    is_one_dtype = arena is None or arena.dtype == x.dtype
    fits = runs_on(x.device) and config.fits_warp_groups and is_one_dtype
    return fits and _is_aligned(x) and _is_aligned(weight)


def runs_on(device: torch.device) -> bool:
    return device.type == "cuda" and card(device).capability == HOPPER


def _is_aligned(rows: torch.Tensor) -> bool:
    return rows.data_ptr() % ALIGNMENT == 0 == rows.stride(0) * rows.element_size() % ALIGNMENT


def launch_hopper_linear(
    config: LinearConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """`launch_linear`, of checked arguments that are for Hopper."""
    programs = product_programs(config, weight.shape[0], splits_of(out))
    _launch(Arrangement(programs, False, config), x, weight, bias, out, NO_TABLES, NO_SHRINK)


def launch_hopper_linear_shrink(
    arrangement: Arrangement,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor,
    row_slot: torch.Tensor,
    max_rank: int,
    shrunk: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """`launch_linear_shrink`, of checked arguments that are for Hopper, as `arrangement` says."""
    stack, max_loras = a_ptrs.shape
    shrink = shrink_arguments(x, arena, max_loras, max_rank, shrunk)
    split_k, block_k = shrink["blocks_per_split"] * shrink["BLOCK_A"], arrangement.config.block_k
    assert split_k % block_k == 0, f"splits of {split_k}, in blocks of {block_k}"
    shrink |= {"split_blocks": split_k // block_k, "STACK": stack}
    constants = {name: shrink[name] for name in NO_SHRINK}
    tables = (arena, a_ptrs, lora_ranks, seg_indptr, weight_indices, row_slot, shrunk, arrivals)
    _launch(arrangement, x, weight, bias, out, tables, constants)


def _launch(
    arrangement: Arrangement,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tables: tuple[torch.Tensor | None, ...],
    constants: dict[str, int],
) -> None:
    config, block_k = arrangement.config, arrangement.config.block_k
    _hopper_linear_kernel[(arrangement.programs,)](
        descriptor(x, config.block_m, block_k),
        descriptor(weight, config.block_n, block_k),
        bias,
        out,
        *tables,
        x.shape[0],
        rows_a_split(out),
        **constants,
        N=weight.shape[0],
        K=weight.shape[1],
        OUT_STRIDE=out.stride(-2),
        SPLITS=splits_of(out),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        STAGES=config.num_stages,
        SHRINK_FIRST=arrangement.shrink_first,
        num_warps=config.num_warps,
        **dependent_launch(x.device),
    )


def descriptor(rows: torch.Tensor, block_rows: int, block_k: int) -> TensorDescriptor:
    """Of blocks of `rows`, as `multiply` reads them."""
    layout = _layout(rows.dtype, block_rows, block_k)
    return TensorDescriptor.from_tensor(rows, [block_rows, block_k], layout)


@lru_cache
def _layout(dtype: torch.dtype, block_rows: int, block_k: int) -> gl.NVMMASharedLayout:
    """Kept, for making one takes several times as long as the rest of a descriptor."""
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([block_rows, block_k], element)
