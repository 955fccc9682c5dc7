"""Kernel tests under Triton's interpreter, in a process of their own.

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
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "kernel", "tests/kernels"],
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed, result.stdout
    print(result.stdout.splitlines()[-1])
