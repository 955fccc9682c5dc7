"""The tiny engine that tests of the API share, unless a file has fixtures of its own."""

import pytest

from tests.api_engine import check_idle, open_engine, save_all
from tests.oracle import Oracle
from tests.tiny_models import build_model


@pytest.fixture(scope="module")
def model():
    return build_model("llama")


@pytest.fixture(scope="module")
def paths(model, tmp_path_factory):
    return save_all(model, tmp_path_factory.mktemp("api"))


@pytest.fixture(scope="module")
def shared(paths):
    with open_engine(paths) as engine:
        yield engine


@pytest.fixture
def engine(shared):
    yield shared
    check_idle(shared)


@pytest.fixture(scope="module")
def oracle(model, paths):
    return Oracle(model, {name: paths[name] for name in "ab"})
