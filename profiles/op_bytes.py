"""The bytes that an op of a step must move: each input read once, each output written once.

Counted from the arguments of one call, whose values are read on the host, so between two ops of
a run that is not timed. Of weights that only some rows use, those that some row of this call did;
workspaces between an op's own kernels count nothing. The ops of experts are in
`profiles.expert_op_bytes`, their names and kinds in `profiles.op_table`.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kernels.sampling_tables import FLAGS, USES_LOGIT_BIAS, USES_TOKEN_STATE

Tensor = torch.Tensor


def size(*tensors: Tensor | None) -> int:
    """Bytes of all elements; a view counts what it shows."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, **_: Any) -> int:
    return size(x, weight, bias, out)


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, **_: Any) -> int:
    return size(x, weight, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, **lora: Any) -> int:
    return size(weight, out) + add_expand(x, residual, **lora)


def add_expand(x: Tensor, residual: Tensor, **lora: Any) -> int:
    return size(x) + 2 * size(residual) + _delta([residual.shape[1]], **lora)


def gated_activation(gate_up: Tensor, out: Tensor, **lora: Any) -> int:
    return size(gate_up, out) + _delta(2 * [out.shape[1]], **lora)


def embed(token_ids: Tensor, out: Tensor, **_: Any) -> int:
    return size(token_ids) + 2 * size(out)


def rotary_kv_write(
    qkv: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    k_cache: Tensor,
    **lora: Any,
) -> int:
    """q is read and written, k and v are read, and written for rows with a place in the cache."""
    tokens, head = qkv.shape[0], k_cache.shape[-1] * qkv.element_size()
    kv_writes = int((kv_slots >= 0).sum())
    widths = [count * k_cache.shape[-1] for count in (num_q_heads, num_kv_heads, num_kv_heads)]
    return (
        _delta(widths, **lora)
        + size(q_norm_weight, k_norm_weight, positions, kv_slots)
        + tokens * cos_sin.shape[1] * cos_sin.element_size()
        + 2 * tokens * num_q_heads * head
        + 2 * (tokens + kv_writes) * num_kv_heads * head
    )


def paged_attention(
    k_cache: Tensor,
    row_request: Tensor,
    seq_lens: Tensor,
    window: int,
    out: Tensor,
    **_: Any,
) -> int:
    """Queries, the keys and values that each row sees, and the block tables' entries for them."""
    keys = [min(length, window) if window else length for length in seq_lens.tolist()]
    return 2 * size(out) + size(row_request, seq_lens) + _cached(keys, k_cache)


def extend_attention(
    k_cache: Tensor,
    seq_request: Tensor,
    q_indptr: Tensor,
    seq_lens: Tensor,
    window: int,
    out: Tensor,
    **_: Any,
) -> int:
    """A sequence's keys and values count once for all of its rows."""
    starts = q_indptr.tolist()
    keys = []
    for index, length in enumerate(seq_lens.tolist()):
        rows = starts[index + 1] - starts[index]
        keys.append(min(length, window + rows - 1) if window else length)
    return 2 * size(out) + size(seq_request, q_indptr, seq_lens) + _cached(keys, k_cache)


def gather_step_inputs(
    row_request: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    kv_slots: Tensor,
    row_adapter: Tensor,
    row_num_logprobs: Tensor,
    **_: Any,
) -> int:
    """Five int32 of a request's state, its page among them, give six of its row."""
    outputs = (token_ids, positions, seq_lens, kv_slots, row_adapter, row_num_logprobs)
    return size(row_request, *outputs) + 5 * size(row_request)


def lora_metadata(
    row_adapter: Tensor,
    adapter_enabled: Tensor,
    seg_indptr: Tensor,
    weight_indices: Tensor,
    permutation: Tensor,
    num_segments: Tensor,
    pair_row: Tensor,
    pair_slot: Tensor,
    row_slot: Tensor,
    row_order: Tensor,
    **_: Any,
) -> int:
    pairs = (permutation, pair_row, pair_slot)
    segments = (seg_indptr, weight_indices, num_segments)
    return size(row_adapter, adapter_enabled, *segments, *pairs, row_slot, row_order)


