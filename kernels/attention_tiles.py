"""In which tiles decode attention reads a KV cache, and into how many parts a row's keys are split.

Decode attention is bound by reading the cache: what counts is how many bytes are in flight, and
that programs wait for them and not for each other. Chosen from 69 ways to go about it, measured
on an H200 at 1 to 128 rows and contexts from 200 to 8192.
"""

from dataclasses import dataclass, replace

import torch
import triton

from kernels.linear_config import card

MAX_SPLITS = 64
FEW_BYTES, MANY_BYTES = 16384, 4096
"""Of a tile of one kv head's keys, where four warps share it and where each warp has its own."""


@dataclass(frozen=True)
class AttentionTiles:
    """How one launch is tiled.

    heads: so many kv heads, a power of two that divides theirs, are one program's; above one
    each is one warp's, so num_warps is heads.
    block_n: the keys of a tile, a power of two from 16.
    """

    heads: int
    num_warps: int
    block_n: int
    num_stages: int = 3

    def stage_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Shared memory of a tile's keys and values, all heads'."""
        return 2 * self.heads * self.block_n * triton.next_power_of_2(head_dim) * dtype.itemsize


def attention_tiles(
    batch_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionTiles:
    """The tiles of decode attention for `batch_size` rows; without CUDA as on an H200.

    Rows times kv heads that give every multiprocessor three or more fill it with small programs,
    two heads each: a warp then meets no other at a barrier, and all of them run at once. It has
    the registers for a whole head of 16-bit elements up to a head_dim of 128. Fewer, and what is
    wider, are shared by four warps.
    """
    block_d = triton.next_power_of_2(head_dim)
    row = block_d * dtype.itemsize
    group_tiles = triton.cdiv(num_heads // num_kv_heads, 16)
    in_warp = dtype.itemsize == 2 and block_d * group_tiles <= 128 and num_kv_heads % 2 == 0
    if in_warp and batch_size * num_kv_heads >= 3 * card(device).multiprocessors:
        tiles = AttentionTiles(2, 2, max(MANY_BYTES // row, 16))
    else:
        tiles = AttentionTiles(1, 4, min(max(FEW_BYTES // row, 16), 128))
    fitting = card(device).shared_bytes // tiles.stage_bytes(head_dim, dtype)
    return replace(tiles, num_stages=max(1, min(tiles.num_stages, fitting)))


def min_split_tokens(batch_size: int, num_kv_heads: int) -> int:
    """So many keys at least are one split's: adding parts up costs more, the more programs do so,
    and is worth it where few would read alone."""
    return max(64, 4 * batch_size * num_kv_heads)


def decode_splits(batch_size: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """How many ways the keys of a row are split at most in the graph of `batch_size`.

    The smallest power of two that gives three programs to two multiprocessors, but none beyond
    what `max_seq_len` needs at `min_split_tokens` each, and never more than MAX_SPLITS. A row with
    a shorter context leaves its last splits empty.
    """
    wanted = -(-3 * num_sms // (2 * batch_size * num_kv_heads))
    useful = -(-max_seq_len // min_split_tokens(batch_size, num_kv_heads))
    return min(triton.next_power_of_2(wanted), triton.next_power_of_2(useful), MAX_SPLITS)
