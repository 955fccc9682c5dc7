"""The product with a base weight: the one place such products go through.

Knows nothing about LoRA, and about how weights are stored only that they are plain matrices
today; a quantised base changes this file. `linear_config` says whether a product is the own
kernel's, which reads weights once at the speed of memory for a few rows, or the library's; on
Hopper `hopper_linear` launches the former.

Of the own kernel a row's bits depend on its x, the weights and the shapes, never on other rows.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.hopper_linear import is_for_hopper, launch_hopper_linear
from kernels.linear_arrangement import product_programs
from kernels.linear_config import LinearConfig, linear_config
from kernels.op import FLOATS, define_op
from kernels.partials import rows_a_split, splits_of


@triton.jit
def linear_tile(
    x,  # [T, K]
    weight,  # [N, K]
    bias,  # [N] or None
    out,  # [T, N], or [splits, T, N]
    num_tokens,
    split_rows,
    program,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of all rows and BLOCK_N columns over one split of K; `program` of tiles * SPLITS.

    Weights are the left operand: few rows then still fill a warp group's product on Hopper.
    """
    SPLIT_K: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    tile, split = program // SPLITS, program % SPLITS
    first_n, first_k = tile * BLOCK_N, split * SPLIT_K
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    x_places = x + first_k + m[:, None] * X_STRIDE + k[None, :]
    w_places = weight + first_n.to(tl.int64) * WEIGHT_STRIDE + first_k
    w_places += n[:, None] * WEIGHT_STRIDE + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if bias is not None:
        biased = first_n + n < tl.where(split == 0, N, 0)
        acc += tl.load(bias + first_n + n, mask=biased, other=0.0).to(tl.float32)[:, None]
    if SPLITS * SPLIT_K == K:
        length: tl.constexpr = SPLIT_K
    else:
        length = tl.minimum(first_k + SPLIT_K, K) - first_k
    for start in range(0, length, BLOCK_K):
        x_mask = tl.broadcast_to((m < num_tokens)[:, None], [BLOCK_M, BLOCK_K])
        w_mask = tl.full([BLOCK_N, BLOCK_K], True, tl.int1)
        if N % BLOCK_N != 0:
            w_mask = w_mask & (first_n + n < N)[:, None]
        if K % BLOCK_K != 0:
            inside = (first_k + start + k < K)[None, :]
            x_mask, w_mask = x_mask & inside, w_mask & inside
        if N % BLOCK_N != 0 or K % BLOCK_K != 0:
            w_block = tl.load(
                w_places + start, mask=w_mask, other=0.0, eviction_policy="evict_first"
            )  # [BLOCK_N, BLOCK_K]
        else:
            w_block = tl.load(w_places + start, eviction_policy="evict_first")
        x_block = tl.load(
            x_places + start, mask=x_mask, other=0.0, eviction_policy="evict_last"
        )  # [BLOCK_M, BLOCK_K]
        acc = tl.dot(w_block, tl.trans(x_block), acc, input_precision="ieee")
    result = tl.trans(acc.to(out.dtype.element_ty))  # [BLOCK_M, BLOCK_N]
    places = out + (split * split_rows).to(tl.int64) * OUT_STRIDE + first_n
    mask = (m < num_tokens)[:, None] & (first_n + n < N)[None, :]
    tl.store(places + m[:, None] * OUT_STRIDE + n[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "split_rows"])
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    num_tokens,
    split_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    linear_tile(
        x,
        weight,
        bias,
        out,
        num_tokens,
        split_rows,
        tl.program_id(0),
        N,
        K,
        X_STRIDE,
        WEIGHT_STRIDE,
        OUT_STRIDE,
        SPLITS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )


