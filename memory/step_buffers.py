"""The static inputs of a decode step, per batch size, and of a prefill chunk.

Batch size B's buffers are views of the largest's, so all sizes together cost what one does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memory.lora_batch_info import LoRABatchInfo
from memory.step_outputs import StepOutputs
from memory.workspace import Workspace


@dataclass(frozen=True)
class StepBuffers:
    """One decode step of B rows; int32 [B] unless said.

    The host stages `inputs`, flat: `adapter_enabled` [max_loras] then `row_request` [B] (request
    slot of each row; padding rows carry the dummy slot). The graph fills the rest: `token_ids`,
    `positions`, `seq_lens` (KV entries with this token), `kv_slots` (where its K and V go) and
    `row_num_logprobs`, all gathered by request slot, `lora`, `workspace` and `outputs`.
    `partial_out` [B, Hq, splits, D] and `partial_lse` [B, Hq, splits] are float32.
    """

    batch_size: int
    inputs: torch.Tensor
    adapter_enabled: torch.Tensor
    row_request: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    kv_slots: torch.Tensor
    row_num_logprobs: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    lora: LoRABatchInfo
    workspace: Workspace
    outputs: StepOutputs

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name, for guards that check what a capture assumed."""
        named = {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        for group in ("lora", "workspace", "outputs"):
            for name, tensor in getattr(self, group).tensors().items():
                named[f"{group}.{name}"] = tensor
        return named


def pack_padded(count: int) -> int:
    """`count` int32 rounded up to 16 bytes: parts of a packed buffer start there, since kernels
    are compiled for the alignment of what they get."""
    return -(-count // 4) * 4


@dataclass(frozen=True)
class PrefillBuffers:
    """One prefill chunk: T tokens of N sequences, of which B end their prompt here; int32.

    All but `lora`, `workspace` and `outputs` are views of `packed`, staged by one copy of what
    `pack` makes of the values, in this order: `adapter_enabled` [max_loras], `token_ids`,
    `positions`, `kv_slots` and `lora.row_adapter` [T], `seq_request` and `seq_lens` [N],
    `q_indptr` [N+1], `logit_rows` (token index), `row_request` and `row_num_logprobs` [B].
    """

    packed: torch.Tensor
    adapter_enabled: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    seq_request: torch.Tensor
    seq_lens: torch.Tensor
    q_indptr: torch.Tensor
    logit_rows: torch.Tensor
    row_request: torch.Tensor
    row_num_logprobs: torch.Tensor
    lora: LoRABatchInfo
    workspace: Workspace
    outputs: StepOutputs

    @staticmethod
    def pack(parts: Sequence[Sequence[int]]) -> list[int]:
        """The values of `packed`: each part, padded to where the next one starts."""
        packed: list[int] = []
        for part in parts:
            packed += part
            packed += [0] * (pack_padded(len(part)) - len(part))
        return packed
