"""Requests by every way there is: generate, stream, add_request with step, abort."""

import threading

import numpy as np
import pytest
import torch

from engine import RequestError, SamplingParams, UnknownAdapterError
from tests.api_engine import (
    MAX_SEQ_LEN,
    PROMPTS,
    greedy,
    ids,
    run,
)
from tests.tiny_tokenizer import BOS, EOS

# generate


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ba", ["ba"]),
        ([5, 6], [[5, 6]]),
        ((5, 6), [[5, 6]]),
        (torch.tensor([5, 6]), [[5, 6]]),
        (np.array([5, 6]), [[5, 6]]),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        ([np.int64(5), 6], [[5, 6]]),
        (["ba"], ["ba"]),
        (["ba", "do"], ["ba", "do"]),
        ([[5, 6], "do", (7,)], [[5, 6], "do", [7]]),
        ([], []),
    ],
)
def test_generate_takes_one_prompt_or_several(engine, prompts, expected):
    outputs = engine.generate(prompts, greedy(2))
    for output, prompt in zip(outputs, expected, strict=True):
        if isinstance(prompt, str):
            assert output.prompt == prompt
            assert output.prompt_token_ids == engine.tokenizer.encode(prompt)
            assert output.prompt_token_ids[0] == BOS
        else:
            assert output.prompt is None
            assert output.prompt_token_ids == prompt
        assert len(output.outputs[0].token_ids) == 2


def test_generate_keeps_the_order_of_prompts_that_end_in_another(engine):
    params = [greedy(9), greedy(1), greedy(4)]
    outputs = engine.generate(PROMPTS, params)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [len(tokens) for tokens in ids(outputs)] == [9, 1, 4]
    assert all(output.finished and output.error is None for output in outputs)
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert len({output.request_id for output in outputs}) == 3


@pytest.mark.parametrize(
    ("adapters", "expected"),
    [
        (["a", None, "b"], ["a", None, "b"]),
        ("b", ["b", "b", "b"]),
        (None, [None, None, None]),
        ((None, None, "a"), [None, None, "a"]),
    ],
)
def test_generate_gives_each_prompt_its_adapter(engine, oracle, adapters, expected):
    outputs = engine.generate(PROMPTS, greedy(4, logprobs=5), adapters=adapters)
    assert [output.adapter for output in outputs] == expected
    for output in outputs:
        oracle.check(output)


def test_parameters_default_to_those_of_sampling_params(engine):
    for params in (None, [None, SamplingParams(), None]):
        outputs = engine.generate(PROMPTS, params)
        assert all(len(tokens) == 16 or tokens[-1] == EOS for tokens in ids(outputs))
        assert ids(outputs) == ids(engine.generate(PROMPTS, SamplingParams()))


def test_progress_counts_finished_requests(engine, capsys):
    engine.generate(PROMPTS, greedy(2), progress=True)
    assert "3/3" in capsys.readouterr().err
    engine.generate(PROMPTS, greedy(2))
    assert capsys.readouterr().err == ""


def test_generate_checks_all_before_it_admits_any(engine):
    before = engine.stats()
    with pytest.raises(RequestError, match=r"prompts\[2\]"):
        engine.generate([[5], [6], [10_000]], greedy())
    with pytest.raises(UnknownAdapterError, match="'c'"):
        engine.generate([[5], [6]], greedy(), adapters=["a", "c"])
    assert not engine.has_unfinished()
    assert engine.stats() == before


