"""Checks at replay that the tensors are still those of the capture. Never reads their values.

A graph goes on reading and writing the addresses it was captured with: a buffer that was
reallocated since makes wrong answers without a sound. Two checks: one integer, always; every
tensor by name, in debug mode.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch

from graphs.errors import CaptureError


class BufferGeneration:
    """Counts reallocations. Whoever rebinds a tensor that graphs use bumps it."""

    def __init__(self) -> None:
        self.value = 0

    def bump(self) -> None:
        self.value += 1


@dataclass(frozen=True)
class _Facts:
    """What a graph has baked in about one tensor."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Facts":
        return cls(
            tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        )

    def difference(self, now: "_Facts") -> str:
        pairs = ((f.name, getattr(self, f.name), getattr(now, f.name)) for f in fields(self))
        return ", ".join(f"{name} was {old}, is {new}" for name, old, new in pairs if old != new)


class ReplayGuard:
    """Remembers the tensors as `tensors()` gives them now, at capture."""

    def __init__(
        self, tensors: Callable[[], Mapping[str, torch.Tensor]], generation: BufferGeneration
    ) -> None:
        self._tensors = tensors
        self._captured = {name: _Facts.of(tensor) for name, tensor in tensors().items()}
        self._generation = generation
        self._captured_generation = generation.value

    def check_generation(self) -> None:
        """One comparison; what changed is looked up only when something did."""
        if self._generation.value != self._captured_generation:
            self.check()
            raise CaptureError(
                f"buffers were reallocated since capture (generation was "
                f"{self._captured_generation}, is {self._generation.value})"
            )

    def check(self) -> None:
        """Compare every tensor. CaptureError names each that differs, and how."""
        now = {name: _Facts.of(tensor) for name, tensor in self._tensors().items()}
        changed = [f"{name} is new" for name in now.keys() - self._captured.keys()]
        for name, facts in self._captured.items():
            if name not in now:
                changed.append(f"{name} is gone")
            elif now[name] != facts:
                changed.append(f"{name}: {facts.difference(now[name])}")
        if changed:
            raise CaptureError("tensors differ from those captured: " + "; ".join(sorted(changed)))
