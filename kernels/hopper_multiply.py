"""A tile of W x^T on Hopper: blocks of both wait in shared memory, those of W since before the
kernel before this one ended.

Written in Gluon, Triton's language that names its buffers: Triton's own pipeliner cannot start one
operand of a product before the wait and the other after it. Copies run several stages ahead of the
product on the tensor cores: blocks of a matrix by the tensor memory accelerator, rows that lie
anywhere by the lanes (cp.async). Method: CUTLASS's multistage mainloop, its "prefetch of weights"
for programmatic dependent launch, and Triton's Gluon tutorials.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.dependent_launch import wait_for_inputs

# Their names until Triton 3.6, and since.
copy_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.constexpr_function
def product_layout(block_m, num_warps):
    """Of the float32 [BLOCK_N, BLOCK_M] that `multiply` returns."""
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, block_m, 16])


@gluon.constexpr_function
def row_layout(block_k, num_warps):
    """Of a block [BLOCK_N, BLOCK_K] of 16-bit elements that lanes copy 16 bytes each of."""
    return gl.BlockedLayout([1, 8], [256 // block_k, block_k // 8], [num_warps, 1], [1, 0])


@gluon.jit
def new_barriers(STAGES: gl.constexpr):
    """One for each stage, for one product alone; given up with `end_barriers`."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(STAGES):
        mbarrier.init(ready.index(number), count=1)
    fence_async_shared()
    barrier()
    return ready


@gluon.jit
def end_barriers(ready):
    """At a program's end: until then nothing else may lie where barriers are, and to the compiler
    all of them live as long as one."""
    mbarrier.invalidate(ready.index(0))