def test_generate_that_is_interrupted_leaves_nothing_running(engine, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    for target, name in ((engine.runner, "launch"), (engine._loop, "admit")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPTS, greedy())
        assert not engine.has_unfinished()
        assert run(engine) == []


# stream


def test_stream_yields_all_so_far(engine):
    outputs = list(engine.stream([5, 6, 7], greedy(7), "a"))
    final = engine.generate([5, 6, 7], greedy(7), "a")[0]
    assert [len(tokens) for tokens in ids(outputs)] == list(range(1, 8))
    for output in outputs:
        tokens = output.outputs[0].token_ids
        assert tokens == final.outputs[0].token_ids[: len(tokens)]
        assert output.finished == (output is outputs[-1])
        assert output.adapter == "a"
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert outputs[0].outputs[0].finish_reason is None


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("leave", ["close", "drop"])
def test_leaving_a_stream_aborts_it(engine, steps, leave):
    outputs = engine.stream([5, 6, 7], greedy(50), "a")
    for _ in range(steps):
        next(outputs)
    assert engine.adapters()[0].requests == 1
    if leave == "close":
        outputs.close()
    else:
        del outputs
    assert engine.adapters()[0].requests == 0
    assert run(engine) == []  # no output of a request that nobody knows


def test_a_stream_dropped_in_the_middle_of_a_step_ends_after_it(engine, monkeypatch):
    streams = [engine.stream([5, 6, 7], greedy(50), "a")]
    launch = engine.runner.launch

    def drop_then_launch(plan):
        streams.clear()  # as the garbage collector may
        return launch(plan)

    request_id = engine.add_request([9, 8], greedy(3))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "launch", drop_then_launch)
        outputs = run(engine)
    assert {output.request_id for output in outputs} == {request_id}
    assert len(outputs[-1].outputs[0].token_ids) == 3


def test_stream_checks_before_its_first_output(engine):
    with pytest.raises(RequestError, match="token id 600"):
        engine.stream([600])


def test_two_streams_interleave(engine):
    both = [engine.stream(prompt, greedy(5)) for prompt in PROMPTS[:2]]
    last = [None, None]
    for _ in range(5):
        last = [next(outputs) for outputs in both]
    assert ids(last) == ids(engine.generate(PROMPTS[:2], greedy(5)))
    assert all(output.finished for output in last)
    assert [list(outputs) for outputs in both] == [[], []]


# add_request, step, abort


def test_step_returns_the_requests_that_advanced(engine):
    assert not engine.has_unfinished()
    first = engine.add_request(PROMPTS[0], greedy(4))
    second = engine.add_request(PROMPTS[1], greedy(2), "b", request_id="mine")
    assert second == "mine"
    assert first != second
    assert engine.has_unfinished()
    outputs = run(engine)
    assert engine.step() == []
    for name, count in ((first, 4), (second, 2)):
        own = [output for output in outputs if output.request_id == name]
        assert [len(tokens) for tokens in ids(own)] == list(range(1, count + 1))
        assert [output.finished for output in own] == [False] * (count - 1) + [True]
    together = engine.generate(PROMPTS[:2], [greedy(4), greedy(2)], [None, "b"])
    finished = {output.request_id: output for output in outputs if output.finished}
    assert ids([finished[first], finished[second]]) == ids(together)


def test_an_output_is_a_copy(engine):
    engine.add_request([5, 6], greedy(5, logprobs=1))
    outputs = run(engine)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5]
    assert [len(output.outputs[0].logprobs) for output in outputs] == [1, 2, 3, 4, 5]
    assert outputs[0].metrics.finished_time is None
    assert outputs[-1].metrics.finished_time is not None


def test_a_request_does_not_see_what_its_caller_changes_later(engine):
    prompt, stops, bias = [5, 6], [3], {7: 50.0}
    engine.add_request(prompt, greedy(3, stop_token_ids=stops, logit_bias=bias))
    prompt.append(10_000)
    stops.append(7)
    bias.clear()
    bias[10_000] = 1.0
    output = run(engine)[-1]
    assert output.prompt_token_ids == [5, 6]
    assert output.outputs[0].token_ids == [7, 7, 7]


def test_abort_of_a_running_request(engine):
    request_id = engine.add_request([5, 6], greedy(50), "a")
    other = engine.add_request([7], greedy(6))
    for _ in range(4):
        engine.step()
    assert engine.abort(request_id) is True
    assert engine.abort(request_id) is False
    outputs = run(engine)
    aborted = [output for output in outputs if output.request_id == request_id]
    assert len(aborted) == 1
    assert aborted[0].finished
    assert aborted[0].error is None
    assert aborted[0].outputs[0].finish_reason == "abort"
    assert aborted[0].outputs[0].token_ids == ids(engine.generate([5, 6], greedy(3), "a"))[0]
    survivor = [output for output in outputs if output.request_id == other][-1]
    assert ids([survivor]) == ids(engine.generate([7], greedy(6)))


