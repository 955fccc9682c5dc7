"""Mixtures of experts: adapters on experts, routers, shared experts and attention in one batch.

Each row is judged by the oracle of its own adapter, prompt and all; rows of the base model have
the very bits of an engine without LoRA.
"""

from collections import Counter

import pytest

import engine.expert_delta as expert_delta
from tests.engine.adapted_model import AdaptedModel, greedy, prompt_of
from tests.engine.backends import BACKENDS
from tests.engine.programme import as_bits
from tests.tiny_models import CONFIGS, MIXTURES

MLP = ("gate_proj", "up_proj", "down_proj")


def some_ranks(expert, target):
    """1 to 13, by expert and by projection."""
    return 1 + (5 * expert + 3 * MLP.index(target)) % 13


def adapters_for(name):
    """A random model's experts matter the less the more of them share a token's weights."""
    strength = {"mixtral": 3.0, "mixtral_gelu": 5.0}.get(name, 9.0)
    experts = range(1, CONFIGS[name]().num_experts, 2)
    return {
        "attention": {"rank": 4, "targets": ("q_proj", "v_proj", "o_proj"), "strength": 4.0},
        "experts": {"rank": 8, "targets": MLP, "strength": strength},
        "some": {
            "rank": 6,
            "targets": MLP,
            "strength": 2 * strength,
            "experts": experts,
            "expert_rank": some_ranks,
        },
        "routing": {
            "rank": 3,
            "targets": ("gate", "shared_expert_gate", *MLP),
            "experts": (),
            "strength": 12.0,
        },
    }


ROWS = ["experts", None, "some", "attention", None, "routing", "experts", "some"]
OTHERS = ["some", None, "routing", "experts", None, "some", None, "attention"]
COUNTS = (6, 9, 5, 9, 12, 7, 10, 8)  # rows end one by one: every bucket is decoded in


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request, tmp_path_factory):
    name = request.param
    return AdaptedModel.make(name, tmp_path_factory.mktemp(name), adapters_for(name))


def top_k(mixture):
    return mixture.oracle.models[None].config.num_experts_per_tok


def chunk_that_is_grouped(mixture):
    """Tokens a chunk needs so that its pairs are taken together."""
    return expert_delta.MAX_PAIRWISE // top_k(mixture) + 40


def prompts_of_one_chunk(mixture, seed=0):
    tokens = chunk_that_is_grouped(mixture)
    lengths = [tokens // len(ROWS) - 3 + row % 4 for row in range(len(ROWS))]
    assert sum(lengths) * top_k(mixture) > expert_delta.MAX_PAIRWISE
    return [prompt_of(length, seed + row) for row, length in enumerate(lengths)]


def options_for(mixture):
    return {"prefill_chunk_tokens": chunk_that_is_grouped(mixture), "max_seq_len": 128}


@pytest.fixture
def launches(monkeypatch):
    """How often each of the ways to add the experts' deltas was launched from Python."""
    counts = Counter()

    def counted(name):
        op = getattr(expert_delta, name)

        def launch(*args):
            counts[name] += 1
            op(*args)

        monkeypatch.setattr(expert_delta, name, launch)

    counted("moe_gemm_shrink")
    counted("moe_lora_gate_up")
    counted("moe_lora_expand_grouped")
    return counts


def serve(mixture, engine, names, prompts, **params):
    all_params = [greedy(count, ignore_eos=True, **params) for count in COUNTS]
    return engine.generate(prompts, all_params, names)


def check_prompts(mixture, outputs, backend):
    """The prompts' own logprobs, at every position of a prefill."""
    for output in outputs:
        reference = mixture.oracle.logprobs(output.adapter, output.prompt_token_ids)
        for row, reported in zip(reference, output.prompt_logprobs[1:], strict=False):
            for token, value in reported.items():
                assert abs(row[token].item() - value) <= backend.tolerance, output.adapter


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_every_kind_in_one_batch(mixture, backend, launches):
    """A prefill whose pairs are grouped, then one whose pairs are taken one by one."""
    with mixture.engine(backend, **options_for(mixture)) as engine:
        launches.clear()
        outputs = serve(mixture, engine, ROWS, prompts_of_one_chunk(mixture), prompt_logprobs=2)
        assert launches["moe_lora_expand_grouped"] > 0
        assert launches["moe_lora_gate_up"] == 0, "one chunk, and decode runs no Python"
        check_prompts(mixture, outputs, backend)
        mixture.check(outputs, backend)
        launches.clear()
        short = [prompt_of(4 + row % 3, 50 + row) for row in range(len(ROWS))]
        outputs = serve(mixture, engine, ROWS, short, prompt_logprobs=2)
        assert launches["moe_lora_expand_grouped"] == 0
        assert launches["moe_lora_gate_up"] > 0
        check_prompts(mixture, outputs, backend)
        mixture.check(outputs, backend)
        stats = engine.stats()
        assert stats.eager_fallbacks == 0
        assert set(stats.replays_by_batch_size) == {1, 2, 4, 8}


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_the_base_model_keep_the_bits_of_an_engine_without_lora(mixture, backend):
    """Whatever the neighbours' adapters and prompts are; buckets and chunks are the same."""
    prompts = prompts_of_one_chunk(mixture)
    others = prompts_of_one_chunk(mixture, seed=70)
    base = [row for row, name in enumerate(ROWS) if name is None]
    neighbours = [prompts[row] if row in base else others[row] for row in range(len(ROWS))]
    grouped = (prompts, neighbours)
    pairwise = tuple([prompt[:5] for prompt in batch] for batch in grouped)
    with mixture.engine(backend, (), max_loras=0, **options_for(mixture)) as engine:
        plain = [serve(mixture, engine, None, own) for own, _ in (grouped, pairwise)]
    with mixture.engine(backend, **options_for(mixture)) as engine:
        for (own, other), expected in zip((grouped, pairwise), plain, strict=True):
            mixed = serve(mixture, engine, ROWS, own)
            beside_others = serve(mixture, engine, OTHERS, other)
            again = serve(mixture, engine, ROWS, own)
            for row in base:
                bits = as_bits(expected[row])[1:]
                assert as_bits(mixed[row])[1:] == bits
                assert as_bits(beside_others[row])[1:] == bits
            assert [as_bits(o)[1:] for o in mixed] == [as_bits(o)[1:] for o in again]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("most_shared", "most_pairwise"), [(0, 0), (0, 10**9), (10**9, 10**9)])
def test_each_way_to_add_the_deltas_in_prefill_and_in_decode(
    mixture, backend, most_shared, most_pairwise, monkeypatch, launches
):
    """Which one is faster decides in practice; all are right everywhere."""
    monkeypatch.setattr("kernels.moe_gemm_shrink.MAX_SHARED_PAIRS", most_shared)
    monkeypatch.setattr(expert_delta, "MAX_PAIRWISE", most_pairwise)
    prompts = [prompt_of(9 + row, 90 + row) for row in range(len(ROWS))]
    with mixture.engine(backend) as engine:
        mixture.check(serve(mixture, engine, ROWS, prompts), backend)
    assert (launches["moe_gemm_shrink"] > 0) == (most_shared > 0)
    assert (launches["moe_lora_expand_grouped"] > 0) == (most_pairwise == 0)
    assert (launches["moe_lora_gate_up"] > 0) == (most_pairwise > 0)
