"""One batch of rows through the expert-LoRA ops, with adapters and inputs made for it."""

from dataclasses import dataclass, field

import torch

from kernels.activation import gated_activation_torch, gated_activation_triton
from kernels.lora_arguments import NO_LORA
from kernels.moe_combine import moe_combine_torch, moe_combine_triton
from kernels.moe_lora_down import moe_lora_down_torch, moe_lora_down_triton
from kernels.moe_lora_gate_up import moe_lora_gate_up_torch, moe_lora_gate_up_triton
from kernels.moe_lora_shrink import (
    moe_lora_shrink_torch,
    moe_lora_shrink_triton,
    moe_shrink_arrivals,
)
from tests.kernels.packed_experts import PackedExperts, pack_experts

NAN = float("nan")
OPS = {
    "triton": (
        moe_lora_shrink_triton,
        moe_lora_gate_up_triton,
        moe_lora_down_triton,
        gated_activation_triton,
        moe_combine_triton,
    ),
    "torch": (
        moe_lora_shrink_torch,
        moe_lora_gate_up_torch,
        moe_lora_down_torch,
        gated_activation_torch,
        moe_combine_torch,
    ),
}


@dataclass(frozen=True)
class Case:
    """A batch and its adapters: rows[t] is row t's slot; ranks are dealt out by slot, expert and
    slice in turn, and one for all experts, or 0, where the slot is in `shared`."""

    rows: list[int]
    num_experts: int
    top_k: int
    ranks: list[int]
    max_loras: int = 3
    hidden: int = 40
    intermediate: int = 24
    max_rank: int = 64
    splits: int = 2
    dtype: torch.dtype = torch.float32
    arena: torch.dtype | None = None
    kind: str = "silu"
    shared: frozenset[int] = frozenset()
    disabled: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()  # pairs of id -1
    one_expert: bool = False
    shared_experts: str = ""  # "", "plain" or "gated"
    order: list[int] = field(default_factory=list)

    def slot_ranks(self, stack: int) -> list[list[list[int]]]:
        names, count = self.order or list(range(self.max_loras)), len(self.ranks)
        return [
            [
                [
                    self.ranks[(name + j) % count] * ((e + name) % 3 != 0 or len(self.rows) == 1)
                    if name in self.shared
                    else self.ranks[(2 * name + e + j) % count]
                    for e in range(self.num_experts)
                ]
                for name in names
            ]
            for j in range(stack)
        ]

    def adapters(self) -> tuple[PackedExperts, PackedExperts]:
        """Those of gate and up, and those of down."""
        order, dtype = self.order or None, self.arena or self.dtype
        gate_up = (self.hidden, self.intermediate, dtype, "a", self.shared, order)
        down = (self.intermediate, self.hidden, dtype, "b", self.shared, order)
        return pack_experts(self.slot_ranks(2), *gate_up), pack_experts(self.slot_ranks(1), *down)

    @property
    def enabled_rows(self) -> list[int]:
        return [-1 if slot in self.disabled else slot for slot in self.rows]


