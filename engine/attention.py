"""The two ways a step attends: one token per row while decoding, runs of tokens in prefill."""

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.extend_attention import extend_attention
from kernels.paged_attention import paged_attention


class Attention(Protocol):
    """Attend from rotated queries to the paged cache, the step's own tokens included."""

    def __call__(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int,
        out: torch.Tensor,
    ) -> None: ...


@dataclass(frozen=True)
class DecodeAttention:
    """Row b attends to all of its request's tokens; tensors as in `paged_attention`."""

    block_tables: torch.Tensor
    row_request: torch.Tensor
    seq_lens: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    arrivals: torch.Tensor

    def __call__(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int,
        out: torch.Tensor,
    ) -> None:
        paged_attention(
            qkv,
            keys,
            values,
            self.block_tables,
            self.row_request,
            self.seq_lens,
            scale,
            window,
            self.partial_out,
            self.partial_lse,
            self.arrivals,
            out,
        )


@dataclass(frozen=True)
class ExtendAttention:
    """Each sequence's new tokens attend causally; tensors as in `extend_attention`."""

    block_tables: torch.Tensor
    seq_request: torch.Tensor
    q_indptr: torch.Tensor
    seq_lens: torch.Tensor
    max_q_len: int

    def __call__(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int,
        out: torch.Tensor,
    ) -> None:
        extend_attention(
            qkv,
            keys,
            values,
            self.block_tables,
            self.seq_request,
            self.q_indptr,
            self.seq_lens,
            self.max_q_len,
            scale,
            window,
            out,
        )
