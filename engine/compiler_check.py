"""Triton builds its launchers with a C compiler and Python's headers: say so before it fails."""

import shutil
import sysconfig
from pathlib import Path

from engine.errors import EngineError


def check_compiler(chosen: str | None) -> None:
    """Raise EngineError where a GPU engine could not compile its kernels' launchers.

    `chosen` is the compiler that the user set, if any; else gcc or clang is looked for.
    """
    if not any(shutil.which(name) for name in ([chosen] if chosen else ["gcc", "clang"])):
        raise EngineError(
            "Triton needs a C compiler on a machine with a GPU: install gcc or clang, or set CC"
        )
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        raise EngineError(
            f"Triton needs Python's headers on a machine with a GPU: {header} is missing; "
            f"install python3-dev (Debian) or python3-devel (Fedora)"
        )