def test_abort_of_a_waiting_request(engine):
    names = [engine.add_request([5, 6], greedy(4)) for _ in range(7)]  # two more than rows
    engine.step()
    assert engine.abort(names[-1])
    outputs = {output.request_id: output for output in run(engine)}
    assert outputs[names[-1]].outputs[0].token_ids == []
    assert outputs[names[-1]].outputs[0].finish_reason == "abort"
    assert [len(outputs[name].outputs[0].token_ids) for name in names[:-1]] == [4] * 6


@pytest.mark.parametrize("request_id", ["unknown", None, 3])
def test_abort_of_what_does_not_run(engine, request_id):
    assert engine.abort(request_id) is False


def test_outputs_of_other_requests_are_kept_for_the_next_step(engine):
    running = engine.add_request(PROMPTS[0], greedy(40))
    short = engine.add_request(PROMPTS[1], greedy(2))
    mine = engine.generate(PROMPTS[2], greedy(6))[0]
    assert ids(list(engine.stream(PROMPTS[2], greedy(6)))[-1:]) == ids([mine])
    outputs = engine.step()
    assert sorted(output.request_id for output in outputs) == sorted([running, short])
    kept = {output.request_id: output for output in outputs}
    assert kept[short].finished
    assert len(kept[short].outputs[0].token_ids) == 2
    assert len(kept[running].outputs[0].token_ids) > 10
    rest = run(engine)
    assert {output.request_id for output in rest} == {running}
    assert len(rest[-1].outputs[0].token_ids) == 40


def test_a_generated_id_is_none_that_is_in_use(engine):
    following = str(int(engine.add_request([5], greedy(2))) + 1)
    engine.add_request([6], greedy(2), request_id=following)
    third = engine.add_request([7], greedy(2))
    assert len({output.request_id for output in run(engine)}) == 3
    assert third != following


def test_an_aborted_output_is_not_taken_for_another_requests(engine):
    name = str(int(engine.add_request([5], greedy(1))) + 1)
    run(engine)
    engine.add_request([5, 6], greedy(50), request_id=name)
    engine.abort(name)
    output = engine.generate([5, 6], greedy(3))[0]
    assert output.outputs[0].finish_reason == "length"
    assert [o.outputs[0].finish_reason for o in engine.step()] == ["abort"]


def test_an_id_may_be_used_again_after_its_request_ended(engine):
    for _ in range(2):
        engine.add_request([5, 6], greedy(3), request_id="again")
        assert len(run(engine)[-1].outputs[0].token_ids) == 3


def test_threads_may_share_an_engine(engine):
    expected = ids(engine.generate(PROMPTS, greedy(12)))
    results = {}

    def work(index):
        call = engine.generate if index % 2 else lambda *a: list(engine.stream(*a))[-1:]
        results[index] = ids(call(PROMPTS[index % 3], greedy(12)))[0]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results[index] for index in range(6)] == expected + expected


# Lengths and ends


@pytest.mark.parametrize("prompt_tokens", [1, 16, 33, MAX_SEQ_LEN - 1])
def test_prompt_and_max_tokens_may_fill_max_seq_len(engine, oracle, prompt_tokens):
    prompt = [3 + index % 500 for index in range(prompt_tokens)]
    params = greedy(MAX_SEQ_LEN - prompt_tokens, logprobs=0)
    output = engine.generate(prompt, params, "a")[0]
    assert len(output.outputs[0].token_ids) == MAX_SEQ_LEN - prompt_tokens
    assert output.outputs[0].finish_reason == "length"
    assert max(oracle.errors(output)) < 1e-4
    with pytest.raises(RequestError, match=f"max_seq_len={MAX_SEQ_LEN}"):
        engine.generate([*prompt, 5], params)


def test_eos_ends_a_request_unless_it_is_ignored(engine):
    forced = {"temperature": 0, "max_tokens": 5, "logit_bias": {EOS: 100.0}}
    stopped, ignored = engine.generate(
        ["ba", "ba"], [SamplingParams(**forced), SamplingParams(**forced, ignore_eos=True)]
    )
    assert stopped.outputs[0].token_ids == [EOS]
    assert stopped.outputs[0].finish_reason == "stop"
    assert ignored.outputs[0].token_ids == [EOS] * 5
    assert ignored.outputs[0].finish_reason == "length"
    assert stopped.outputs[0].text == ignored.outputs[0].text == ""
