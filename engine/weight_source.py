"""Where weights come from, one tensor at a time, under canonical names.

A source knows nothing of the model around a tensor, nor where on the device it will lie.
"""

from typing import Protocol

import torch

from engine.errors import CheckpointError

Part = tuple[slice, ...]


class WeightSource(Protocol):
    """Named tensors that can be streamed into memory the caller owns."""

    def names(self) -> frozenset[str]:
        """The same object each time: a mixture of experts has tens of thousands of names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def origin(self, name: str) -> str:
        """The file and the key in it that hold `name`, for messages."""
        ...

    def copy_into(self, name: str, dst: torch.Tensor, part: Part = ()) -> None:
        """Write the tensor, or the `part` of it (one slice per leading dimension), into `dst`.

        `dst` may be a view, on any device and of any float dtype; its shape must be that of the
        part. CheckpointError names file and key.
        """
        ...

    def close(self) -> None:
        """Release the files; the source is then done."""
        ...


def part_shape(shape: tuple[int, ...], part: Part) -> tuple[int, ...]:
    """The shape that `part` of a tensor of `shape` has."""
    leading = [len(range(*cut.indices(size))) for cut, size in zip(part, shape, strict=False)]
    return (*leading, *shape[len(part) :])


def check_destination(source: WeightSource, name: str, dst: torch.Tensor, part: Part) -> None:
    """CheckpointError unless `dst` has the shape of `part` of the tensor `name`."""
    if name not in source.names():
        raise CheckpointError(f"{source.origin(name)}: no such tensor in the checkpoint")
    found = part_shape(source.shape(name), part)
    if found != tuple(dst.shape):
        raise CheckpointError(
            f"{source.origin(name)}: shape {found} where the model needs {tuple(dst.shape)}"
        )
