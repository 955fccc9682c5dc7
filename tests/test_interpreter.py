"""Kernel tests under Triton's interpreter, in processes of their own.

`triton.compile` fails where TRITON_INTERPRET=1 is set, so the compile tests and these cannot
share a process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HAS_GPU, INTERPRETED


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="kernel tests run in this process")
def test_kernels_match_their_twins_under_the_interpreter():
    root = Path(__file__).parent.parent
    files = sorted(str(path.relative_to(root)) for path in root.glob("tests/kernels/test_*.py"))
    shares = min(os.cpu_count() or 1, 4)
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-m", "kernel", *files[share::shares]],
            cwd=root,
            env=os.environ | {"TRITON_INTERPRET": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for share in range(shares)
    ]
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 0, output[-8000:]
        assert re.search(r"(\d+) passed", output), output
        print(output.splitlines()[-1])