def check_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    (num_tokens, in_features), out_features = x.shape, weight.shape[0]
    assert x.dtype in FLOATS, f"x is {x.dtype}, not one of {FLOATS}"
    assert weight.shape[1:] == (in_features,), (
        f"weight is [N, {in_features}], not {tuple(weight.shape)}"
    )
    assert out.shape[-2:] == (num_tokens, out_features), (
        f"out is [{num_tokens}, {out_features}], not {tuple(out.shape)}"
    )
    assert out.dim() in (2, 3), f"out has {out.dim()} dims, not 2 or 3"
    out_dtype = x.dtype if out.dim() == 2 else torch.float32
    assert x.dtype == weight.dtype, f"x is {x.dtype} and weight {weight.dtype}: they differ"
    assert out.dtype == out_dtype, f"out is {out.dtype}, not {out_dtype}"
    assert x.stride(1) == weight.stride(1) == out.stride(-1) == 1, "rows are contiguous"
    assert out.dim() == 2 or out.stride(0) % out.stride(1) == 0, (
        f"out has strides {out.stride()}: partials are not a whole number of rows apart"
    )
    if bias is not None:
        assert bias.shape == (out_features,), f"bias is [{out_features}], not {tuple(bias.shape)}"
        assert bias.dtype == x.dtype, f"bias is {bias.dtype}, not {x.dtype}"
        assert bias.is_contiguous(), "bias is not contiguous"


def own_config(x: torch.Tensor, weight: torch.Tensor) -> LinearConfig:
    """The own kernel's configuration for x [T, K] and `weight` [N, K]; raises AssertionError where
    the library computes."""
    config = linear_config(x.shape[0], *weight.shape, x.dtype, x.device)
    assert config is not None, (
        f"no kernel of its own for {x.dtype} [{x.shape[0]}, {x.shape[1]}] x "
        f"[{weight.shape[0]}, {weight.shape[1]}]: use linear and sgemm_a"
    )
    return config


def tile_arguments(
    config: LinearConfig, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> dict[str, int]:
    """`linear_tile`'s constexprs and the launch options, for a launch of `config`."""
    return {
        "N": weight.shape[0],
        "K": weight.shape[1],
        "X_STRIDE": x.stride(0),
        "WEIGHT_STRIDE": weight.stride(0),
        "OUT_STRIDE": out.stride(-2),
        "SPLITS": splits_of(out),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def launch_linear(
    config: LinearConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """`linear_triton` by the own kernel in a given configuration; `out` says how many splits."""
    check_linear(x, weight, bias, out)
    assert x.shape[0] <= config.block_m, f"{x.shape[0]} rows, but tiles of {config.block_m}"
    if is_for_hopper(config, x, weight):
        launch_hopper_linear(config, x, weight, bias, out)
        return
    _linear_kernel[(product_programs(config, weight.shape[0], splits_of(out)),)](
        x,
        weight,
        bias,
        out,
        x.shape[0],
        rows_a_split(out),
        **tile_arguments(config, x, weight, out),
        **dependent_launch(x.device),
    )


def linear_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """`out = x Wᵀ + bias`, or partials of it that add up to that.

    x: [T, K], weight: [N, K], bias: [N] or None, of one dtype; rows contiguous, any row stride.
    out (written; overlaps none of the others) is [T, N] of that dtype, or float32 [S, T, N]: then
    partial i is the product over the i-th of S equal ranges of K, the bias in partial 0, and
    nothing is rounded. Partials are the own kernel's alone: see `linear_splits`. Sums in float32.
    Reads N·K weights, the larger part of what a small batch moves. Raises AssertionError on other
    shapes, dtypes or strides.
    """
    config = linear_config(x.shape[0], weight.shape[0], x.shape[1], x.dtype, x.device)
    if config is not None and config.serves(splits_of(out)):
        launch_linear(config, x, weight, bias, out)
        return
    assert out.dim() == 2, (
        f"partials, but the library computes {x.dtype} [{x.shape[0]}, {x.shape[1]}] x "
        f"[{weight.shape[0]}, {weight.shape[1]}]"
    )
    linear_torch(x, weight, bias, out)


def linear_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Torch twin of `linear_triton`, and its way through the vendor's library.

    Of partials the whole product goes to the first, zeros to the rest.
    """
    check_linear(x, weight, bias, out)
    if out.dim() == 3:
        out[1:] = 0
        torch.mm(x.float(), weight.float().t(), out=out[0])
        if bias is not None:
            out[0] += bias
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


linear = define_op(linear_triton, linear_torch, mutates=("out",))
