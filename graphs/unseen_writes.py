"""Finds writes to static buffers that a capture did not see, such as those of another thread.

A thread that the step starts or feeds is not captured: what it does happens once and no replay
repeats it. torch counts the in-place writes of every tensor; a count that grew by more than the
seen operations explain shows such a write. Not counted, so not found: writes to tensors made in
inference mode or not among the buffers, and writes that torch itself does not count (through
`.data`, numpy, `foreach` operations, or a kernel launched by hand).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from graphs.errors import CaptureError


class UnseenWrites:
    """`buffers` by name, as they are before the step runs."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._before = {
            name: (tensor, tensor._version, _storage(tensor))
            for name, tensor in buffers.items()
            if not tensor.is_inference()
        }
        self._seen: Counter[int] = Counter()  # storage → counted writes

    def see(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note what `op` writes, if its writes are of the counted kind."""
        if not op.has_kernel_for_dispatch_key(DispatchKey.ADInplaceOrView):
            return
        for position, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
                self._seen.update(_storage(tensor) for tensor in tensors)

    def check(self) -> None:
        """CaptureError names each buffer that was written more often than was seen."""
        written = [
            name
            for name, (tensor, version, storage) in self._before.items()
            if tensor._version - version > self._seen[storage]
        ]
        if written:
            raise CaptureError(
                f"written during capture by operations that the capture did not see (another "
                f"thread's?), which no replay would repeat: {', '.join(sorted(written))}"
            )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
