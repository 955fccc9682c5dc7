"""Who may import whom, read off the source: engine → graphs → memory → kernels, and no way back."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("engine", "graphs", "memory", "kernels")
OWN = (*ORDER, "profiles", "tests")
KERNELS_MAY_IMPORT = {"torch", "triton", "kernels"} | sys.stdlib_module_names
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
READS_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(found) > 5 * len(folders), "no sources found: is ROOT right?"
    return found


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Every module that `source`, a file of `package`, imports: at its top, inside functions,
    relative to its package, or through importlib."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")
            base = base[: len(base) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Call):
            function = node.func
            name = getattr(function, "attr", getattr(function, "id", ""))
            if name in ("import_module", "__import__") and node.args:
                argument = node.args[0]
                assert isinstance(argument, ast.Constant), f"{name} of what is not a literal"
                yield str(argument.value)


def imports_of(path: Path) -> set[str]:
    """Top-level names that `path` imports."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return {name.split(".")[0] for name in imported_modules(path.read_text(), package)}


def forbidden_imports(folder: str, imported: set[str]) -> set[str]:
    allowed = ORDER[ORDER.index(folder) :]
    return {name for name in imported if name in OWN and name not in allowed}


@pytest.mark.parametrize("folder", ORDER)
def test_imports_go_down_the_list_only(folder):
    for path in sources(folder):
        assert not forbidden_imports(folder, imports_of(path)), path


def test_kernels_import_torch_triton_and_the_standard_library_only():
    for path in sources("kernels"):
        assert imports_of(path) <= KERNELS_MAY_IMPORT, path


def test_kernels_package_is_a_docstring_alone():
    """transformers probes for another package of that name and imports what it finds."""
    body = ast.parse((ROOT / "kernels/__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)
    assert isinstance(body[0].value.value, str)


def test_distribution_stays_below_the_version_that_transformers_looks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    major, minor = (int(part) for part in project["version"].split(".")[:2])
    assert (major, minor) < (0, 9)


def test_every_file_is_named_after_what_it_holds():
    for path in sources(*OWN):
        assert path.stem not in VAGUE_NAMES, path
        assert path.parent.name not in VAGUE_NAMES, path


def reads_environment(source: str) -> bool:
    """Whether `source` names the environment in any spelling."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names |= {alias.name for alias in node.names}
    return bool(names & READS_ENVIRONMENT)


def test_the_environment_is_read_in_one_file():
    readers = [path for path in sources(*ORDER) if reads_environment(path.read_text())]
    assert readers == [ROOT / "engine/config.py"]


@pytest.mark.parametrize(
    ("source", "package", "names"),
    [
        ("import engine.scheduler as s", "memory", {"engine"}),
        ("def f():\n    from engine import Engine", "graphs", {"engine"}),
        ("if TYPE_CHECKING:\n    import graphs", "memory", {"graphs"}),
        ("from . import extents", "memory", {"memory"}),
        ("from .extents import aligned", "memory", {"memory"}),
        ("from .. import engine", "memory.deep", {"memory"}),
        ("from ..engine import x", "memory", {"engine"}),
        (
            "import importlib\nimportlib.import_module('engine.x')",
            "memory",
            {"engine", "importlib"},
        ),
        ("__import__('graphs')", "kernels", {"graphs"}),
        ("import torch, graphs.ladder", "kernels", {"torch", "graphs"}),
    ],
)
def test_imports_are_found_wherever_they_hide(source, package, names):
    found = {name.split(".")[0] for name in imported_modules(source, package)}
    assert found == names


@pytest.mark.parametrize(
    ("folder", "imported", "forbidden"),
    [
        ("engine", {"engine", "graphs", "memory", "kernels", "torch"}, set()),
        ("graphs", {"engine", "memory"}, {"engine"}),
        ("memory", {"graphs", "kernels", "tests"}, {"graphs", "tests"}),
        ("kernels", {"memory", "torch"}, {"memory"}),
        ("engine", {"profiles", "tests"}, {"profiles", "tests"}),
    ],
)
def test_the_order_refuses(folder, imported, forbidden):
    assert forbidden_imports(folder, imported) == forbidden


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['X']",
        "from os import environ as e",
        "import os as o\no.getenv('X')",
        "def f():\n    import os\n    return os.environ.get('X')",
    ],
)
def test_reading_the_environment_is_found(source):
    assert reads_environment(source)
    assert not reads_environment(source.replace("environ", "curdir").replace("getenv", "getcwd"))
