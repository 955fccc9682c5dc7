"""What a request draws and reports, against Hugging Face's logits and rules applied by hand."""

from dataclasses import replace

import pytest
import torch

from engine import Engine, SamplingParams
from engine.request import derived_seed
from kernels.random import gumbel_row_torch
from tests.oracle import Oracle
from tests.random_adapters import save_adapter
from tests.tiny_models import build_model, save_model
from tests.tiny_tokenizer import EOS, save_tokenizer

PROMPT = [1, 40, 41, 42, 300, 7]
LONG = [1] + [3 + 37 * index % 500 for index in range(52)]  # over three chunks
CHUNK = 16
TOLERANCE = 1e-4  # float32 sums in another order than Hugging Face's


@pytest.fixture(scope="module")
def model():
    return build_model("llama")


@pytest.fixture(scope="module")
def paths(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("completions")
    return {
        "model": save_tokenizer(save_model("llama", folder)),
        "a": save_adapter(model, folder / "a", 8, seed=1),
    }


@pytest.fixture(scope="module")
def engine(paths):
    with Engine(
        paths["model"],
        adapters={"a": paths["a"]},
        device="cpu",
        max_batch_size=6,
        max_seq_len=128,
        graph_batch_sizes=[1, 6],
        prefill_chunk_tokens=CHUNK,
        max_lora_rank=8,
        max_loras=1,
        debug=True,
    ) as engine:
        yield engine
        assert not engine.has_unfinished()
        assert engine.stats().kv_pages_used == 0


@pytest.fixture(scope="module")
def oracle(model, paths):
    return Oracle(model, {"a": paths["a"]})


def tokens(output, index=0):
    return output.outputs[index].token_ids


# Draws, by hand


def raw_logits(oracle, adapter, ids):
    with torch.no_grad():
        return oracle.models[adapter](torch.tensor([ids])).logits[0, -1].double()  # [V]


def adjusted(logits, prompt, generated, params, stops):
    """Bias, penalties and banned stops, one token at a time."""
    z = logits.tolist()
    for token, bias in (params.logit_bias or {}).items():
        z[token] += bias
    for token in {*prompt, *generated}:
        penalty = params.repetition_penalty
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    for token in set(generated):
        z[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    if len(generated) < params.min_tokens:
        for token in stops:
            z[token] = float("-inf")
    return torch.tensor(z, dtype=torch.float64)


def truncated(z, params):
    """What top-k, then top-p, then min-p leave of scaled logits."""
    order = z.argsort(descending=True).tolist()
    kept = order[: params.top_k] if params.top_k > 0 else order
    chances = z[kept].softmax(0)
    before = chances.cumsum(0) - chances
    kept = [t for t, mass in zip(kept, before.tolist(), strict=True) if mass < params.top_p]
    chances = z[kept].softmax(0)
    return [t for t, p in zip(kept, chances, strict=True) if p >= params.min_p * chances[0]]


def by_hand(oracle, prompt, params, adapter=None, index=0):
    """The tokens of a completion: the argmax, of what is kept, of z / T plus Gumbel noise."""
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))}
    generated = []
    while len(generated) < params.max_tokens:
        position = len(prompt) + len(generated)
        logits = raw_logits(oracle, adapter, prompt + generated)
        z = adjusted(logits, prompt, generated, params, stops)
        if params.temperature > 0:
            z /= params.temperature
            kept = truncated(z, params)
            score = torch.full_like(z, float("-inf"))
            score[kept] = z[kept]
            z = score + gumbel_row_torch(params.seed, len(z), position, index, z.device)
        best = z.topk(2)
        assert best.values[0] - best.values[1] > 1e-3, "a near tie: choose other numbers"
        generated.append(int(best.indices[0]))
        if generated[-1] in stops:
            break
    return generated


FEW = {40: 12.0, 41: 11.5, 42: 11.0, 350: 10.8, 351: 10.5}  # so that tokens repeat

