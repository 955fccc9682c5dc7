"""Which experts a step's tokens really chose, and with which adapters: counted, not estimated."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from profiles.route_log import RouteLog, Routes


@dataclass(frozen=True)
class ExpertHits:
    """Of one step: per sparse layer the experts that some token chose, and the (adapter, expert)
    pairs among them."""

    experts: tuple[int, ...] = ()
    adapter_pairs: tuple[int, ...] = ()

    @property
    def mean_experts(self) -> float:
        return sum(self.experts) / len(self.experts) if self.experts else 0.0


def count_expert_hits(step: Callable[[], None]) -> ExpertHits:
    """Run `step` eagerly once and count."""
    with RouteLog() as log:
        step()
    return ExpertHits(
        tuple(call.topk_ids[call.topk_ids >= 0].unique().numel() for call in log.calls),
        tuple(_adapter_pairs(call) for call in log.calls),
    )


def _adapter_pairs(call: Routes) -> int:
    if call.row_adapter is None:
        return 0
    slots = call.row_adapter[:, None].expand_as(call.topk_ids)
    chosen = (call.topk_ids >= 0) & (slots >= 0)
    return torch.stack([slots[chosen], call.topk_ids[chosen]], dim=1).unique(dim=0).shape[0]
