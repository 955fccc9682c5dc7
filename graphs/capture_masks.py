"""What capture asks of the adapter masks' owner. `memory` implements it."""

from contextlib import AbstractContextManager
from typing import Protocol


class CaptureMasks(Protocol):
    """Both contexts change values on the current stream and restore the real ones after."""

    def synthetic(self) -> AbstractContextManager[None]:
        """A made-up adapter is enabled, so that kernels compile and tune with work to do."""
        ...

    def zeroed(self) -> AbstractContextManager[None]:
        """`adapter_enabled`, ranks and masks are all zero: the LoRA path does no work."""
        ...
