"""How the grouped GEMM is tiled: block sizes from the shapes, and a table of what was measured."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch


@dataclass(frozen=True)
class MoeGemmConfig:
    """How one launch is tiled.

    group_blocks: so many blocks of pairs share a tile of weights before the next tile's turn.
    swapped: weights are the left operand of the product, the pairs the right one; few pairs then
    still fill a warp group's product on Hopper.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_blocks: int = 1
    swapped: bool = False

    def shared_bytes(self, block_m: int, itemsize: int) -> int:
        """Bound on the shared memory of the pipelined loads."""
        return (self.block_n + block_m) * self.block_k * itemsize * self.num_stages


UNSORTED_PAIRS = 16  # up to here an expert seldom has two pairs, and sorting costs a launch
BLOCK_SIZES_M = (16, 64, 128)
PAIRS_AN_EXPERT = (16, 128)  # on average, up to which blocks have the first two of those sizes

# Swept on an H200, `python -m profiles.kernels moe --sweep`.
_UNSORTED = MoeGemmConfig(4, 1024, 4, 1)
_BY_BLOCK_M = {
    16: MoeGemmConfig(64, 128, 4, 3, swapped=True),
    64: MoeGemmConfig(128, 64, 4, 3, group_blocks=8),
    128: MoeGemmConfig(256, 64, 8, 3, group_blocks=8),
}
_WIDE = MoeGemmConfig(32, 32, 4, 2)  # float32: no tensor cores, tiles in registers
_BY_SHAPE: dict[tuple[int, int, int], MoeGemmConfig] = {
    (64, 1536, 2048): MoeGemmConfig(256, 64, 8, 4, group_blocks=8),
}
"""Measured exceptions, by (block_size_m or 0 when unsorted, N, K)."""


def moe_block_size_m(num_pairs: int, num_experts: int) -> int:
    """Pairs per block, for `moe_align_block_size` and `moe_gemm`, from the shapes alone.

    Blocks of 16 until the experts' mean share outgrows them: larger blocks read weights less
    often, smaller ones waste fewer rows.
    """
    mean = num_pairs / num_experts
    return next(
        (size for size, most in zip(BLOCK_SIZES_M, PAIRS_AN_EXPERT, strict=False) if mean <= most),
        BLOCK_SIZES_M[-1],
    )


def moe_gemm_config(
    block_size_m: int, in_features: int, out_features: int, itemsize: int
) -> MoeGemmConfig:
    """The configuration of a launch; block_size_m is 0 for unsorted pairs."""
    if block_size_m == 0:
        return _BY_SHAPE.get((0, out_features, in_features), _UNSORTED)
    if itemsize == 4:
        return _WIDE
    return _BY_SHAPE.get((block_size_m, out_features, in_features), _BY_BLOCK_M[block_size_m])


@lru_cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory a block may take; as on Hopper without CUDA."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return shared


def fitted(
    config: MoeGemmConfig, block_m: int, itemsize: int, device: torch.device
) -> MoeGemmConfig:
    """`config` with as many of its stages as fit this card; same bits."""
    a_stage = config.shared_bytes(block_m, itemsize) // config.num_stages
    stages = max(1, min(config.num_stages, _shared_memory(device) // a_stage))
    return replace(config, num_stages=stages)


def config_of(weight: torch.Tensor, block_size_m: int) -> MoeGemmConfig:
    """The configuration of a launch with `weight` [E, N, K], on its card; block_size_m is 0 for
    unsorted pairs."""
    (_, out_features, in_features), itemsize = weight.shape, weight.element_size()
    config = moe_gemm_config(block_size_m, in_features, out_features, itemsize)
    return fitted(config, block_size_m, itemsize, weight.device)
