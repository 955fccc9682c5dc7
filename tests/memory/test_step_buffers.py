"""Static buffers: every batch size is a view of the largest, and pieces do not overlap."""

from dataclasses import fields
from itertools import pairwise

import pytest
import torch

from memory.lora_batch_info import LoRABatchInfo
from memory.step_buffers import PrefillBuffers
from tests.memory.test_manager import make_manager

LARGEST = 8


@pytest.fixture(scope="module")
def manager():
    return make_manager(max_batch_size=LARGEST, max_loras=3, prefill_chunk_tokens=24)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte addressed."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@pytest.mark.parametrize("rows", [1, 3, LARGEST])
def test_buffers_are_views_of_the_largest(manager, rows):
    largest = manager.step_buffers(LARGEST).tensors()
    buffers = manager.step_buffers(rows)
    assert buffers.tensors().keys() == largest.keys()
    for name, tensor in buffers.tensors().items():
        whole = largest[name]
        assert tensor.data_ptr() == whole.data_ptr(), name
        assert extent(tensor)[1] <= extent(whole)[1], name
        assert tensor.dtype == whole.dtype, name


@pytest.mark.parametrize("rows", [1, 3, LARGEST])
def test_shapes_follow_the_batch(manager, rows):
    buffers, dims = manager.step_buffers(rows), manager.dims
    assert buffers.batch_size == rows
    for name in ("row_request", "token_ids", "positions", "seq_lens", "kv_slots"):
        tensor = getattr(buffers, name)
        assert (tensor.shape, tensor.dtype) == ((rows,), torch.int32), name
        assert tensor.is_contiguous(), name
    assert buffers.row_num_logprobs.shape == (rows,)
    assert buffers.adapter_enabled.shape == (3,)
    assert buffers.inputs.shape == (3 + rows,)
    splits = buffers.partial_lse.shape[2]
    assert buffers.partial_out.shape == (rows, dims.num_q_heads, splits, dims.head_dim)
    assert buffers.workspace.hidden.shape == (rows, dims.hidden_size)
    assert buffers.workspace.logits.shape == (rows, dims.vocab_size)
    assert buffers.outputs.sampled.shape == buffers.outputs.target_logprob.shape == (rows,)


def test_one_copy_stages_masks_and_rows(manager):
    buffers = manager.step_buffers(4)
    manager.staging.upload([1, 0, 1, 7, 6, 5, 8], buffers.inputs)
    assert buffers.adapter_enabled.tolist() == [1, 0, 1]
    assert buffers.row_request.tolist() == [7, 6, 5, 8]


def test_the_buffers_of_a_batch_size_are_always_the_same(manager):
    assert manager.step_buffers(4) is manager.step_buffers(4)
    before = {name: t.data_ptr() for name, t in manager.step_buffers(4).tensors().items()}
    again = make_manager(max_batch_size=LARGEST, max_loras=3).step_buffers(4)
    assert before != {name: tensor.data_ptr() for name, tensor in again.tensors().items()}


def test_no_two_buffers_of_a_step_share_memory(manager):
    """Only `inputs`, whose two parts are named too, and the attention partials, which are views
    of the workspace's, appear twice."""
    named = manager.step_buffers(LARGEST).tensors()
    for twice in ("inputs", "partial_out", "partial_lse"):
        del named[twice]
    extents = sorted((*extent(t), name) for name, t in named.items() if t.numel())
    for (_, end, before), (start, _, after) in pairwise(extents):
        assert end <= start, (before, after)


@pytest.mark.parametrize(("tokens", "sequences", "drawn"), [(1, 1, 1), (24, 8, 8), (17, 3, 0)])
def test_prefill_parts_lie_in_one_upload(manager, tokens, sequences, drawn):
    buffers = manager.prefill_buffers(tokens, sequences, max(drawn, 1), drawn)
    lengths = {
        "adapter_enabled": 3,
        "token_ids": tokens,
        "positions": tokens,
        "kv_slots": tokens,
        "row_adapter": tokens,
        "seq_request": sequences,
        "seq_lens": sequences,
        "q_indptr": sequences + 1,
        "logit_rows": drawn,
        "row_request": drawn,
        "row_num_logprobs": drawn,
    }
    numbers = iter(range(1000))
    values = [[next(numbers) for _ in range(length)] for length in lengths.values()]
    manager.staging.upload(PrefillBuffers.pack(values), buffers.packed)
    parts = {f.name: getattr(buffers, f.name) for f in fields(PrefillBuffers)}
    parts["row_adapter"] = buffers.lora.row_adapter
    for name, expected in zip(lengths, values, strict=True):
        assert parts[name].tolist() == expected, name
        assert (parts[name].data_ptr() - buffers.packed.data_ptr()) % 16 == 0, name


def test_prefill_metadata_is_not_the_decode_steps(manager):
    prefill, decode = manager.prefill_buffers(8, 2, 2, 2), manager.step_buffers(8)
    for name, tensor in prefill.lora.tensors().items():
        assert tensor.data_ptr() != decode.lora.tensors()[name].data_ptr(), name
    assert prefill.outputs.sampled.data_ptr() != decode.outputs.sampled.data_ptr()


@pytest.mark.parametrize(("max_loras", "segments"), [(0, 0), (2, 2), (20, 5)])
def test_lora_batch_info_of_fewer_rows(max_loras, segments):
    whole = LoRABatchInfo.allocate(9, max_loras, torch.device("cpu"))
    view = whole.view(5)
    for name in ("row_adapter", "permutation", "pair_row", "pair_slot", "pair_weight"):
        assert getattr(view, name).shape == (5,), name
        assert getattr(view, name).data_ptr() == getattr(whole, name).data_ptr()
    assert view.weight_indices.shape == (segments,)
    assert view.seg_indptr.shape == (segments + 1,)
    assert view.num_segments.data_ptr() == whole.num_segments.data_ptr()
    assert view.pair_weight.tolist() == [1.0] * 5
    assert view.row_adapter.tolist() == [-1] * 5
    assert {t.dtype for n, t in view.tensors().items() if n != "pair_weight"} == {torch.int32}
