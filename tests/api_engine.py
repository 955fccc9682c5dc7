"""The tiny engine that the API's tests share, and how they drive it."""

from pathlib import Path

import torch

from engine import Engine, RequestOutput, SamplingParams
from tests.random_adapters import save_adapter
from tests.tiny_models import save_model
from tests.tiny_tokenizer import save_tokenizer

MAX_SEQ_LEN = 96
PROMPTS = [[5, 6, 7, 8, 9], [9, 8, 7], [11, 12, 13, 300, 14, 15, 16]]
SIZES = {
    "device": "cpu",
    "max_batch_size": 5,
    "max_seq_len": MAX_SEQ_LEN,
    "graph_batch_sizes": [1, 4],
    "prefill_chunk_tokens": 32,
    "max_lora_rank": 8,
    "max_loras": 2,
}


def save_all(model: torch.nn.Module, folder: Path) -> dict[str, Path]:
    """The tiny llama with its tokenizer, and adapters a and b."""
    return {
        "model": save_tokenizer(save_model("llama", folder)),
        "a": save_adapter(model, folder / "a", 8, seed=1),
        "b": save_adapter(model, folder / "b", 3, ("q_proj", "down_proj"), seed=2),
    }


def open_engine(paths: dict[str, Path]) -> Engine:
    return Engine(paths["model"], adapters={n: paths[n] for n in "ab"}, **SIZES, debug=True)


def check_idle(engine: Engine) -> None:
    """A test leaves no request, page or use of an adapter behind."""
    assert not engine.has_unfinished()
    assert engine.stats().kv_pages_used == 0
    assert {info.name: info.requests for info in engine.adapters()} == {"a": 0, "b": 0}


def greedy(max_tokens: int = 6, **params) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **params)


def run(engine: Engine) -> list[RequestOutput]:
    """All that `step()` hands out until nothing is left."""
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    return outputs


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]
