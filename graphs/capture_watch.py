"""Watches a step while it is captured and refuses what a graph cannot hold, before it runs.

Knows the rules and the line of Python that broke one; knows nothing of graphs or recordings.
Refusing before the operation runs matters on CUDA: a capture that CUDA itself has invalidated
is hard to leave in order.
"""

import os
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.capture_rules import function_refusal, op_refusal
from graphs.errors import CaptureError
from graphs.unseen_writes import UnseenWrites

Op = torch._ops.OpOverload
RunOp = Callable[[Op, tuple[Any, ...], dict[str, Any]], Any]

_NOT_THE_STEP = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))


def line_of_step(frames: traceback.StackSummary) -> str:
    """The innermost line outside torch and this folder: where the step called the operation."""
    for frame in reversed(frames):
        if not frame.filename.startswith(_NOT_THE_STEP):
            return f"{frame.filename}:{frame.lineno} `{frame.line}`"
    return "an unknown line"


def _run(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(*args, **kwargs)


class CaptureWatch:
    """Context manager; inside it every dispatcher operation goes through `run_op`.

    Inside `run_op` nothing is watched: a custom op is one operation whatever it does. Leaving it
    raises CaptureError if one of `buffers` was written by something that was not watched.
    """

    def __init__(self, run_op: RunOp = _run, buffers: Mapping[str, Tensor] | None = None) -> None:
        self.run_op = run_op
        self.writes = UnseenWrites(buffers or {})
        self.inside_op = False
        self._modes = ExitStack()

    def __enter__(self) -> "CaptureWatch":
        self._modes.enter_context(_FunctionWatch(self))
        self._modes.enter_context(_OpWatch(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._modes.__exit__(kind, error, trace)
        if error is None:
            self.writes.check()


def refuse(name: str, reason: str) -> NoReturn:
    """CaptureError with the operation, the reason and the line of the step that is running."""
    line = line_of_step(traceback.extract_stack())
    raise CaptureError(f"a graph cannot hold {name}, which {reason}: called at {line}")


class _FunctionWatch(TorchFunctionMode):
    """Sees torch functions, some of which never reach the dispatcher."""

    def __init__(self, watch: CaptureWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reason = None if self._watch.inside_op else function_refusal(func, args, kwargs or {})
        if reason is not None:
            refuse(str(resolve_name(func) or func), reason)
        return func(*args, **(kwargs or {}))


class _OpWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees dispatcher operations."""

    def __init__(self, watch: CaptureWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # inference mode hands over composite operations whole: watch their parts
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        reason = op_refusal(func, args, kwargs)
        if reason is not None:
            refuse(str(func), reason)
        self._watch.inside_op = True
        try:
            self._watch.writes.see(func, args, kwargs)
            return self._watch.run_op(func, args, kwargs)
        finally:
            self._watch.inside_op = False
