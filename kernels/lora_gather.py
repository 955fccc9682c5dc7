"""The LoRA delta in plain torch: each row gathers its own adapter's weights out of the arena.

A yardstick and fallback for the segmented kernels, free of segments: every op has shapes known on
the host, so it can be captured in a CUDA graph. It moves T * max_rank * (K + N) weights whatever
the true ranks are. A plain function, of ops that a graph recorder sees one by one.
"""

import torch

_CHUNK_ELEMENTS = 1 << 24


def _gather_matrices(
    arena: torch.Tensor,
    arena_address: int,
    addresses: torch.Tensor,
    row_stride: torch.Tensor | int,
    num_rows: int,
    num_columns: int,
    mask: torch.Tensor,
) -> torch.Tensor:
    """One float32 matrix per address, zero outside the mask; masked places are never read."""
    offsets = (addresses - arena_address) // arena.element_size()  # [T]
    i = torch.arange(num_rows, device=arena.device)[:, None]
    j = torch.arange(num_columns, device=arena.device)
    index = offsets[:, None, None] + i * row_stride + j  # [T, num_rows, num_columns]
    values = arena[torch.where(mask, index, 0)].float()
    return torch.where(mask, values, 0.0)


def lora_gather(
    x: torch.Tensor,
    arena: torch.Tensor,
    arena_address: int,
    a_ptrs: torch.Tensor,
    b_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    scalings: torch.Tensor,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    max_rank: int,
    slice_sizes: list[int],
    y: torch.Tensor,
) -> None:
    """y[t, slice j] += scaling_j * (x[t] A_j^T) B_j^T with the weights of row t's adapter slot.

    x [T, K] and y [T, sum(slice_sizes)], the latter written in place; arena, whose first element
    lies at `arena_address` (handed in, as a capture refuses to read it), the tables
    [stack, max_loras] and the layout of A and B as in `kernels.sgemm`; row_adapter int32[T] and
    adapter_enabled int32[max_loras] as in `kernels.lora_metadata`. Rows without an enabled adapter
    keep their bits. Sums in float32, rounded once. Rows go in chunks that bound the temporaries.
    """
    max_loras = adapter_enabled.shape[0]
    r = torch.arange(max_rank, device=x.device)
    known = (row_adapter >= 0) & (row_adapter < max_loras)
    slots = row_adapter.clamp(0, max_loras - 1).long()
    has_pair = known & (adapter_enabled[slots] != 0)  # [T]
    row_elements = max_rank * max(x.shape[1], *slice_sizes)
    chunk = max(1, _CHUNK_ELEMENTS // row_elements)
    for first in range(0, x.shape[0], chunk):
        rows = slice(first, first + chunk)
        wide = x[rows].float()[:, None, :]  # [chunk, 1, K]
        for stacked, target in enumerate(y[rows].split(slice_sizes, dim=1)):
            slot = slots[rows]
            rank = torch.where(has_pair[rows], lora_ranks[stacked, slot], 0)  # [chunk]
            used = r < rank[:, None]  # [chunk, max_rank]
            a = _gather_matrices(
                arena,
                arena_address,
                a_ptrs[stacked, slot],
                x.shape[1],
                max_rank,
                x.shape[1],
                used[:, :, None],
            )  # [chunk, max_rank, K]
            b = _gather_matrices(
                arena,
                arena_address,
                b_ptrs[stacked, slot],
                rank[:, None, None],
                target.shape[1],
                max_rank,
                used[:, None, :],
            )  # [chunk, N, max_rank]
            delta = (wide @ a.mT @ b.mT)[:, 0] * scalings[stacked, slot][:, None]
            summed = (target.float() + delta).to(y.dtype)
            target.copy_(torch.where(rank[:, None] > 0, summed, target))
