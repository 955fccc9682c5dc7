"""Compiles what a launcher launches, for GPUs that are not there.

`compile_launches` runs a launcher on CPU tensors with Triton's launch intercepted: each kernel
it would start is compiled to machine code for every target with the very arguments, constexprs
and options of that launch, and for addresses and integers as they are: multiples of 16, which
decides how wide loads are and which lane adds up what, and ones. Only PDL is what
`dependent_launch` gives on that target.
"""

import re
from collections import Counter
from collections.abc import Callable
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import KernelParam

TARGETS = (80, 90, 100)
_FIRST_WITH_PDL = 90

_POINTER = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.bool: "*i1",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")


def _signature_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTER[value.dtype]
    if isinstance(value, TensorDescriptor):
        element = _POINTER[value.base.dtype].removeprefix("*")
        return f"tensordesc<{element}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"no signature for {value!r}")


def is_multiple(value: object, parameter: KernelParam) -> bool:
    """Whether Triton compiles for an address or integer that is a multiple of 16."""
    if parameter.do_not_specialize_on_alignment:
        return False
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return type(value) is int and value % 16 == 0 and not parameter.do_not_specialize


def compile_launches(launcher: Callable[..., None], *args, **kwargs) -> int:
    """Compile every kernel that `launcher(*args, **kwargs)` launches, for each of TARGETS.

    Returns how many kernels were launched; raises what the compiler raises.
    """
    compiled = compile_each(launcher, *args, **kwargs)
    return len(compiled) // len(TARGETS)


def compile_each(
    launcher: Callable[..., None], *args, targets: tuple[int, ...] = TARGETS, **kwargs
) -> list[tuple[int, CompiledKernel]]:
    """The same: (target, compiled kernel) of every launch, launch by launch."""
    launches, results = [], []

    def record(self, *launch_args, grid, warmup, **launch_kwargs):
        launches.append((self, launch_args, launch_kwargs))

    with mock.patch.object(triton.runtime.jit.JITFunction, "run", record):
        launcher(*args, **kwargs)
    for kernel, launch_args, launch_kwargs in launches:
        options = {k: launch_kwargs.pop(k) for k in _OPTIONS if k in launch_kwargs}
        bound = dict(zip(kernel.arg_names, launch_args, strict=False)) | launch_kwargs
        for parameter in kernel.params:
            if parameter.name not in bound and parameter.has_default:
                bound[parameter.name] = parameter.default
        signature, constexprs, attributes = {}, {}, {}
        for place, parameter in enumerate(kernel.params):
            value = bound[parameter.name]
            is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or is_one:
                signature[parameter.name] = "constexpr"
                constexprs[parameter.name] = value
            else:
                signature[parameter.name] = _signature_of(value)
                if is_multiple(value, parameter):
                    attributes[place,] = [["tt.divisibility", 16]]
        source_of = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
        for capability in targets:
            if "PDL" in constexprs:
                constexprs["PDL"] = capability >= _FIRST_WITH_PDL
                options["launch_pdl"] = capability >= _FIRST_WITH_PDL
            source = source_of(kernel, dict(signature), dict(constexprs), dict(attributes))
            compiled = triton.compile(
                source, target=GPUTarget("cuda", capability, 32), options=options
            )
            assert compiled.asm["cubin"], kernel
            results.append((capability, compiled))
    return results


def product_layouts(compiled: CompiledKernel) -> Counter[str]:
    """Types of every product's operands and result, which are the order of its sums."""
    text = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    products = re.findall(r" = (?:tt\.dot|ttng\.\w*dot|ttng\.\w*mma)\b.*? : (.*?) loc", text)

    def spelled_out(types: str) -> str:
        return re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), types)

    return Counter(spelled_out(types) for types in products)


def sum_layouts(compiled: CompiledKernel) -> Counter[tuple[str, str]]:
    """(shape and dtype, layout) of every float tile that a kernel sums along a dim, which is the
    order in which it does."""
    text = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    reduced = re.findall(r'"tt\.reduce".*?\{(.*?)\}\) : \(tensor<([^,]+), (#\w+)', text, re.DOTALL)
    return Counter((tile, layouts[layout]) for body, tile, layout in reduced if "addf" in body)
