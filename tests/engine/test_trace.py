"""nvtx ranges: off by default and then free, on when asked for."""

import pytest

from engine import Engine, SamplingParams
from engine.trace import Trace
from tests.random_adapters import save_adapter
from tests.tiny_models import build_model, save_model

nvtx = pytest.importorskip("nvtx")

SIZES = {
    "device": "cpu",
    "max_batch_size": 2,
    "graph_batch_sizes": [2],
    "max_seq_len": 64,
    "prefill_chunk_tokens": 16,
    "tokenizer": None,
}


@pytest.fixture
def entered(monkeypatch):
    """The names of the ranges that were opened, in order."""
    names = []
    annotate = nvtx.annotate

    def record(name, **options):
        names.append(name)
        return annotate(name, **options)

    monkeypatch.setattr(nvtx, "annotate", record)
    return names


def run(tmp_path, **keywords):
    path = save_model("llama", tmp_path)
    adapter = save_adapter(build_model("llama"), tmp_path / "a", 4)
    with Engine(path, adapters={"a": adapter}, **SIZES, **keywords) as engine:
        return engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0), "a")


def test_every_phase_has_a_range(tmp_path, entered):
    run(tmp_path, nvtx=True)
    assert set(entered) == {
        "load",
        "measure",
        "capture",
        "prefill",
        "stage",
        "replay",
        "sample",
        "adapter load",
    }
    assert entered.index("load") < entered.index("measure") < entered.index("capture")
    assert entered.index("capture") < entered.index("adapter load")
    assert entered.count("replay") == 3
    assert entered.count("stage") == 1, "a steady batch is staged once"


def test_off_by_default(tmp_path, entered, monkeypatch):
    run(tmp_path)
    assert not entered
    assert Trace(False).range("replay") is Trace(False).range("stage"), "one object, made once"
    monkeypatch.setenv("ENCORE_NVTX", "1")
    run(tmp_path)
    assert "replay" in entered
