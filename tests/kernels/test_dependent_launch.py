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
_READS = {"load": 0, "copy_block": 0, "copy_elements": 1}
"""Calls that read memory, and which argument says where."""

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
    "reads x before it waits": GOOD.replace(
        WAIT, "    y = x + row\n    if row > 0:\n        z = tl.load(y)\n" + WAIT
    ),
}
CONSTANT = {
    "weight",
    "bias",
    "cos_sin",
    "arena",
    "a_ptrs",
    "b_ptrs",
    "lora_ranks",
    "scalings",
    "outer_ptrs",
    "outer_ranks",
}
"""What no kernel of a step writes."""

LAUNCHES_AGO = {
    "positions",
    "kv_slots",
    "row_slot",
    "row_order",
    "seg_indptr",
    "weight_indices",
    "num_segments",
    "pair_row",
    "block_tables",
    "row_request",
    "seq_lens",
}
"""What is written when a step begins; `tests.engine.test_launch_order` says that it is long ago."""

BEHIND_A_PRODUCT = {
    "moe_route": {"row_mask", "adapter_enabled"},
    "moe_lora_gate_up": {"topk_ids", "row_adapter", "adapter_enabled"},
    "moe_lora_down": {"topk_ids", "topk_weights", "row_adapter", "adapter_enabled"},
}
"""What is older than the product that lies between, before these ops alone."""

OP_OF = {"moe_route_parts": "moe_route"}
"""The op, of a launcher that is not an op's own."""


def may_be_read_early(op: str) -> set[str]:
    """Names of an op's tensors that its kernels may read before they wait."""
    return CONSTANT | LAUNCHES_AGO | BEHIND_A_PRODUCT.get(op, set())


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
        if waits == 0 and any(_writes(call, functions) for call in calls):
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


def _writes(name: str, functions: dict[str, ast.FunctionDef]) -> bool:
    """Whether a call of `name` writes to memory before a wait of its own."""
    if name.startswith(_WRITES):
        return True
    if name not in functions or _takes_pdl(name, functions):
        return False
    return any(_writes(_called(node), functions) for node in ast.walk(functions[name]))


class _Reads:
    """The parameters of a function at whose addresses it reads, or at addresses found there:
    before it waits, and where it does not wait all of them."""

    def __init__(self, function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> None:
        parameters = [arg for arg in function.args.args if arg.annotation is None]
        self._functions = functions
        self._origins = {arg.arg: {arg.arg} for arg in parameters}  # of what a variable holds
        self._waited = False
        self.found: set[str] = set()
        self._walk(function.body)

    def _walk(self, body: list[ast.stmt]) -> None:
        for statement in body:
            compound = isinstance(statement, ast.If | ast.For | ast.While)
            head = getattr(statement, "test", getattr(statement, "iter", None))
            self._note_calls(head if compound and head is not None else statement)
            if self._waited:
                return
            if isinstance(statement, ast.Assign | ast.AugAssign | ast.For):
                value = statement.iter if isinstance(statement, ast.For) else statement.value
                targets = getattr(statement, "targets", None) or [statement.target]
                for name in (n for target in targets for n in ast.walk(target)):
                    if isinstance(name, ast.Name):
                        held = self._origins.get(name.id, set())
                        self._origins[name.id] = held | self._origins_of(value)
            before, after = self._waited, []
            for part in ("body", "orelse"):
                self._waited = before
                self._walk(getattr(statement, part, []))
                after.append(self._waited)
            self._waited = any(after)

    def _note_calls(self, node: ast.AST) -> None:
        for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
            name = _called(call)
            if name in _READS:
                self.found |= self._origins_of(call.args[_READS[name]])
            elif name in self._functions and name != "wait_for_inputs":
                function = self._functions[name]
                reads = _Reads(function, self._functions).found
                given = zip((arg.arg for arg in function.args.args), call.args, strict=False)
                for parameter, value in [*given, *((k.arg, k.value) for k in call.keywords)]:
                    if parameter in reads:
                        self.found |= self._origins_of(value)
            if name == "wait_for_inputs" or _takes_pdl(name, self._functions):
                self._waited = True

    def _origins_of(self, node: ast.AST) -> set[str]:
        names = (n.id for n in ast.walk(node) if isinstance(n, ast.Name))
        return set().union(*(self._origins.get(name, set()) for name in names))


def _early_reads(name: str, functions: dict[str, ast.FunctionDef]) -> set[str]:
    """Tensors that a kernel reads before it waits; numbers among what addresses are made of are
    left out by their names."""
    reads = {read.removesuffix("_ptr") for read in _Reads(functions[name], functions).found}
    reads = {{"tables": "block_tables"}.get(read, read) for read in reads}
    numbers = (
        "num_tokens",
        "max_segments",
        "max_position",
        "window",
        "min_tiles",
        "splits",
        "split_blocks",
        "rank_tiles",
        "parts",
    )
    return {read for read in reads if not read.endswith(("stride", *numbers))}


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
        op = launcher.name.removesuffix("_triton").removeprefix("launch_")
        early = _early_reads(name, functions) - may_be_read_early(OP_OF.get(op, op))
        faults += [f"{name} reads {tensor} before it waits" for tensor in sorted(early)]
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


def test_what_a_function_reads_and_writes_is_its_callers():
    early = GOOD.replace(WAIT, "    work(out, x)\n" + WAIT)
    reads = "def work(to, source):\n    at = source + 3\n    tl.load(tl.load(at))\n"
    assert _faults(early, reads) == ["_copy_kernel reads x before it waits"]
    writes = "def work(to, source):\n    deep(to)\ndef deep(to):\n    tl.store(to, 0)\n"
    assert _faults(early, writes) == ["_copy_kernel writes before it waits"]
    assert _faults(early, "def work(to, source):\n    pass\n") == []


def test_one_branchs_wait_is_not_the_others():
    late = "    if row > 0:\n        work(x, PDL)\n    else:\n        other(x, PDL)\n"
    other = "def other(y, PDL: tl.constexpr):\n    z = tl.load(y)\n" + WAIT
    assert _faults(GOOD.replace(WAIT, late), WORK, other) == [
        "_copy_kernel reads x before it waits"
    ]


def test_a_copy_to_shared_memory_reads():
    for copy in ("copy_block(x, [row, 0], 0, 0)", "copy_elements(0, x + row)"):
        early = GOOD.replace(WAIT, f"    {copy}\n" + WAIT)
        assert _faults(early) == ["_copy_kernel reads x before it waits"]


def test_kernels_do_read_early():
    functions = {}
    for path in SOURCES:
        functions |= _functions(path.read_text())
    reads = {n for n in functions if n.endswith("_kernel") and _early_reads(n, functions)}
    assert len(reads) >= 8, reads
    product = _early_reads("_hopper_linear_kernel", functions)
    assert {"weight", "bias", "arena", "a_ptrs", "lora_ranks", "seg_indptr"} <= product
    assert product <= _early_reads("_hopper_ranks_kernel", functions)
    rotary = _early_reads("_rotary_kv_write_kernel", functions)
    assert {"positions", "row_slot", "b_ptrs", "arena"} <= rotary
    router = _early_reads("_moe_route_parts_kernel", functions)
    assert BEHIND_A_PRODUCT["moe_route"] | {"weight", "lora_ranks"} <= router
    for op in ("moe_lora_gate_up", "moe_lora_down"):
        early = BEHIND_A_PRODUCT[op] | {"b_ptrs", "arena"}
        assert early <= _early_reads(f"_{op}_kernel", functions)


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
