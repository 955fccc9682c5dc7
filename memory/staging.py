"""Host-to-device uploads: pack on the host, one copy, never overwrite what is still in flight."""

from collections.abc import Sequence

import torch


class StagingRing:
    """A ring of pinned int32 buffers, each guarded by the event of its last copy.

    On the CPU there is nothing to pin and copies are done at once. `copies` counts uploads.
    """

    @torch.inference_mode(False)  # written in any mode later, which inference tensors refuse
    def __init__(self, capacity: int, device: torch.device, depth: int = 2) -> None:
        self._on_gpu = device.type == "cuda"
        self._buffers = torch.empty(
            depth, capacity, dtype=torch.int32, device="cpu", pin_memory=self._on_gpu
        ).unbind()
        self._events: list[torch.cuda.Event | None] = [None] * depth
        self._next = 0
        self.copies = 0

    def upload(self, values: Sequence[int] | torch.Tensor, destination: torch.Tensor) -> None:
        """Copy int32 `values` to the start of the flat device tensor `destination`."""
        count = len(values)
        assert count <= self._buffers[0].numel(), (count, self._buffers[0].numel())
        index, self._next = self._next, (self._next + 1) % len(self._buffers)
        event = self._events[index]
        if event is not None:
            event.synchronize()
        staged = self._buffers[index][:count]
        staged.copy_(torch.as_tensor(values, dtype=torch.int32, device="cpu"))
        destination[:count].copy_(staged, non_blocking=True)
        if self._on_gpu:
            event = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._events[index] = event
        self.copies += 1
