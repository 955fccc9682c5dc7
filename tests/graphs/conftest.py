"""Backends that graph tests run on, and where their tensors live."""

import pytest


@pytest.fixture(params=["tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request) -> str:
    return request.param


@pytest.fixture
def device(backend) -> str:
    return "cuda" if backend == "cuda" else "cpu"
