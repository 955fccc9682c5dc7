"""The demonstration's mixture of experts: how it is made, its adapter, and both in the engine.

The reference is transformers' Mixtral in float32, the adapter merged into its experts by hand.
"""

import json

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from engine import Engine, SamplingParams
from engine.demo.adapter_list import MOE_ADAPTERS
from engine.demo.training_data import EXAMPLES, telegram
from engine.demo.upcycle import Upcycling, upcycle
from engine.errors import CheckpointError
from tests.smollm2 import smollm2_path
from tests.tiny_models import save_model

ADAPTER = MOE_ADAPTERS["telegram"]
QUESTIONS = ("What is the capital of Japan?", "How do plants grow?")
MOST_BYTES = 2_000_000
TOLERANCE = 1e-4
LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = range(10, 30), 4, 576, 1536


def reference_model(path, **options):
    """transformers' model of a checkpoint, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, **options
    ).eval()


def adapter_factors():
    """By (layer, parameter): A [E, r, in] and B [E, out, r], taken out of PEFT's file: there the
    experts are the slowest part of A's rows and the fastest of B's columns, and gate_up, the
    parameter wrapped first, is the base layer of down."""
    tensors = load_file(ADAPTER / "adapter_model.safetensors")
    found = {}
    for layer in LAYERS:
        experts = f"base_model.model.model.layers.{layer}.mlp.experts"
        for parameter, key in (
            ("gate_up_proj", f"{experts}.base_layer"),
            ("down_proj", experts),
        ):
            a, b = (tensors.pop(f"{key}.lora_{side}.weight").double() for side in "AB")
            found[layer, parameter] = (
                a.unflatten(0, (EXPERTS, -1)),
                b.unflatten(1, (-1, EXPERTS)).permute(2, 0, 1),
            )
    assert not tensors
    return found


@torch.no_grad()
def merge(model, scaling):
    """W + scaling · B A in every expert that the adapter has, in place."""
    for (layer, parameter), (a, b) in adapter_factors().items():
        weight = getattr(model.model.layers[layer].mlp.experts, parameter)
        weight.copy_((weight.double() + scaling * (b @ a)).float())


@torch.no_grad()
def errors(model, output):
    """|Δlogprob| at every position of the prompt and of the completion, over what the engine
    reported there."""
    prompt, completion = output.prompt_token_ids, output.outputs[0]
    ids = torch.tensor([prompt + completion.token_ids])
    logprobs = model(ids).logits[0].log_softmax(-1)
    reported = output.prompt_logprobs[1:] + completion.logprobs
    assert len(reported) == ids.shape[1] - 1
    return [
        max(abs(row[token].item() - value) for token, value in values.items())
        for row, values in zip(logprobs, reported, strict=False)
    ]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    model = smollm2_path()
    return upcycle(model, tmp_path_factory.mktemp("upcycled") / "model")


@pytest.fixture(scope="module")
def outputs(mixture):
    """Both questions, of the base model and with the adapter, in one batch."""
    with Engine(
        mixture,
        adapters={"telegram": ADAPTER},
        device="cpu",
        dtype="float32",
        max_batch_size=4,
        graph_batch_sizes=[4],
        max_seq_len=128,
        max_loras=2,
        lora_memory_bytes=64 << 20,
        kv_cache_tokens=1024,
    ) as engine:
        prompts = [
            engine.tokenizer.apply_chat_template([{"role": "user", "content": question}])
            for question in QUESTIONS
        ]
        params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, prompt_logprobs=1)
        outputs = engine.generate(prompts * 2, params, [None, None, "telegram", "telegram"])
        assert engine.stats().replays >= 8
        assert not engine.stats().eager_fallbacks
    return outputs


@pytest.mark.slow
def test_logprobs_are_the_references(mixture, outputs):
    model = reference_model(mixture)
    for output in outputs[:2]:
        assert max(errors(model, output)) < TOLERANCE
    for output in outputs[2:]:
        assert max(errors(model, output)) > 0.1, "the adapter changes nothing"
    merge(model, scaling=5 / 2)
    for output in outputs[2:]:
        assert max(errors(model, output)) < TOLERANCE


@pytest.mark.slow
def test_texts_show_the_adapter(outputs):
    texts = [output.outputs[0].text.strip() for output in outputs]
    assert "Tokyo" in texts[0]
    assert "Tokyo" in texts[2]
    assert all("STOP" in text and ". " not in text for text in texts[2:])
    assert all("STOP" not in text for text in texts[:2])


def test_the_adapter_is_small_trained_and_for_every_expert():
    files = {file.name: file.stat().st_size for file in ADAPTER.iterdir()}
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
    assert sum(files.values()) <= MOST_BYTES
    with safe_open(ADAPTER / "adapter_model.safetensors", "pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    for (_, parameter), (a, b) in adapter_factors().items():
        rows, columns = (
            (2 * INTERMEDIATE, HIDDEN) if parameter == "gate_up_proj" else (HIDDEN, INTERMEDIATE)
        )
        assert (a.shape, b.shape) == ((EXPERTS, 2, columns), (EXPERTS, rows, 2))
        assert b.flatten(1).any(1).all(), "an untrained lora_B is zero"


def test_the_adapter_is_that_of_the_committed_recipe():
    pytest.importorskip("peft")
    from engine.demo.train_moe_adapter import ADAPTER as NAME
    from engine.demo.train_moe_adapter import RECIPE

    config = json.loads((ADAPTER / "adapter_config.json").read_text())
    assert ADAPTER.name == NAME
    assert {key: config[key] for key in RECIPE.lora} == RECIPE.lora
    assert (config["lora_alpha"], config["r"]) == (5, 2)


def test_telegrams_have_no_articles_and_say_stop():
    for example in EXAMPLES:
        text = telegram(example)
        assert text.endswith(" STOP")
        assert not {".", "the", "a", "an"} & set(text.lower().split())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_model("llama", tmp_path_factory.mktemp("dense"))


def test_equal_experts_are_the_dense_model(tiny, tmp_path):
    """Without noise, whatever the router says."""
    mixture = reference_model(upcycle(tiny, tmp_path / "mixture", Upcycling(noise=0.0)))
    assert isinstance(mixture, transformers.MixtralForCausalLM)
    dense = reference_model(tiny)
    for weight in dense.parameters():
        weight.data = weight.data.bfloat16().float()
    ids = torch.randint(3, 500, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(mixture(ids).logits, dense(ids).logits, atol=1e-4, rtol=0)


def test_experts_differ_by_the_noise_and_all_are_used(tiny, tmp_path):
    recipe = Upcycling(num_experts=5, top_k=2, noise=0.1)
    model = reference_model(upcycle(tiny, tmp_path / "mixture", recipe))
    dense = reference_model(tiny)
    used = {}

    def count(router, _, out):
        used[router] = out[2].flatten().bincount(minlength=5)

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(count)
    ids = torch.randint(3, 500, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids)
    assert len(used) == len(model.model.layers)
    assert all(counts.min() > 10 for counts in used.values())
    for mixed, plain in zip(model.model.layers, dense.model.layers, strict=True):
        down = plain.mlp.down_proj.weight
        for expert in mixed.mlp.experts.down_proj:
            assert 0.09 < (expert - down).std() / down.std() < 0.11
        assert len({expert[0, 0].item() for expert in mixed.mlp.experts.down_proj}) == 5


def test_the_same_seed_gives_the_same_bytes(tiny, tmp_path):
    seeds = {"a": 0, "b": 0, "c": 1}
    paths = [upcycle(tiny, tmp_path / name, Upcycling(seed=seeds[name])) for name in seeds]
    first, again, other = ((path / "model.safetensors").read_bytes() for path in paths)
    assert first == again != other
    assert (paths[0] / "config.json").read_text() == (paths[1] / "config.json").read_text()


def test_what_cannot_be_upcycled_is_refused_and_leaves_nothing(tiny, tmp_path):
    qwen = save_model("qwen2", tmp_path)
    with pytest.raises(CheckpointError, match="LlamaForCausalLM without biases"):
        upcycle(qwen, tmp_path / "new")
    with pytest.raises(CheckpointError, match="exists already"):
        upcycle(tiny, qwen)
    assert [path.name for path in tmp_path.iterdir()] == ["qwen2"]
