"""The one thing that capture and replay ask of a batch size's buffers: their tensors by name."""

from collections.abc import Mapping
from typing import Protocol, TypeVar

import torch


class StaticBuffers(Protocol):
    """Buffers of one batch size, allocated once by their owner (`memory`)."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Every tensor by name, as it is bound now."""
        ...


B = TypeVar("B", bound=StaticBuffers)