@gluon.jit
def ask_for_weights(
    weight,
    first_n,
    weight_rows,
    there,
    k,
    wanted,
    stage_w,
    ready,
    K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """Start to copy a block of W from column `k` on, if it is `wanted`; see `multiply`."""
    if weight is not None:
        copy_block(weight, [first_n, k], ready, stage_w, pred=wanted)
    else:
        layout: gl.constexpr = row_layout(BLOCK_K, gl.num_warps())
        columns = k + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
        mask = there[:, None] & wanted & (columns >= 0)[None, :]
        if K % BLOCK_K != 0:
            mask = mask & (columns < K)[None, :]
        copy_elements(stage_w, weight_rows[:, None] + columns[None, :], mask=mask)
        async_copy.commit_group()


@gluon.jit
def ask_for_blocks(
    x,
    weight,
    first_n,
    weight_rows,
    there,
    first_k,
    step,
    steps,
    stages_x,
    stages_w,
    ready,
    BYTES: gl.constexpr,
    K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Start to copy the blocks of x and W of `step`, if there is one; see `multiply`."""
    k, wanted, stage = first_k + step * BLOCK_K, step < steps, step % STAGES
    is_ready = ready.index(stage)
    mbarrier.expect(is_ready, BYTES, pred=wanted)
    copy_block(x, [0, k], is_ready, stages_x.index(stage), pred=wanted)
    ask_for_weights(
        weight,
        first_n,
        weight_rows,
        there,
        k,
        wanted,
        stages_w.index(stage),
        is_ready,
        K,
        BLOCK_N,
        BLOCK_K,
    )


@gluon.jit
def start_product(weight, step, acc, stages_x, stages_w, ready, STAGES: gl.constexpr):
    """`acc` + W xᵀ of a step's blocks, once they have come; not waited for."""
    stage = step % STAGES
    mbarrier.wait(ready.index(stage), step // STAGES & 1)
    if weight is None:
        wait_for_lanes(STAGES - 1)
    block_x = stages_x.index(stage).permute((1, 0))
    return warpgroup_mma(stages_w.index(stage), block_x, acc, is_async=True)


@gluon.jit
def wait_for_lanes(AHEAD: gl.constexpr):
    """Until blocks that lanes copy have come, but for the AHEAD - 1 that were asked for last."""
    # No proxy fence, which would wait for all copies in flight: neither CUTLASS nor Triton has one
    # between copies by lanes and the product that reads them.
    async_copy.wait_group(AHEAD - 1)
    barrier()


@gluon.jit
def ask_for_first_weights(
    weight,
    first_n,
    weight_rows,
    there,
    first_k,
    steps,
    stages_w,
    ready,
    BYTES: gl.constexpr,
    K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Start to copy W's blocks of the first STAGES - 1 steps; see `multiply`."""
    for number in gl.static_range(STAGES - 1):
        is_ready = ready.index(number)
        mbarrier.expect(is_ready, BYTES, pred=steps > number)
        ask_for_weights(
            weight,
            first_n,
            weight_rows,
            there,
            first_k + number * BLOCK_K,
            steps > number,
            stages_w.index(number),
            is_ready,
            K,
            BLOCK_N,
            BLOCK_K,
        )


@gluon.jit
def ask_for_first_rows(
    x, first_k, steps, stages_x, ready, BLOCK_K: gl.constexpr, STAGES: gl.constexpr
):
    """Start to copy x's, which the stages' barriers expect already."""
    for number in gl.static_range(STAGES - 1):
        place = [0, first_k + number * BLOCK_K]
        copy_block(x, place, ready.index(number), stages_x.index(number), pred=steps > number)


@gluon.jit
def multiply_blocks(
    first_step,
    last_step,
    x,
    weight,
    first_n,
    weight_rows,
    there,
    first_k,
    steps,
    acc,
    stages_x,
    stages_w,
    ready,
    BYTES: gl.constexpr,
    K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`acc` + W xᵀ of these steps, of `steps` in all; copies stay STAGES - 1 steps ahead;
    see `multiply`."""
    for step in range(first_step, last_step):
        acc = start_product(weight, step, acc, stages_x, stages_w, ready, STAGES)
        acc = warpgroup_mma_wait(1, deps=[acc])
        barrier()  # all are through with the product before this one, whose stage is filled next
        ask_for_blocks(
            x,
            weight,
            first_n,
            weight_rows,
            there,
            first_k,
            step + STAGES - 1,
            steps,
            stages_x,
            stages_w,
            ready,
            BYTES,
            K,
            BLOCK_N,
            BLOCK_K,
            STAGES,
        )
    return acc


@gluon.jit
def multiply(
    x,
    weight,
    first_n,
    weight_rows,
    there,
    first_k,
    last_k,
    acc,
    ready,
    K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """`acc` + W xᵀ over the columns of K from `first_k` up to `last_k`.

    x: a descriptor of [T, K] in blocks [BLOCK_M, BLOCK_K]; rows from T on count as 0. W is either
    the rows from `first_n` on of the descriptor `weight`, in blocks [BLOCK_N, BLOCK_K], or, where
    that is None, rows at the BLOCK_N addresses `weight_rows`, 0 where not `there`. Waits for x,
    having asked for the first blocks of W. `last_k` - `first_k` is a whole number of blocks, but
    at the end of K. ready: `new_barriers`.
    """
    gl.static_assert(STAGES >= 2, "no stage to copy into while another is multiplied")
    dtype: gl.constexpr = x.dtype
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_K], dtype)
    stages_w = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], w_layout)
    stages_x = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    # What a stage's barrier counts: bytes that the accelerator copies, not those that lanes do.
    ROWS: gl.constexpr = BLOCK_M + BLOCK_N if weight is not None else BLOCK_M
    BYTES: gl.constexpr = ROWS * BLOCK_K * 2
    steps = (last_k - first_k + BLOCK_K - 1) // BLOCK_K
    ask_for_first_weights(
        weight,
        first_n,
        weight_rows,
        there,
        first_k,
        steps,
        stages_w,
        ready,
        BYTES,
        K,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    wait_for_inputs(PDL)
    ask_for_first_rows(x, first_k, steps, stages_x, ready, BLOCK_K, STAGES)
    acc = multiply_blocks(
        0,
        steps,
        x,
        weight,
        first_n,
        weight_rows,
        there,
        first_k,
        steps,
        acc,
        stages_x,
        stages_w,
        ready,
        BYTES,
        K,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    if weight is None:
        async_copy.wait_group(0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()  # all warps are: what comes next may lie where the stages were
    return acc
