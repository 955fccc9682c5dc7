"""Which experts a step's tokens really chose, and with which adapters: counted, not estimated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.moe_route import moe_route


@dataclass(frozen=True)
class ExpertHits:
    """Of one step: per sparse layer the experts that some token chose, and the (adapter, expert)
    pairs among them."""

    experts: tuple[int, ...] = ()
    adapter_pairs: tuple[int, ...] = ()

    @property
    def mean_experts(self) -> float:
        return sum(self.experts) / len(self.experts) if self.experts else 0.0


@dataclass
class _RouteCounter(TorchDispatchMode):
    """Looks at what every `moe_route` wrote."""

    adapters_of_slots: torch.Tensor | None = None
    experts: list[int] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is moe_route:
            row_adapter, topk_ids = args[3], args[12]
            chosen = topk_ids >= 0
            self.experts.append(topk_ids[chosen].unique().numel())
            if row_adapter is not None:
                slots = row_adapter[:, None].expand_as(topk_ids)
                chosen = chosen & (slots >= 0)
                both = torch.stack([slots[chosen], topk_ids[chosen]], dim=1)
                self.pairs.append(both.unique(dim=0).shape[0])
        return result


def count_expert_hits(step: Callable[[], None]) -> ExpertHits:
    """Run `step` eagerly once and count."""
    counter = _RouteCounter()
    with counter:
        step()
    return ExpertHits(tuple(counter.experts), tuple(counter.pairs))