GREEDY = [
    {},
    {"logit_bias": {400: 5.0, 401: -5.0}},
    {"repetition_penalty": 1.7, "logit_bias": FEW},
    {"repetition_penalty": 0.8},
    {"repetition_penalty": 1.5, "logit_bias": dict.fromkeys(range(515), -20.0)},  # all negative
    {"presence_penalty": 3.0, "logit_bias": FEW},
    {"frequency_penalty": 1.1, "logit_bias": FEW},
    {"min_tokens": 5, "stop_token_ids": [40, 41], "logit_bias": FEW},
    {"stop_token_ids": [42], "logit_bias": {42: 9.0}},
    {"min_tokens": 4, "ignore_eos": False, "logit_bias": {EOS: 60.0}},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.6,
        "frequency_penalty": 0.9,
        "min_tokens": 3,
        "stop_token_ids": [350],
        "logit_bias": FEW,
    },
]
SAMPLED = [
    {},
    {"temperature": 0.4, "top_k": 3},
    {"temperature": 2.0, "top_p": 0.7},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": -5},
    {"temperature": 0.9, "frequency_penalty": 0.8, "logit_bias": FEW, "seed": 2**63 - 1},
]


@pytest.mark.parametrize("rules", GREEDY, ids=lambda rules: ",".join(rules) or "plain")
def test_greedy_matches_the_rules_applied_by_hand(engine, oracle, rules):
    params = SamplingParams(max_tokens=10, temperature=0, **{"ignore_eos": True, **rules})
    other = SamplingParams(presence_penalty=1.0, logit_bias={9: 9.0})
    outputs = engine.generate([LONG, PROMPT, PROMPT], [other, params, other])
    assert tokens(outputs[1]) == by_hand(oracle, PROMPT, params)


@pytest.mark.parametrize("rules", SAMPLED, ids=lambda rules: ",".join(rules) or "plain")
def test_draws_match_the_rules_applied_by_hand(engine, oracle, rules):
    params = SamplingParams(max_tokens=8, ignore_eos=True, n=2, **{"seed": 42, **rules})
    output = engine.generate(PROMPT, params)[0]
    for index in range(2):
        assert tokens(output, index) == by_hand(oracle, PROMPT, params, index=index)


def test_rules_hold_for_an_adapter_after_chunked_prefill(engine, oracle):
    params = SamplingParams(
        max_tokens=8,
        seed=1,
        ignore_eos=True,
        repetition_penalty=1.3,
        frequency_penalty=1.0,
        logit_bias=FEW,
    )
    output = engine.generate(LONG, params, "a")[0]
    assert tokens(output) == by_hand(oracle, LONG, params, "a")


@pytest.mark.parametrize("params", [{"top_p": 1e-30}, {"top_k": 1}, {"temperature": 1e-30}])
def test_the_narrowest_draw_is_greedy(engine, params):
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    narrow = SamplingParams(max_tokens=6, ignore_eos=True, **params)
    first, second = engine.generate([PROMPT] * 2, [greedy, narrow])
    assert tokens(first) == tokens(second)


# Ends


def test_a_stop_token_ends_a_request_and_stays_in_its_ids(engine):
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    full = tokens(engine.generate(PROMPT, params)[0])
    at = next(i for i in range(2, 9) if full[i] not in full[:i])
    stopped = engine.generate(PROMPT, replace(params, stop_token_ids=[514, full[at]]))[0]
    assert tokens(stopped) == full[: at + 1]
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].text == engine.tokenizer.decode(full[: at + 1])


def test_min_tokens_holds_back_eos_and_stop_tokens_alike(engine):
    bias = {EOS: 90.0, 40: 60.0, 41: 30.0}
    params = SamplingParams(
        max_tokens=9, temperature=0, min_tokens=4, stop_token_ids=[40], logit_bias=bias
    )
    output = engine.generate(PROMPT, params)[0]
    assert tokens(output) == [41, 41, 41, 41, EOS]
    assert output.outputs[0].finish_reason == "stop"


