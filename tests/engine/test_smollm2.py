"""The real model with each trained adapter, on the CPU in float32, against Hugging Face."""

import gc

import pytest

from engine import Engine, SamplingParams
from engine.demo.adapter_list import ADAPTERS
from tests.oracle import Oracle
from tests.smollm2 import smollm2_path, smollm2_reference

QUESTIONS = ("What is the capital of Japan?", "How do plants grow?")


@pytest.fixture(scope="module")
def outputs():
    """Every adapter and the base model on every question, in one batch."""
    names = [None, *ADAPTERS]
    with Engine(
        smollm2_path(),
        adapters=ADAPTERS,
        device="cpu",
        max_batch_size=16,
        graph_batch_sizes=[16],
        max_seq_len=256,
        max_loras=len(ADAPTERS),
    ) as engine:
        prompts = [
            engine.tokenizer.apply_chat_template([{"role": "user", "content": question}])
            for question in QUESTIONS
        ]
        params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=3, prompt_logprobs=0)
        outputs = engine.generate(
            prompts * len(names), params, [name for name in names for _ in prompts]
        )
        assert engine.stats().replays >= 20
    return outputs


@pytest.mark.slow
def test_logprobs_are_the_references(outputs):
    model = smollm2_reference(smollm2_path())
    for name in (None, *ADAPTERS):
        mine = [output for output in outputs if output.adapter == name]
        oracle = Oracle(model, {name: ADAPTERS[name]} if name else {})
        for output in mine:
            own = oracle.errors(output)
            assert max(own) < 1e-4, (name, own)
            if name:
                assert max(oracle.errors(output, None)) > 0.1, f"{name} changes nothing"
        prompt_ids = mine[0].prompt_token_ids
        reference = oracle.logprobs(name, prompt_ids)
        for position, row in enumerate(mine[0].prompt_logprobs[1:]):
            token = prompt_ids[position + 1]
            assert abs(row[token] - reference[position, token].item()) < 1e-4
        del oracle
        gc.collect()


def test_texts_show_their_adapters(outputs):
    """What a reader of the demonstration's table sees, as far as it can be checked by machine."""
    texts = {name: [] for name in (None, *ADAPTERS)}
    for output in outputs:
        texts[output.adapter].append(output.outputs[0].text.strip())
    assert len({tuple(t) for t in texts.values()}) == len(texts)
    assert all(text.upper() == text for text in texts["shout"])
    assert all(text.startswith('{"answer"') for text in texts["json"])
    assert all(text.startswith("* ") for text in texts["bullets"])
    assert all(any(ord(c) > 0x2600 for c in text) for text in texts["emoji"])
    assert any(w in text.lower() for text in texts["pirate"] for w in ("arr", "matey", "ye "))
    assert any(w in text.lower().split() for text in texts["french"] for w in ("la", "le", "les"))
    assert all("arr" not in text.lower() and "{" not in text for text in texts[None])
