"""What a mixture of experts works on in one step: routes, pairs, and how they are sorted.

T tokens take k experts each, which makes P = T k pairs; pair p belongs to token p // k. Sizes are
those of the largest step, and every batch size has views of its own.
"""

from dataclasses import dataclass

import torch

from kernels.moe_align import max_m_blocks, max_tokens_padded
from kernels.moe_gemm import moe_block_size_m
from kernels.moe_route import SPLIT_ROWS
from kernels.moe_route_parts import route_arrivals, scratch_shape
from memory.model_dims import ModelDims, MoEDims


@dataclass(frozen=True)
class MoeLoRAAlignBuffers:
    """Pairs sorted by (slot, expert), as `moe_lora_align_block_size` writes them; int32.

    `sorted_token_ids_lora` [max_loras, max_num_tokens_padded], `expert_ids_lora` [max_loras,
    max_num_m_blocks], `num_tokens_post_padded_lora` and `lora_ids` [max_loras]; `row_indptr`
    [T + 1] counts from 0: every row is a request of its own.
    """

    sorted_token_ids_lora: torch.Tensor
    expert_ids_lora: torch.Tensor
    num_tokens_post_padded_lora: torch.Tensor
    lora_ids: torch.Tensor
    row_indptr: torch.Tensor

    @property
    def lists(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sorted pairs as the grouped kernels take them."""
        return (
            self.sorted_token_ids_lora,
            self.expert_ids_lora,
            self.num_tokens_post_padded_lora,
            self.lora_ids,
        )


@dataclass(frozen=True)
class SharedExpertWorkspace:
    """The expert that every token passes; T rows in the model's dtype: `gate_up` [T, 2 S],
    `activated` [T, S], `down` [T, H] and `gate` [T, 1], the logit of its weight."""

    gate_up: torch.Tensor
    activated: torch.Tensor
    down: torch.Tensor
    gate: torch.Tensor


@dataclass(frozen=True)
class MoEWorkspace:
    """`topk_weights` float32 and `topk_ids` int32 [T, k]; the router's `router_scratch` float32
    and `router_arrivals` int32, zeros between launches; in the model's dtype
    `gate_up` [P, 2 I], `activated` [P, I] and `down` [P, H]; int32 `sorted_token_ids`,
    `expert_ids` and `num_tokens_post_padded` [1], as `moe_align_block_size` writes them with
    `block_size_m`."""

    block_size_m: int
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_scratch: torch.Tensor
    router_arrivals: torch.Tensor
    gate_up: torch.Tensor
    activated: torch.Tensor
    down: torch.Tensor
    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor
    lora: MoeLoRAAlignBuffers
    shared: SharedExpertWorkspace | None

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        for group, members in (("lora", self.lora), ("shared", self.shared)):
            if members is not None:
                named |= {f"{group}.{name}": tensor for name, tensor in vars(members).items()}
        return named


@dataclass(frozen=True)
class AlignSizes:
    """How long the sorted lists of a step of some tokens may become."""

    tokens_padded: int
    m_blocks: int

    @classmethod
    def of(cls, moe: MoEDims, tokens: int) -> "AlignSizes":
        pairs = tokens * moe.top_k
        block = moe_block_size_m(pairs, moe.num_experts)
        return cls(
            max_tokens_padded(pairs, moe.num_experts, block),
            max_m_blocks(pairs, moe.num_experts, block),
        )


class MoEMemory:
    """The memory behind every `MoEWorkspace`, for steps of up to `rows` tokens."""

    def __init__(
        self, dims: ModelDims, rows: int, max_loras: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert dims.moe is not None
        self._dims, self._moe, self._max_loras = dims, dims.moe, max_loras
        pairs = rows * self._moe.top_k
        sizes = [AlignSizes.of(self._moe, tokens) for tokens in range(1, rows + 1)]
        tokens_padded = max(size.tokens_padded for size in sizes)
        m_blocks = max(size.m_blocks for size in sizes)

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        def wide(count: int, width: int) -> torch.Tensor:
            return torch.empty(count, width, dtype=dtype, device=device)

        self._topk_weights = torch.empty(rows, self._moe.top_k, device=device, dtype=torch.float32)
        self._topk_ids = ints(pairs).view(rows, self._moe.top_k)
        split = min(rows, SPLIT_ROWS)
        shape = scratch_shape(split, dims.hidden_size, self._moe.num_experts, dtype.itemsize)
        self._router_scratch = torch.empty(shape, device=device, dtype=torch.float32)
        self._router_arrivals = ints(route_arrivals(split))
        self._gate_up = wide(pairs, 2 * self._moe.intermediate_size)
        self._activated = wide(pairs, self._moe.intermediate_size)
        self._down = wide(pairs, dims.hidden_size)
        self._sorted_token_ids, self._expert_ids = ints(tokens_padded), ints(m_blocks)
        self._num_tokens_post_padded = ints(1)
        self._sorted_token_ids_lora = ints(max_loras * tokens_padded)
        self._expert_ids_lora = ints(max_loras * m_blocks)
        self._post_padded_lora, self._lora_ids = ints(max_loras), ints(max_loras)
        self._row_indptr = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._shared: SharedExpertWorkspace | None = None
        if width := self._moe.shared_intermediate_size:
            self._shared = SharedExpertWorkspace(
                wide(rows, 2 * width),
                wide(rows, width),
                wide(rows, dims.hidden_size),
                wide(rows, 1),
            )

    def view(self, tokens: int) -> MoEWorkspace:
        """The workspace of a step of `tokens`."""
        moe, loras, pairs = self._moe, self._max_loras, tokens * self._moe.top_k
        sizes = AlignSizes.of(moe, tokens)
        shared = self._shared and SharedExpertWorkspace(
            **{name: tensor[:tokens] for name, tensor in vars(self._shared).items()}
        )
        return MoEWorkspace(
            block_size_m=moe_block_size_m(pairs, moe.num_experts),
            topk_weights=self._topk_weights[:tokens],
            topk_ids=self._topk_ids[:tokens],
            router_scratch=self._router_scratch,
            router_arrivals=self._router_arrivals,
            gate_up=self._gate_up[:pairs],
            activated=self._activated[:pairs],
            down=self._down[:pairs],
            sorted_token_ids=self._sorted_token_ids[: sizes.tokens_padded],
            expert_ids=self._expert_ids[: sizes.m_blocks],
            num_tokens_post_padded=self._num_tokens_post_padded,
            lora=MoeLoRAAlignBuffers(
                _rows(self._sorted_token_ids_lora, loras, sizes.tokens_padded),
                _rows(self._expert_ids_lora, loras, sizes.m_blocks),
                self._post_padded_lora,
                self._lora_ids,
                self._row_indptr[: tokens + 1],
            ),
            shared=shared,
        )

    @property
    def bytes(self) -> int:
        tensors = [t for t in vars(self).values() if isinstance(t, torch.Tensor)]
        tensors += list(vars(self._shared).values()) if self._shared else []
        return sum(t.numel() * t.element_size() for t in tensors)


def _rows(flat: torch.Tensor, count: int, width: int) -> torch.Tensor:
    return flat[: count * width].view(count, width)