def test_stops_that_are_given_hold_with_ignore_eos(engine):
    params = SamplingParams(ignore_eos=True, stop_token_ids=[41], logit_bias={41: 90.0})
    output = engine.generate(PROMPT, params)[0]
    assert tokens(output) == [41]
    assert output.outputs[0].finish_reason == "stop"


# Seeds


SEEDED = [
    SamplingParams(max_tokens=12, seed=42, ignore_eos=True),
    SamplingParams(max_tokens=12, seed=42, ignore_eos=True, temperature=1.3, min_p=0.05),
    SamplingParams(max_tokens=12, seed=42, ignore_eos=True, min_p=0.2),
]


@pytest.mark.parametrize("params", SEEDED)
def test_a_seed_draws_alike_wherever_it_runs(engine, oracle, params):
    alone = tokens(engine.generate(PROMPT, params)[0])
    assert alone == by_hand(oracle, PROMPT, params)
    unseeded = SamplingParams(max_tokens=15, ignore_eos=True)
    prompts = [LONG, PROMPT, [9, 8], PROMPT, [7]]
    each = [unseeded, params, unseeded, params, unseeded]
    outputs = engine.generate(prompts, each, adapters=["a", None, None, None, "a"])
    assert tokens(outputs[1]) == alone
    assert tokens(outputs[3]) == alone
    assert tokens(outputs[2]) != alone
    outputs = engine.generate([PROMPT, LONG], [params, unseeded], adapters=[None, "a"])
    assert tokens(outputs[0]) == alone
    assert tokens(engine.generate(PROMPT, replace(params, seed=43))[0]) != alone


def test_requests_without_a_seed_draw_by_their_order(engine, paths):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [PROMPT] * 3
    first = [tokens(output) for output in engine.generate(prompts, params)]
    assert len(set(map(tuple, first))) == 3
    assert [tokens(output) for output in engine.generate(prompts, params)] == first
    abandoned = engine.add_request(PROMPT, params)
    engine.step()
    engine.abort(abandoned)
    assert [tokens(output) for output in engine.generate(prompts, params)] == first
    engine.step()
    sizes = {"max_batch_size": 3, "max_seq_len": 32, "max_loras": 0, "prefill_chunk_tokens": 16}
    with Engine(paths["model"], device="cpu", graphs="off", seed=7, **sizes) as other:
        seventh = [tokens(output) for output in other.generate(prompts, params)]
    assert all(a != b for a, b in zip(first, seventh, strict=True))
    given = [replace(params, seed=derived_seed(7, order)) for order in range(3)]
    assert [tokens(output) for output in engine.generate(prompts, given)] == seventh


# n


@pytest.mark.parametrize("n", [2, 8])  # more than there are rows, too
def test_n_completions_are_draws_of_their_own(engine, oracle, n):
    params = SamplingParams(n=n, max_tokens=6, seed=5, ignore_eos=True, logprobs=2)
    output = engine.generate(LONG, params, "a")[0]
    assert [completion.index for completion in output.outputs] == list(range(n))
    drawn = [tuple(completion.token_ids) for completion in output.outputs]
    assert len(set(drawn)) == n
    assert all(len(ids) == 6 for ids in drawn)
    assert max(oracle.errors(output)) < TOLERANCE
    one = engine.generate(LONG, replace(params, n=1), "a")[0]
    assert tuple(tokens(one)) == drawn[0]
    assert list(drawn[1]) == by_hand(oracle, LONG, params, "a", index=1)


def test_a_request_is_finished_when_all_its_completions_are(engine):
    bias = {EOS: 8.0}  # some end early
    params = SamplingParams(n=4, max_tokens=20, seed=3, logit_bias=bias, logprobs=0)
    name = engine.add_request(PROMPT, params)
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {name}
    last = outputs[-1]
    lengths = [len(completion.token_ids) for completion in last.outputs]
    assert len(set(lengths)) > 1
    for completion in last.outputs:
        ended = completion.token_ids[-1] == EOS
        assert completion.finish_reason == ("stop" if ended else "length")
        assert len(completion.logprobs) == len(completion.token_ids)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(outputs) == max(lengths)


