"""On a GPU, kernels are compiled while the engine starts and never while it serves."""

import random

import pytest
import triton

from engine import Engine, SamplingParams
from tests.random_adapters import save_adapter
from tests.tiny_models import build_model, save_model


@pytest.fixture
def compiled(monkeypatch):
    """The kernels compiled since the fixture was made, by name."""
    names = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_cache_hook",
        lambda **event: names.append(event["fn"].name) and None,
    )
    return names


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_traffic_of_every_kind_compiles_nothing(tmp_path, compiled, dtype):
    path, model = save_model("qwen3", tmp_path), build_model("qwen3")
    ranks = (1, 3, 8, 16, 33, 64)
    adapters = {f"rank{r}": save_adapter(model, tmp_path / f"r{r}", r, seed=r) for r in ranks}
    draw = random.Random(0)
    with Engine(
        path,
        dtype=dtype,
        max_batch_size=24,
        max_seq_len=1024,
        max_loras=5,
        prefill_chunk_tokens=700,
        tokenizer=None,
    ) as engine:
        assert compiled, "the hook sees what the start compiles"
        compiled.clear()
        for name, directory in adapters.items():
            engine.load_adapter(name, directory)
        for batch in (1, 2, 3, 5, 9, 17, 24):
            params = [
                SamplingParams(
                    max_tokens=draw.randint(1, 12),
                    temperature=draw.choice((0.0, 0.7)),
                    top_k=draw.choice((0, 5)),
                    top_p=draw.choice((1.0, 0.8)),
                    repetition_penalty=draw.choice((1.0, 1.2)),
                    logprobs=draw.choice((None, 3)),
                    prompt_logprobs=draw.choice((None, 0, 2)),
                    logit_bias=draw.choice((None, {4: 2.0})),
                    ignore_eos=True,
                )
                for _ in range(batch)
            ]
            prompts = [
                [draw.randrange(515) for _ in range(draw.choice((1, 2, 7, 31, 130, 500)))]
                for _ in range(batch)
            ]
            names = [draw.choice((None, *adapters)) for _ in range(batch)]
            engine.generate(prompts, params, names)
        assert not compiled, compiled
