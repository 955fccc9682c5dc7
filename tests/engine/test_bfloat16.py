"""bfloat16 on a GPU, by a statistic: adapter rows err no more than base rows do.

The reference is the Hugging Face model in float32 (no TF32) with adapters merged by hand,
teacher-forced on the engine's tokens. A bfloat16 run errs by rounding wherever it runs, so the
errors of base rows are the measure: over at least 500 positions, the mean and the 95th percentile
of |Δlogprob| of adapter rows are within three times theirs. Served without its adapter, or with
another's, a row errs a hundred times more.
"""

import pytest
import torch
import transformers

from engine import Engine, SamplingParams
from engine.demo.adapter_list import ADAPTERS
from tests.oracle import Oracle
from tests.random_adapters import ALL, save_adapter
from tests.smollm2 import smollm2_path, smollm2_reference

POSITIONS = 512


def errors_by_row(oracle: Oracle, outputs) -> dict[bool, torch.Tensor]:
    """|Δlogprob| of every position, of base rows (False) and of adapter rows (True)."""
    errors: dict[bool, list[float]] = {False: [], True: []}
    for output in outputs:
        errors[output.adapter is not None] += oracle.errors(output)
    return {kind: torch.tensor(values) for kind, values in errors.items()}


def check_statistic(oracle: Oracle, outputs) -> None:
    errors = errors_by_row(oracle, outputs)
    for kind, values in errors.items():
        assert len(values) >= POSITIONS, (kind, len(values))
        print(f"adapters={kind}: mean {values.mean():.5f}, p95 {values.quantile(0.95):.5f}")
    assert errors[True].mean() <= 3 * errors[False].mean()
    assert errors[True].quantile(0.95) <= 3 * errors[False].quantile(0.95)
    for output in outputs:  # the statistic must be able to tell adapters apart
        if output.adapter is not None:
            wrong = torch.tensor(oracle.errors(output, None))
            assert wrong.mean() > 10 * errors[True].mean(), output.adapter


@pytest.mark.gpu
@pytest.mark.parametrize("lora_backend", ["sgemm", "torch"])
def test_random_model(tmp_path, lora_backend):
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.04)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "model")
    model = model.float().cuda()
    adapters = {
        "all": save_adapter(model, tmp_path / "all", 16, ALL, seed=1),
        "wide": save_adapter(model, tmp_path / "wide", 64, ("q_proj", "v_proj"), seed=2),
        "odd": save_adapter(model, tmp_path / "odd", 5, ("gate_proj", "down_proj"), seed=3),
        "rslora": save_adapter(model, tmp_path / "rslora", 8, ALL, seed=4, use_rslora=True),
    }
    names = [None, *adapters] * 4
    names = [None if index % 2 else name for index, name in enumerate(names)]
    prompts = [[3 + row, 50, 60 + row] for row in range(len(names))]
    with Engine(
        tmp_path / "model",
        adapters=adapters,
        max_batch_size=32,
        max_seq_len=256,
        tokenizer=None,
        lora_backend=lora_backend,
    ) as engine:
        params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, logprobs=0)
        outputs = engine.generate(prompts, params, names)
        assert engine.dtype == torch.bfloat16
        assert engine.stats().replays >= 60
    check_statistic(Oracle(model, adapters), outputs)


@pytest.mark.gpu
def test_smollm2_with_its_trained_adapters():
    path = smollm2_path()
    model = smollm2_reference(path).to(torch.bfloat16).float().cuda()
    questions = [
        "How do plants grow?",
        "What is the capital of Japan?",
        "Give me a tip for sleeping well.",
        "Why is the sky blue?",
    ]
    names = [name for name in ADAPTERS for _ in questions]
    with Engine(
        path, adapters=ADAPTERS, max_batch_size=64, max_seq_len=512, max_loras=len(ADAPTERS)
    ) as engine:
        prompts = [
            engine.tokenizer.apply_chat_template([{"role": "user", "content": question}])
            for question in questions
        ]
        prompts = prompts * (2 * len(ADAPTERS))
        names += [None] * len(names)
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=0)
        outputs = engine.generate(prompts, params, names)
    check_statistic(Oracle(model, ADAPTERS), outputs)
