"""Gather a decode step's inputs by request slot.

The host only says which request runs on which row; all else about a row is on the device.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.op import define_op


@triton.jit(do_not_specialize=["num_rows"])
def _gather_step_inputs_kernel(
    row_request,
    last_token,
    request_positions,
    adapter_slots,
    block_tables,
    num_logprobs,
    token_ids,
    positions,
    seq_lens,
    kv_slots,
    row_adapter,
    row_num_logprobs,
    num_rows,
    num_requests,
    max_pages,
    num_logprobs_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_batch = rows < num_rows
    request = tl.load(row_request + rows, mask=in_batch, other=0)
    live = request < num_requests - 1
    position = tl.load(request_positions + request, mask=in_batch, other=0)
    page_index = tl.minimum(position // PAGE_SIZE, max_pages - 1)
    page = tl.load(block_tables + request.to(tl.int64) * max_pages + page_index, mask=in_batch)
    tl.store(token_ids + rows, tl.load(last_token + request, mask=in_batch), mask=in_batch)
    tl.store(positions + rows, position, mask=in_batch)
    tl.store(seq_lens + rows, tl.where(live, position + 1, 0), mask=in_batch)
    tl.store(kv_slots + rows, page * PAGE_SIZE + position % PAGE_SIZE, mask=in_batch)
    tl.store(row_adapter + rows, tl.load(adapter_slots + request, mask=in_batch), mask=in_batch)
    wanted = tl.load(num_logprobs + request * num_logprobs_stride, mask=in_batch)
    tl.store(row_num_logprobs + rows, wanted, mask=in_batch)


def gather_step_inputs_triton(
    row_request: torch.Tensor,
    last_token: torch.Tensor,
    request_positions: torch.Tensor,
    adapter_slots: torch.Tensor,
    block_tables: torch.Tensor,
    num_logprobs: torch.Tensor,
    page_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_slots: torch.Tensor,
    row_adapter: torch.Tensor,
    row_num_logprobs: torch.Tensor,
) -> None:
    """From `row_request` [B] and the request tables [R, …], fill the rows' inputs [B]; all int32.

    `token_ids`, `positions`, `row_adapter` and `row_num_logprobs` are the request's own;
    `seq_lens` = position + 1, but 0 for the dummy request (slot R - 1); `kv_slots` =
    page · page_size + offset of the position, from `block_tables` [R, max_pages].
    `num_logprobs` [R] may be a strided column. The last six parameters are written in place.
    """
    num_rows, num_requests = row_request.shape[0], last_token.shape[0]
    assert num_rows > 0, "a step has a row"
    rows = (row_request, token_ids, positions, seq_lens, kv_slots, row_adapter, row_num_logprobs)
    tables = (last_token, request_positions, adapter_slots)
    for tensor, length in [(t, num_rows) for t in rows] + [(t, num_requests) for t in tables]:
        assert tensor.shape == (length,), f"shape {tuple(tensor.shape)}, not ({length},)"
        assert tensor.is_contiguous(), "rows and tables are contiguous"
    assert num_logprobs.shape == (num_requests,), f"num_logprobs is [{num_requests}]"
    assert block_tables.shape[:1] == (num_requests,), f"block_tables is [{num_requests}, pages]"
    assert block_tables.is_contiguous(), "block_tables is contiguous"
    for tensor in (*rows, *tables, num_logprobs, block_tables):
        assert tensor.dtype == torch.int32, f"{tensor.dtype}, not int32"
    block = min(128, triton.next_power_of_2(num_rows))
    _gather_step_inputs_kernel[(triton.cdiv(num_rows, block),)](
        row_request,
        last_token,
        request_positions,
        adapter_slots,
        block_tables,
        num_logprobs,
        token_ids,
        positions,
        seq_lens,
        kv_slots,
        row_adapter,
        row_num_logprobs,
        num_rows,
        num_requests,
        block_tables.shape[1],
        num_logprobs.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=block,
        num_warps=1,
        **dependent_launch(row_request.device),
    )


def gather_step_inputs_torch(
    row_request: torch.Tensor,
    last_token: torch.Tensor,
    request_positions: torch.Tensor,
    adapter_slots: torch.Tensor,
    block_tables: torch.Tensor,
    num_logprobs: torch.Tensor,
    page_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_slots: torch.Tensor,
    row_adapter: torch.Tensor,
    row_num_logprobs: torch.Tensor,
) -> None:
    """The same in plain torch."""
    request = row_request.long()
    position = request_positions[request]
    page_index = (position // page_size).clamp(max=block_tables.shape[1] - 1).long()
    token_ids.copy_(last_token[request])
    positions.copy_(position)
    seq_lens.copy_(torch.where(request < last_token.shape[0] - 1, position + 1, 0))
    kv_slots.copy_(block_tables[request, page_index] * page_size + position % page_size)
    row_adapter.copy_(adapter_slots[request])
    row_num_logprobs.copy_(num_logprobs[request])


gather_step_inputs = define_op(
    gather_step_inputs_triton,
    gather_step_inputs_torch,
    mutates=(
        "token_ids",
        "positions",
        "seq_lens",
        "kv_slots",
        "row_adapter",
        "row_num_logprobs",
    ),
)
