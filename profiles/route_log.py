"""The experts that every row of every mixture took, while a step runs from Python."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.moe_route import moe_route


@dataclass(frozen=True)
class Routes:
    """What one `moe_route` was given and wrote, copied: `topk_ids` int32 [T, k] and `row_adapter`
    int32 [T], None on an engine without adapter slots."""

    topk_ids: torch.Tensor
    row_adapter: torch.Tensor | None


class RouteLog(TorchDispatchMode):
    """`with RouteLog() as log:` keeps the routes of every call inside, in order, in `log.calls`.

    A graph's replay runs no Python and is not seen; prefill and `graphs="off"` are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Routes] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is moe_route:
            schema = torch.ops.encore.moe_route.default._schema
            names = [argument.name for argument in schema.arguments]
            given = dict(zip(names, args, strict=True))
            row_adapter = given["row_adapter"]
            self.calls.append(
                Routes(
                    given["topk_ids"].clone(),
                    None if row_adapter is None else row_adapter.clone(),
                )
            )
        return result