def routing(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(case.num_experts)
    logits = torch.randn(len(case.rows), case.num_experts, generator=generator)
    if case.one_expert:
        logits[:, 0] = 9
    weights, ids = logits.softmax(1).topk(case.top_k)
    ids = ids.int().flatten()
    ids[list(case.skipped)] = -1
    return ids.view(-1, case.top_k).contiguous(), weights.contiguous()


def activations(case: Case) -> dict[str, torch.Tensor]:
    """Random inputs of all steps, rows in buffers with margins of NaN; NaN in skipped pairs."""
    generator = torch.Generator().manual_seed(len(case.rows))
    num_tokens, num_pairs = len(case.rows), len(case.rows) * case.top_k
    found = {}
    for name, rows, width in (
        ("x", num_tokens, case.hidden),
        ("gate_up", num_pairs, 2 * case.intermediate),
        ("activated", num_pairs, case.intermediate),
        ("down", num_pairs, case.hidden),
        ("shared", num_tokens, case.hidden),
        ("shared_gate", num_tokens, 1),
    ):
        buffer = torch.full((rows, width + 8), NAN, dtype=case.dtype)
        spread = (16 / max(16, width)) ** 0.5  # float16 holds what comes of wide sums
        buffer[:, :width] = torch.randn(rows, width, generator=generator) * spread
        if name in ("activated", "down"):  # what experts leave unwritten
            buffer[list(case.skipped)] = NAN
        found[name] = buffer
    return found


@dataclass
class Batch:
    """A case on a device, and what each op leaves there; no outer tables if nothing is shared."""

    case: Case
    ops: str
    device: torch.device | str = "cpu"
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids, weights = routing(self.case)
        counters = moe_shrink_arrivals(ids.numel(), 2, self.case.max_rank)
        self.arrivals = torch.zeros(counters, dtype=torch.int32, device=self.device)
        self.topk_ids, self.topk_weights = ids.to(self.device), weights.to(self.device)
        enabled = [slot not in self.case.disabled for slot in range(self.case.max_loras)]
        self.rows = {
            "row_adapter": torch.tensor(self.case.rows, dtype=torch.int32, device=self.device),
            "adapter_enabled": torch.tensor(enabled, dtype=torch.int32, device=self.device),
            "topk_ids": self.topk_ids,
        }
        self.gate_up, self.down = (packed.to(self.device) for packed in self.case.adapters())
        for name, buffer in (self.inputs or activations(self.case)).items():
            self.inputs[name] = buffer.to(self.device, copy=True)

    def input(self, name: str) -> torch.Tensor:
        return self.inputs[name][:, :-8]

    def shrink(self, packed: PackedExperts, x: torch.Tensor, pairs_per_row: int) -> torch.Tensor:
        """Into the first pairs of a larger workspace, as a batch below the largest one's."""
        pairs, stack = self.topk_ids.numel(), packed.lora_ranks.shape[0]
        shape = (self.case.splits, pairs + 3, stack * self.case.max_rank)
        workspace = torch.full(shape, NAN, device=self.device)
        outer = packed is self.gate_up and self.case.shared
        OPS[self.ops][0](
            x=x,
            arena=packed.arena,
            a_ptrs=packed.a_ptrs,
            lora_ranks=packed.lora_ranks,
            outer_ptrs=packed.outer_ptrs if outer else None,
            outer_ranks=packed.outer_ranks if outer else None,
            **self.rows,
            pairs_per_row=pairs_per_row,
            max_rank=self.case.max_rank,
            shrunk=workspace[:, :pairs],
            arrivals=self.arrivals,
        )
        assert not self.arrivals.any()
        assert workspace[:, pairs:].isnan().all()
        return workspace[:, :pairs]

    def shrunk_gate_up(self) -> torch.Tensor:
        return self.shrink(self.gate_up, self.input("x"), self.case.top_k)

    def shrunk_down(self) -> torch.Tensor:
        return self.shrink(self.down, self.input("activated"), 1)

    def out(self, rows: int, width: int) -> torch.Tensor:
        return torch.full((rows, width + 8), NAN, dtype=self.case.dtype, device=self.device)

    def run_gate_up(self) -> torch.Tensor:
        out, packed = self.out(self.topk_ids.numel(), self.case.intermediate), self.gate_up
        OPS[self.ops][1](
            gate_up=self.input("gate_up"),
            shrunk=self.shrunk_gate_up()[0],
            arena=packed.arena,
            b_ptrs=packed.b_ptrs,
            lora_ranks=packed.lora_ranks,
            scalings=packed.scalings,
            outer_ranks=packed.outer_ranks if self.case.shared else None,
            **self.rows,
            max_rank=self.case.max_rank,
            kind=self.case.kind,
            out=out[:, :-8],
        )
        assert out[:, -8:].isnan().all()
        return out[:, :-8].cpu()

    def shared_part(self) -> dict[str, torch.Tensor | None]:
        kind = self.case.shared_experts
        return {
            "shared": self.input("shared") if kind else None,
            "shared_gate": self.input("shared_gate") if kind == "gated" else None,
        }

    def run_down(self) -> torch.Tensor:
        out, packed = self.out(len(self.topk_ids), self.case.hidden), self.down
        OPS[self.ops][2](
            down=self.input("down"),
            shrunk=self.shrunk_down()[0],
            arena=packed.arena,
            b_ptrs=packed.b_ptrs,
            lora_ranks=packed.lora_ranks,
            scalings=packed.scalings,
            outer_ptrs=packed.outer_ptrs if self.case.shared else None,
            outer_ranks=packed.outer_ranks if self.case.shared else None,
            **self.rows,
            topk_weights=self.topk_weights,
            **self.shared_part(),
            max_rank=self.case.max_rank,
            out=out[:, :-8],
        )
        assert out[:, -8:].isnan().all()
        return out[:, :-8].cpu()

    def base_gate_up(self) -> torch.Tensor:
        out = self.out(self.topk_ids.numel(), self.case.intermediate)[:, :-8]
        OPS[self.ops][3](self.input("gate_up"), *NO_LORA, self.case.kind, out)
        return out.cpu()

    def base_down(self) -> torch.Tensor:
        out = self.out(len(self.topk_ids), self.case.hidden)[:, :-8]
        shared = self.shared_part()
        OPS[self.ops][4](self.input("down"), self.topk_ids, self.topk_weights, **shared, out=out)
        return out.cpu()
