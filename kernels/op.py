"""One torch.library op per launcher, so that a graph recorder sees each launch as one call.

Knows nothing about Triton or about any single kernel. Every op of Encore returns nothing and
writes into buffers it is given: on CUDA tensors the Triton launcher runs, on CPU tensors the
plain-torch twin.
"""

import inspect
from collections.abc import Callable
from typing import ParamSpec, cast

import torch

P = ParamSpec("P")

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What activations and weights may be."""

_library = torch.library.Library("encore", "DEF")


def define_op(
    launcher: Callable[P, None], twin: Callable[P, None], mutates: tuple[str, ...]
) -> Callable[P, None]:
    """Register `launcher` (CUDA) and `twin` (CPU) as the op `encore::<twin's name less _torch>`.

    Both take the same annotated parameters and return None. `mutates` names the tensor
    parameters written in place. The result is called like either of them.
    """
    assert twin.__name__.endswith("_torch"), twin.__name__
    assert inspect.signature(launcher) == inspect.signature(twin), (
        f"{twin.__name__}: launcher and twin differ in their parameters"
    )
    name = twin.__name__.removesuffix("_torch")
    _library.define(name + torch.library.infer_schema(twin, mutates_args=mutates))
    _library.impl(name, launcher, "CUDA")
    _library.impl(name, twin, "CPU")
    return cast(Callable[P, None], getattr(torch.ops.encore, name).default)