def test_greedy_completions_are_equal(engine):
    params = SamplingParams(n=3, max_tokens=6, temperature=0, ignore_eos=True)
    output = engine.generate(PROMPT, params)[0]
    assert tokens(output, 0) == tokens(output, 1) == tokens(output, 2)


# Logprobs


@pytest.mark.parametrize("count", [0, 1, 20])
def test_logprobs_are_the_models_own_whatever_the_draw(engine, oracle, count):
    params = SamplingParams(
        max_tokens=6,
        temperature=1.7,
        min_p=0.01,
        seed=2,
        presence_penalty=1.0,
        logit_bias={40: 6.0},
        ignore_eos=True,
        logprobs=count,
    )
    outputs = engine.generate([PROMPT, LONG], params, [None, "a"])
    for output in outputs:
        assert max(oracle.errors(output)) < TOLERANCE
        completion = output.outputs[0]
        prompt = output.prompt_token_ids
        reference = oracle.logprobs(output.adapter, prompt + completion.token_ids)
        for at, (token, row) in enumerate(
            zip(completion.token_ids, completion.logprobs, strict=True)
        ):
            top = reference[len(prompt) - 1 + at].topk(count).indices.tolist() if count else []
            assert set(row) == {token, *top}
        chosen = [
            row[token] for token, row in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-9)


def test_logprobs_are_none_unless_asked_for(engine):
    output = engine.generate(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))[0]
    assert output.outputs[0].logprobs is None
    assert output.prompt_logprobs is None
    assert output.outputs[0].cumulative_logprob < 0


def check_prompt_logprobs(oracle, output, count):
    ids = output.prompt_token_ids
    assert len(output.prompt_logprobs) == len(ids)
    assert output.prompt_logprobs[0] is None
    reference = oracle.logprobs(output.adapter, ids)
    for at in range(1, len(ids)):
        row = output.prompt_logprobs[at]
        top = reference[at - 1].topk(count).indices.tolist() if count else []
        assert set(row) == {ids[at], *top}
        worst = max(abs(reference[at - 1][token].item() - value) for token, value in row.items())
        assert worst < TOLERANCE


@pytest.mark.parametrize(("count", "n"), [(0, 1), (3, 2), (20, 1)])
def test_prompt_logprobs(engine, oracle, count, n):
    params = SamplingParams(max_tokens=2, prompt_logprobs=count, n=n, seed=1)
    prompts = [LONG, [5], PROMPT, LONG[:CHUNK], LONG[: CHUNK + 1]]
    for output in engine.generate(prompts, params, ["a", None, None, "a", None]):
        check_prompt_logprobs(oracle, output, count)


def test_prompt_logprobs_leave_running_requests_alone(engine, oracle):
    """Scoring reads back many blocks while results of the step before are still unread."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=3)
    names = [engine.add_request([5 + row, 6, 7], params, "a") for row in range(2)]
    outputs = {output.request_id: output for _ in range(3) for output in engine.step()}
    scored = SamplingParams(max_tokens=1, prompt_logprobs=2, temperature=0)
    names += [engine.add_request(LONG, scored), engine.add_request(LONG[::-1], scored)]
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    for name in names[:2]:
        assert len(tokens(outputs[name])) == 24
        assert max(oracle.errors(outputs[name])) < TOLERANCE
    for name in names[2:]:
        check_prompt_logprobs(oracle, outputs[name], 2)


def test_the_first_streamed_output_has_all_prompt_logprobs(engine, oracle):
    params = SamplingParams(max_tokens=3, prompt_logprobs=1, ignore_eos=True)
    for output in engine.stream(LONG, params):
        check_prompt_logprobs(oracle, output, 1)


# Metrics


def test_metrics_are_in_order(engine):
    outputs = engine.generate([PROMPT] * 8, SamplingParams(max_tokens=4, ignore_eos=True))
    for output in outputs:
        metrics = output.metrics
        assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
        assert metrics.preemptions == 0
    assert outputs[-1].metrics.first_token_time > outputs[0].metrics.finished_time  # 6 rows
