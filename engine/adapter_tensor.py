"""One tensor of an adapter's files, with the names that messages about it give."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import AdapterError

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class AdapterTensor:
    """A tensor with its file and key; `check` hands it out."""

    file: Path
    key: str
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def refusal(self, found: str, accepted: str) -> AdapterError:
        return AdapterError(f"{self.file}: key {self.key!r} {found}; accepted: {accepted}")

    def check(self, shape: tuple[int, ...], why: str, served: torch.dtype | None) -> torch.Tensor:
        """The tensor itself, once its dtype, shape and values are in order, as `served` too."""
        if self.tensor.dtype not in DTYPES:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise self.refusal(f"is {self.tensor.dtype}", accepted)
        if self.shape != shape:
            raise self.refusal(f"has shape {list(self.shape)}", f"{list(shape)} ({why})")
        extremes = torch.stack(torch.aminmax(self.tensor))  # NaN if any value is
        if not bool(extremes.isfinite().all()):
            raise self.refusal("holds NaN or infinity", "finite values")
        if served is not None and not bool(extremes.to(served).isfinite().all()):
            name, largest = str(served).removeprefix("torch."), torch.finfo(served).max
            raise self.refusal(f"overflows in {name}, as the engine runs", f"up to {largest:g}")
        return self.tensor
