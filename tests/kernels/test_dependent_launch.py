"""The rules of `kernels.dependent_launch`, read off the kernels' sources and machine code."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import kernels
from kernels.dependent_launch import dependent_launch
from kernels.embedding import embed_triton
from tests.kernels.cross_compile import compile_each

SOURCES = sorted(Path(kernels.__path__[0]).glob("*.py"))
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
# The wait may be in a function that takes PDL, or in each of two branches.
DELEGATED = GOOD.replace(
    WAIT, "    if row > 0:\n        work(x, PDL)\n    else:\n        other(x, PDL)\n"
)
WORK = "def work(x, PDL: tl.constexpr):\n    wait_for_inputs(PDL)\n"
BROKEN = {
    "has no parameter PDL": GOOD.replace(", PDL: tl.constexpr", ""),
    "waits 0 times": GOOD[: GOOD.index("    if row")].replace(WAIT, "")
    + GOOD[GOOD.index("\ndef copy") :],
    "waits 2 times": GOOD.replace(WAIT, 2 * WAIT),
    "waits on one of two ways": GOOD.replace(WAIT, "    if row > 0:\n    " + WAIT),
    "waits in a loop": GOOD.replace(WAIT, "    for _ in range(row):\n    " + WAIT),
    "may return before it waits": GOOD.replace(WAIT, "").replace(
        "        return\n", "        return\n" + WAIT
    ),
    "writes before it waits": GOOD.replace(WAIT, "    tl.store(out + row, 0)\n" + WAIT),
    "is launched without dependent_launch": GOOD.replace(
        "**dependent_launch(x.device)", "PDL=False"
    ),
}


class RuleError(ValueError):
    """What is wrong with a kernel."""


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


def _waits(body: list[ast.stmt], functions: dict[str, ast.FunctionDef], waits: int = 0) -> int:
    """How often a run has waited after `body`; raises RuleError where that depends on the run.

    A function with a parameter PDL waits for its caller, once if it keeps the rules itself.
    """
    for statement in body:
        if isinstance(statement, ast.If):
            taken = _waits(statement.body, functions, waits)
            if taken != _waits(statement.orelse, functions, waits):
                raise RuleError("waits on one of two ways")
            waits = taken
            continue
        calls = [_called(node) for node in ast.walk(statement)]
        if waits == 0 and any(call.startswith(_WRITES) for call in calls):
            raise RuleError("writes before it waits")
        waiting = [name for name in calls if _takes_pdl(name, functions)]
        for name in waiting:
            _check_waits(functions[name], functions)
        now = len(waiting) + calls.count("wait_for_inputs")
        if now and isinstance(statement, ast.For | ast.While):
            raise RuleError("waits in a loop")
        waits += now
        if waits == 0 and isinstance(statement, ast.Return):
            raise RuleError("may return before it waits")
    return waits


def _takes_pdl(name: str, functions: dict[str, ast.FunctionDef]) -> bool:
    if name == "wait_for_inputs" or name not in functions:
        return False
    return "PDL" in [arg.arg for arg in functions[name].args.args]


def _check_waits(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> None:
    waits = _waits(function.body, functions)
    if waits != 1:
        raise RuleError(f"waits {waits} times")


@cache
def _functions(source: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(source)
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _faults(source: str, *others: str) -> list[str]:
    """What the launches of one module, and the kernels they launch, do against the rules.

    `others` are the sources of modules whose functions it may call.
    """
    functions = {}
    for text in (*others, source):
        functions |= _functions(text)
    faults = []
    for launcher, name in _launches(ast.parse(source)):
        if not _takes_pdl(name, functions):
            faults.append(f"{name} has no parameter PDL")
            continue
        try:
            _check_waits(functions[name], functions)
        except RuleError as fault:
            faults.append(f"{name} {fault}")
        if "dependent_launch" not in map(_called, ast.walk(launcher)):
            faults.append(f"{name} is launched without dependent_launch")
    return faults


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_kernels_keep_the_rules(path):
    assert _faults(path.read_text(), *(other.read_text() for other in SOURCES)) == []


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


def test_the_wait_may_be_a_functions():
    assert _faults(DELEGATED, WORK, WORK.replace("work", "other")) == []
    assert _faults(DELEGATED, WORK) == ["_copy_kernel waits on one of two ways"]
    empty = WORK.replace("work", "other").replace("wait_for_inputs(PDL)", "pass")
    assert _faults(DELEGATED, WORK, empty) == ["_copy_kernel waits 0 times"]


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
