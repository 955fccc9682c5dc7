"""On a GPU, kernels are compiled while the engine starts and never while it serves."""

import random

import pytest
import triton

from engine import Engine, SamplingParams
from tests.random_adapters import ALL, ROUTED, save_adapter
from tests.tiny_models import build_model, save_model

MLP = ("gate_proj", "up_proj", "down_proj")
MIXTURE_LENGTHS = (1, 2, 3, 5, 9, 17, 40, 65, 100, 129, 260, 390, 520, 640)


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
        serve_all_kinds(engine, adapters, (1, 2, 7, 31, 130, 500))
        assert not compiled, compiled


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_traffic_of_a_mixture_compiles_nothing(tmp_path, compiled, name, dtype):
    """Chunks of lengths that change how pairs are taken, longer than any sequence too; batches
    above the largest bucket."""
    path, model = save_model(name, tmp_path), build_model(name)
    kinds = {
        "attention": {"rank": 5, "targets": ("q_proj", "o_proj")},
        "all": {"rank": 16, "targets": (*ALL, *ROUTED)},
        "some": {"rank": 33, "targets": MLP, "experts": (0, 2, 5)},
        "thin": {"rank": 64, "targets": MLP, "expert_rank": lambda expert, target: 1 + expert % 64},
        "router": {"rank": 3, "targets": ROUTED},
    }
    adapters = {
        kind: save_adapter(model, tmp_path / kind, seed=seed, **keywords)
        for seed, (kind, keywords) in enumerate(kinds.items())
    }
    with Engine(
        path,
        dtype=dtype,
        max_batch_size=24,
        graph_batch_sizes=[1, 2, 8],
        max_seq_len=700,
        max_loras=4,
        prefill_chunk_tokens=1500,
        tokenizer=None,
        enable_prefix_caching=False,
    ) as engine:
        assert compiled, "the hook sees what the start compiles"
        compiled.clear()
        serve_all_kinds(engine, adapters, MIXTURE_LENGTHS)
        for length in MIXTURE_LENGTHS:  # a chunk of its own each
            engine.generate([3 + length % 500] * length, SamplingParams(max_tokens=2), "all")
        assert not compiled, compiled


def serve_all_kinds(engine, adapters, lengths):
    """Batches of every size class, of requests that ask for everything there is."""
    draw = random.Random(0)
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
        prompts = [[draw.randrange(515) for _ in range(draw.choice(lengths))] for _ in range(batch)]
        names = [draw.choice((None, *adapters)) for _ in range(batch)]
        engine.generate(prompts, params, names)
