"""The rules of `kernels.dependent_launch`, read off the kernels' sources and machine code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kernels
from kernels.dependent_launch import dependent_launch
from kernels.embedding import embed_triton
from tests.kernels.cross_compile import compile_each

SOURCES = sorted(Path(kernels.__path__[0]).glob("*.py"))
NOT_YET = ("activation", "linear", "lora_metadata", "norm", "rotary", "sgemm")
_WRITES = ("store", "atomic_")

GOOD = """
@triton.jit
def _copy_kernel(x, out, PDL: tl.constexpr):
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    if row > 3:
        return
    tl.store(out + row, tl.load(x + row))

def copy_triton(x, out):
    _copy_kernel[(4,)](x, out, **dependent_launch(x.device))
"""
WAIT = "    wait_for_inputs(PDL)\n"
BROKEN = {
    "has no parameter PDL": GOOD.replace(", PDL: tl.constexpr", ""),
    "waits 0 times": GOOD.replace(WAIT, ""),
    "waits 2 times": GOOD.replace(WAIT, 2 * WAIT),
    "waits inside another statement": GOOD.replace(WAIT, "    if row > 0:\n    " + WAIT),
    "may return before it waits": GOOD.replace(WAIT, "").replace(
        "        return\n", "        return\n" + WAIT
    ),
    "writes before it waits": GOOD.replace(WAIT, "    tl.store(out + row, 0)\n" + WAIT),
    "is launched without dependent_launch": GOOD.replace(
        "**dependent_launch(x.device)", "PDL=False"
    ),
}


def _called(node: ast.AST) -> str:
    """The last name of what a call calls; empty where `node` is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def _launches(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    """(launcher, kernel's name) of every `kernel[grid](...)`."""
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                    yield function, ast.unparse(node.func.value)


def _faults_of_kernel(kernel: ast.FunctionDef) -> Iterator[str]:
    if "PDL" not in [argument.arg for argument in kernel.args.args]:
        yield "has no parameter PDL"
        return
    waits = [node for node in ast.walk(kernel) if _called(node) == "wait_for_inputs"]
    if len(waits) != 1:
        yield f"waits {len(waits)} times"
        return
    statements = [getattr(statement, "value", None) for statement in kernel.body]
    if waits[0] not in statements:
        yield "waits inside another statement"
        return
    for statement in kernel.body[: statements.index(waits[0])]:
        for node in ast.walk(statement):
            if isinstance(node, ast.Return):
                yield "may return before it waits"
            if _called(node).startswith(_WRITES):
                yield "writes before it waits"


def _faults(source: str) -> list[str]:
    """What the launches of one module, and the kernels they launch, do against the rules."""
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    faults = []
    for launcher, name in _launches(tree):
        assert name in functions, f"{name} is launched in a module that does not define it"
        faults += [f"{name} {fault}" for fault in _faults_of_kernel(functions[name])]
        if "dependent_launch" not in map(_called, ast.walk(launcher)):
            faults.append(f"{name} is launched without dependent_launch")
    return faults


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_kernels_keep_the_rules(path):
    if path.stem in NOT_YET:
        pytest.skip("launched without it so far")
    assert _faults(path.read_text()) == []


def test_every_kernel_file_is_read():
    launched = {name for path in SOURCES for _, name in _launches(ast.parse(path.read_text()))}
    defined = {
        function.name
        for path in SOURCES
        for function in ast.parse(path.read_text()).body
        if isinstance(function, ast.FunctionDef) and function.name.endswith("_kernel")
    }
    assert len(launched) > 20
    assert launched == defined


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_found(fault):
    assert _faults(GOOD) == []
    assert _faults(BROKEN[fault]) == [f"_copy_kernel {fault}"]


def test_nothing_is_dependent_on_a_cpu():
    assert dependent_launch(torch.device("cpu")) == {"PDL": False}


def test_machine_code_waits_before_it_reads():
    ids, weight = torch.zeros(2, dtype=torch.int32), torch.zeros(3, 64, dtype=torch.bfloat16)
    compiled = compile_each(embed_triton, ids, weight, 1.0, weight[:2].clone())
    for capability, kernel in compiled:
        order = re.findall(r"griddepcontrol\.\w+|ld\.global|cp\.async", kernel.asm["ptx"])
        if capability < 90:
            assert "griddepcontrol.wait" not in order
        else:
            assert order[:2] == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]
            assert "ld.global" in order
