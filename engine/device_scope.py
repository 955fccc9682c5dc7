"""Where an engine's work is launched: its own device and stream, whatever thread asks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceScope:
    """`with scope.entered():` makes the engine's device and stream the current ones.

    All launches, copies and events of an engine lie on one stream, so that their order on the
    device is the order of the calls. On the CPU there is nothing to enter.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Block until the device has done all that was launched."""
        if self._stream is not None:
            self._stream.synchronize()
