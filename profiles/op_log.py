"""The ops of one eager step, in order: what they are, and the bytes each must move."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from profiles.op_table import bytes_of, kind_of, title_of

MARK = "step op "


@dataclass(frozen=True)
class LoggedOp:
    """`name` without its namespace; `bytes` is None where nothing counts them."""

    name: str
    kind: str
    title: str
    bytes: int | None


class _StepMode(TorchDispatchMode):
    """Hands on every op that may launch something: all but views."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        return self.run(func, tuple(args), dict(kwargs or {}))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class _Counting(_StepMode):
    """Counts bytes when the op has run: what it wrote, such as routes, is then known."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[LoggedOp] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        name = func._schema.name.split("::")[1]
        moved = bytes_of(func.namespace, name, arguments)
        self.ops.append(LoggedOp(name, kind_of(name), title_of(name), moved))
        return result


class _Marking(_StepMode):
    """Puts a profiler's span around every op, by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with record_function(f"{MARK}{self.count}"):
            self.count += 1
            return func(*args, **kwargs)


def log_ops(step: Callable[[], None]) -> list[LoggedOp]:
    """Run `step` once, eagerly, and log its ops."""
    counting = _Counting()
    with counting:
        step()
    return counting.ops


def mark_ops(step: Callable[[], None]) -> int:
    """Run `step` once, under a profiler, each op in a span "step op N"; returns how many."""
    marking = _Marking()
    with marking:
        step()
    return marking.count


def missing_counts(ops: Sequence[LoggedOp]) -> list[str]:
    """Ops whose bytes nothing counts: new ones, of which the table does not know yet."""
    return sorted({op.name for op in ops if op.bytes is None})
