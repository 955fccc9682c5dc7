"""Where a number comes from: hardware, versions, commit and command, written beside it."""

import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

CODE = Path(__file__).parent
RESULTS = CODE / "results"


def provenance(commit: str | None) -> dict[str, Any]:
    """What a result was measured on. `commit` is for checkouts without git's own record."""
    device = "cpu"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    versions = {name: metadata.version(name) for name in ("torch", "triton", "transformers")}
    return {
        "hardware": device,
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit or _head(),
        "command": " ".join(["python -m", *_module_and_arguments()]),
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write `result` as JSON, one value a line, keys in the order given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _head() -> str:
    """The commit, and whether the code differs from it."""
    try:
        everything = ("--porcelain", "--untracked-files=normal", "--", ":/", ":!/profiles/results")
        changed = _git("status", *everything)
        return _git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(CODE), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stdout.strip()


def _module_and_arguments() -> list[str]:
    script = Path(sys.argv[0])
    return [f"{script.parent.name}.{script.stem}", *sys.argv[1:]]
