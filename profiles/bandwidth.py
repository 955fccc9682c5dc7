"""The read bandwidth of the card at hand, measured: what byte counts are divided by."""

import torch
import triton
import triton.language as tl


@triton.jit
def _read_kernel(source, sums, BLOCK: tl.constexpr, TILES: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK * TILES
    total = tl.zeros([BLOCK], tl.int32)
    for tile in range(TILES):
        total += tl.load(source + start + tile * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total))


def read_bandwidth(device: torch.device, size_bytes: int = 4 * 2**30) -> float:
    """Bytes per second of reading `size_bytes` once: the best of ten runs, by device events."""
    block, tiles = 2048, 16
    programs = size_bytes // (4 * block * tiles)
    source = torch.randint(0, 9, (programs * block * tiles,), dtype=torch.int32, device=device)
    sums = torch.empty(programs, dtype=torch.int32, device=device)
    best = 0.0
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        _read_kernel[(programs,)](source, sums, BLOCK=block, TILES=tiles, num_warps=4)
        end.record()
        end.synchronize()
        best = max(best, source.numel() * 4 / (start.elapsed_time(end) * 1e-3))
    return best
