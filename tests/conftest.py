"""Markers that depend on the machine, and the device that kernel tests run on."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
os.environ["ENCORE_MEASURE"] = "0"  # equal engines, whatever the machine's cache holds
HAS_GPU = torch.cuda.is_available() and not INTERPRETED


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """On a machine with a GPU, kernel tests are GPU tests; elsewhere GPU tests skip."""
    for item in items:
        if item.get_closest_marker("kernel"):
            if HAS_GPU:
                item.add_marker(pytest.mark.gpu)
            elif not INTERPRETED:
                item.add_marker(
                    pytest.mark.skip(reason="runs under the interpreter, see test_interpreter.py")
                )
        elif item.get_closest_marker("multi_gpu"):
            if torch.cuda.device_count() < 2:
                item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))
        elif item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where Triton launchers run in this process: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if HAS_GPU else "cpu")
