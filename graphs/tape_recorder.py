"""Turns the operations of one step into calls that can be run again on the same tensors.

Knows nothing of when they run again. What a recorded call writes to:

  in-place and `out=` operations, custom ops   the tensors they were called with
  operations that return new tensors           the very tensors they returned while recording
  views, `empty` and its kin                   nothing: what they made while recording is reused
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from graphs.capture_watch import Op, refuse
from graphs.errors import CaptureError

Call = Callable[[], object]


class TapeRecorder:
    """`run` is given each operation once: it runs it and appends to `calls`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.made: list[Tensor] = []  # whole memory of each intermediate, flat
        self._pinned: dict[int, tuple[Tensor, Tensor]] = {}  # id → the tensor (kept alive), alias

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fixed_args, fixed_kwargs = tree_map_only(Tensor, self._pin, (args, kwargs))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        memory = [_memory(tensor) for tensor in inputs]
        result = op(*args, **kwargs)
        if memory != [_memory(tensor) for tensor in inputs]:
            refuse(str(op), "resizes a tensor it writes to")

        if any(isinstance(leaf, torch.ScriptObject) for leaf in tree_leaves(result)):
            refuse(str(op), "returns a handle to wait for (make call and wait one custom op)")

        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        fresh = [
            (position, leaf)
            for position, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known
        ]
        outputs = [(position, self._pin(tensor)) for position, tensor in fresh]
        self.made += [_flat(tensor) for _, tensor in outputs]

        call = partial(op, *fixed_args, **fixed_kwargs)
        if outputs and not _is_empty(op):
            self.calls.append(partial(_call_into, call, outputs))
        elif not outputs and _acts(op):
            self.calls.append(call)
        return result

    def check_unmoved(self) -> None:
        """CaptureError if a tensor that was used lies elsewhere since: `swap_tensors` shows in no
        operation, and calls recorded after it would use the wrong memory.
        """
        for tensor, alias in self._pinned.values():
            if tensor.data_ptr() != alias.data_ptr():
                raise CaptureError(
                    f"the step moved a tensor of shape {tuple(tensor.shape)} to other memory "
                    f"(torch.utils.swap_tensors?), which a graph would not follow"
                )

    def _pin(self, tensor: Tensor) -> Tensor:
        """An alias that stays on this memory even if the step's owner rebinds its tensor."""
        if id(tensor) not in self._pinned:
            self._pinned[id(tensor)] = (tensor, tensor.detach())
        return self._pinned[id(tensor)][1]


def _call_into(call: Call, outputs: Sequence[tuple[int, Tensor]]) -> None:
    """Write the new tensors that `call` returns to the recorded ones, by position."""
    result = call()
    if isinstance(result, Tensor):
        outputs[0][1].copy_(result)
        return
    leaves = tree_leaves(result)
    for position, output in outputs:
        output.copy_(leaves[position])


def _memory(tensor: Tensor) -> tuple[int, int, torch.Size, tuple[int, ...]]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes(), tensor.shape, tensor.stride()


def _flat(tensor: Tensor) -> Tensor:
    """All of the tensor's memory, gaps between its rows included."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def _acts(op: Op) -> bool:
    """Whether a call that made no tensor did anything. Only torch's own views surely do not."""
    return op._schema.is_mutable or not op._schema.returns or op.namespace != "aten"


def _is_empty(op: Op) -> bool:
    name = op._schema.name.removeprefix("aten::").removeprefix("new_")
    return name.startswith("empty")