def sgemm_a(
    x: Tensor,
    arena: Tensor,
    lora_ranks: Tensor,
    seg_indptr: Tensor,
    weight_indices: Tensor,
    num_segments: Tensor,
    x_read: bool = False,
    parts: int = 1,
    **_: Any,
) -> int:
    """A of each adapter in use, the rows that have one unless `x_read` already, and their float32
    x Aᵀ in so many parts."""
    total, width = 0, x.shape[1]
    for pairs, ranks in _segments(lora_ranks, seg_indptr, weight_indices, num_segments):
        total += sum(ranks) * width * arena.element_size() + pairs * sum(ranks) * parts * 4
        total += pairs * width * x.element_size() if any(ranks) and not x_read else 0
    return total


def linear_shrink(**arguments: Any) -> int:
    """The product, and beside it x Aᵀ; x is the product's and counts once."""
    return linear(**arguments) + sgemm_a(**arguments, x_read=True)


def linear_shrink_parts(shrunk: Tensor, **arguments: Any) -> int:
    """The same, with x Aᵀ written in parts."""
    return linear(**arguments) + sgemm_a(**arguments, x_read=True, parts=_parts(shrunk))


def sgemm_b(
    arena: Tensor,
    lora_ranks: Tensor,
    seg_indptr: Tensor,
    weight_indices: Tensor,
    num_segments: Tensor,
    slice_sizes: list[int],
    y: Tensor,
    **_: Any,
) -> int:
    """B of each adapter in use, the float32 x Aᵀ of its rows, and those of y, read and written."""
    total = 0
    for pairs, ranks in _segments(lora_ranks, seg_indptr, weight_indices, num_segments):
        total += pairs * sum(ranks) * 4
        for rank, width in zip(ranks, slice_sizes, strict=True):
            total += rank * width * arena.element_size()
            total += 2 * pairs * width * y.element_size() if rank else 0
    return total


def sample(
    logits: Tensor,
    row_request: Tensor,
    sampling_ints: Tensor,
    token_state: Tensor,
    logit_bias: Tensor,
    sampled: Tensor,
    normalizer: Tensor,
    **_: Any,
) -> int:
    """The logits once, and the tables over the vocabulary of requests that use them."""
    total = size(logits, row_request, sampled, normalizer)
    for flags in sampling_ints[row_request.long(), FLAGS].tolist():
        total += size(token_state[0]) if flags & USES_TOKEN_STATE else 0
        total += size(logit_bias[0]) if flags & USES_LOGIT_BIAS else 0
    return total


def logprobs(
    logits: Tensor,
    targets: Tensor,
    num_logprobs: Tensor,
    normalizer: Tensor | None,
    target_logprob: Tensor,
    top_values: Tensor,
    top_ids: Tensor,
    **_: Any,
) -> int:
    """A row's logits where they are still to be summed or searched, else the target's alone."""
    rows, vocab = logits.shape
    whole = rows if normalizer is None else int((num_logprobs > 0).sum())
    read = (whole * vocab + rows - whole) * logits.element_size()
    return read + size(targets, num_logprobs, normalizer, target_logprob, top_values, top_ids)


def _cached(keys: list[int], k_cache: Tensor) -> int:
    """Keys and values of so many tokens of each sequence, and the entries of their pages."""
    page_size, heads, head_dim = k_cache.shape[1:]
    pages = sum(-(-count // page_size) for count in keys)
    return 2 * sum(keys) * heads * head_dim * k_cache.element_size() + 4 * pages


def _delta(
    slice_sizes: list[int],
    shrunk: Tensor | None = None,
    arena: Tensor | None = None,
    **lora: Any,
) -> int:
    """B of each adapter in use, and the float32 x Aᵀ of its rows, where there are adapters."""
    if arena is None or shrunk is None:
        return 0
    names = ("lora_ranks", "seg_indptr", "weight_indices", "num_segments")
    total = 0
    for pairs, ranks in _segments(*(lora[name] for name in names)):
        total += pairs * sum(ranks) * _parts(shrunk) * 4
        for rank, width in zip(ranks, slice_sizes, strict=True):
            total += rank * width * arena.element_size()
    return total


def _parts(shrunk: Tensor) -> int:
    return shrunk.shape[1] if shrunk.dim() == 3 else 1


def _segments(
    lora_ranks: Tensor, seg_indptr: Tensor, weight_indices: Tensor, num_segments: Tensor
) -> Iterator[tuple[int, list[int]]]:
    """(rows, rank of each stacked slice) of every segment in use."""
    ends, slots, ranks = seg_indptr.tolist(), weight_indices.tolist(), lora_ranks.tolist()
    for segment in range(int(num_segments.item())):
        slot = slots[segment]
        yield ends[segment + 1] - ends[segment], [row[slot] for row in ranks]
