"""What a CUDA graph cannot hold, told from an operation's name, tags and argument types.

Shared by the tape and by CUDA capture, so a step that passes on one passes on the other. Two
views of a step are judged: the dispatcher's operations, and the torch functions that never
reach the dispatcher. Neither shows what an operation does inside, so those that make the host
wait for the device are listed; torch documents it of most.

Known gaps, seen by neither view: `torch.frombuffer`, and `torch.from_dlpack` of something that is
no tensor (a CUDA capture refuses their copies itself); `torch.utils.dlpack.to_dlpack`, which
hands out an address that stays valid; and threads, of which only writes to static buffers are
found (`unseen_writes`).

Random operations are refused too, although CUDA could hold them: their draws would depend on
how many steps ran before. A step draws from a counter generator instead.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

_READS = "reads device values on the host"
_TAKES = "brings host data into the step"
_WAITS = "may make the host wait for the device"
_LEAVES = "moves data between devices, or to host memory"
_REBINDS = "moves a tensor to other memory or changes its shape in place"

_HOST_READ_OPS = {
    "aten::_linalg_check_errors",
    # All that `.tolist()` and `.numpy()` show of themselves when called inside torch's own code.
    "aten::resolve_conj",
    "aten::resolve_neg",
}
_WAITING_OPS = {
    "aten::isin",
    "aten::histc",
    "aten::_linalg_svd",  # matrix_rank, svdvals, cond
    "aten::_linalg_eigh",  # eigvalsh
    "aten::_linalg_eigvals",
    "aten::linalg_eig",
    "aten::linalg_eigvals",
    "aten::linalg_pinv",
    "aten::_pack_padded_sequence",
    "aten::_nested_tensor_from_tensor_list",
}
_INDEXING_OPS = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
    "aten::_unsafe_index_put",
}
_FUNCTIONS: dict[Any, str] = {
    Tensor.tolist: _READS,
    Tensor.numpy: _READS,
    Tensor.__array__: _READS,
    Tensor.__dlpack__: _READS,
    Tensor.__repr__: _READS,
    Tensor.__format__: _READS,
    Tensor.__reduce_ex__: _READS,
    Tensor.cpu: _READS,
    Tensor.data_ptr: "hands an address to code that the capture cannot see",
    Tensor.storage: "hands memory to code that the capture cannot see",
    Tensor.untyped_storage: "hands memory to code that the capture cannot see",
    Tensor.new_tensor: _TAKES,
    torch.tensor: _TAKES,
    torch.as_tensor: _TAKES,
    torch.asarray: _TAKES,
    torch.from_numpy: _TAKES,
    Tensor.pin_memory: "allocates host memory",
    Tensor.share_memory_: "allocates host memory",
    Tensor.data.__set__: _REBINDS,  # type: ignore[attr-defined]
}


def function_refusal(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a graph cannot hold a call of this torch function, or None if nothing speaks against."""
    if isinstance(function, HigherOrderOperator):
        return "runs Python functions that the capture cannot see"
    if function is Tensor.to:  # on CPU tensors it may show no operation
        targets = [t for t in (*args[1:], *kwargs.values()) if isinstance(t, str | torch.device)]
        return _LEAVES if any(torch.device(t).type == "cpu" for t in targets) else None
    return _FUNCTIONS.get(function)


def op_refusal(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Why a graph cannot hold this call of a dispatcher operation, or None if it can."""
    name = op._schema.name
    if name in _HOST_READ_OPS or torch.Tag.data_dependent_output in op.tags:
        return _READS
    if name in _WAITING_OPS:
        return _WAITS
    if name == "aten::_to_copy" and _crosses(args[0].device, kwargs.get("device")):
        return _LEAVES
    if name.startswith(("aten::_to_sparse", "aten::_sparse_co", "aten::to_mkldnn")):
        return "makes a tensor that is not strided memory"
    if name in _INDEXING_OPS:
        masked = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        return "has a shape that depends on values (boolean index)" if masked else None
    if torch.Tag.dynamic_output_shape in op.tags:
        return "has a shape that depends on values"
    if torch.Tag.inplace_view in op.tags:
        return _REBINDS
    if torch.Tag.nondeterministic_seeded in op.tags and _draws(op, args, kwargs):
        return "draws from a generator that the step does not own"
    if name == "aten::lift_fresh" and args[0].dim() > 0:
        return _TAKES  # a scalar is a constant of the kernel that takes it
    return None


def _crosses(source: torch.device, target: torch.device | None) -> bool:
    if target is None:
        return False
    return target.type != source.type or target.index not in (None, source.index)


def _draws(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Attention carries the random tag for its dropout, which is off in a decode step."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            default = kwargs.get("dropout_p", argument.default_value)
            return bool((args[position] if position < len(args) else default) != 0.0)
    return True
