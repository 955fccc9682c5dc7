"""What breaks one request ends it alone, with its error; the others go on and lose nothing."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from engine import Engine, EngineError, SamplingParams
from engine.tokenizer import Tokenizer, load_tokenizer
from tests.api_engine import PROMPTS, SIZES, greedy, ids, run


def break_launches_of(engine, monkeypatch, culprit: str) -> None:
    """Every launch that holds a row of `culprit` raises, as a kernel's refusal would."""
    launch = engine.runner.launch

    def refuse(plan):
        sequences = [*plan.admitted, *plan.decode, *(chunk.sequence for chunk in plan.prefill)]
        if any(sequence.request.request_id == culprit for sequence in sequences):
            raise RuntimeError("no kernel for this")
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", refuse)


def test_a_request_that_no_launch_takes_ends_alone(engine, oracle, monkeypatch):
    params = greedy(8, logprobs=1)
    alone = engine.generate(PROMPTS, params, ["a", None, "b"])
    break_launches_of(engine, monkeypatch, "bad")
    names = [engine.add_request(PROMPTS[0], params, "a")]
    engine.step()
    engine.add_request([5, 6], params, request_id="bad")
    names += [engine.add_request(PROMPTS[1], params), engine.add_request(PROMPTS[2], params, "b")]
    outputs = {output.request_id: output for output in run(engine)}
    assert isinstance(outputs["bad"].error, EngineError)
    assert "bad" in str(outputs["bad"].error)
    assert "no kernel for this" in str(outputs["bad"].error)
    assert outputs["bad"].outputs[0].finish_reason == "abort"
    for name, expected in zip(names, alone, strict=True):
        assert outputs[name].error is None
        assert ids([outputs[name]]) == ids([expected])
        oracle.check(outputs[name])


def test_text_that_cannot_be_decoded_ends_its_request_alone(paths, oracle):
    class Fragile(Tokenizer):
        calls = 0

        def decode(self, token_ids):
            Fragile.calls += 1
            if Fragile.calls == 9:
                raise ValueError("no such token")
            return super().decode(token_ids)

    tokenizer = Fragile(load_tokenizer(paths["model"]).hf)
    with Engine(paths["model"], tokenizer=tokenizer, **SIZES) as engine:
        params = greedy(10, logprobs=0)
        outputs = engine.generate(PROMPTS, params)
    broken = [output for output in outputs if output.error is not None]
    assert len(broken) == 1
    assert "no such token" in str(broken[0].error)
    for output in outputs:
        if output.error is None:
            assert len(output.outputs[0].token_ids) == 10
            assert max(oracle.errors(output)) < 1e-4


def test_an_interrupt_between_reads_loses_no_token(engine, monkeypatch):
    params = greedy(9)
    expected = ids(engine.generate(PROMPTS, params, ["a", None, "b"]))
    names = [
        engine.add_request(prompt, params, adapter)
        for prompt, adapter in zip(PROMPTS, ["a", None, "b"], strict=True)
    ]
    for _ in range(3):
        engine.step()
    take, calls = engine._loop._take, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        take(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine._loop, "_take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    outputs = {output.request_id: output for output in run(engine)}
    assert [ids([outputs[name]])[0] for name in names] == expected


def test_an_interrupt_of_an_upload_is_no_reason_to_leave_out_the_next(engine, monkeypatch):
    params = greedy(6)
    expected = ids(engine.generate(PROMPTS[:2], params))
    runner = engine.runner
    buffers, staging = runner.memory.step_buffers(1), runner.memory.staging
    first, second = (SimpleNamespace(slot=slot) for slot in range(2))
    upload = staging.upload

    def interrupted(*arguments):
        upload(*arguments)
        raise KeyboardInterrupt

    runner._stage(buffers, [first])
    with monkeypatch.context() as patch:
        patch.setattr(staging, "upload", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner._stage(buffers, [second])
    runner._stage(buffers, [first])
    assert buffers.row_request.tolist() == [0]
    assert ids(engine.generate(PROMPTS[:2], params)) == expected


@pytest.mark.parametrize("error", [RuntimeError("no kernel for this"), KeyboardInterrupt()])
@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_what_follows_a_launch_that_broke_off_waits_for_its_branch(
    engine, monkeypatch, part, error
):
    params = greedy(6)
    expected = ids(engine.generate(PROMPTS, params, ["a", None, "b"]))
    calls, runner = [], engine.runner
    target, name = (runner.prefill, "run") if part == "prefill" else (runner, "_decode")
    launch = getattr(target, name)

    def break_off(*arguments):
        calls.append("launch")
        if calls.count("launch") == 1:
            raise error
        return launch(*arguments)

    monkeypatch.setattr(target, name, break_off)
    monkeypatch.setattr(runner._side, "join", lambda: calls.append("join"))
    names = [
        engine.add_request(prompt, params, adapter)
        for prompt, adapter in zip(PROMPTS, ["a", None, "b"], strict=True)
    ]
    outputs = []
    while engine.has_unfinished():
        with suppress(KeyboardInterrupt):
            outputs += engine.step()
    assert calls[:3] == ["launch", "join", "launch"]
    found = {output.request_id: output for output in outputs}
    assert [ids([found[name]])[0] for name in names] == expected


def test_an_end_token_beyond_the_vocabulary_is_never_drawn_and_breaks_nothing(paths):
    tokenizer = load_tokenizer(paths["model"])
    tokenizer.hf.add_special_tokens({"eos_token": "<|im_end|>"})
    assert tokenizer.hf.eos_token_id >= 515
    with Engine(paths["model"], tokenizer=Tokenizer(tokenizer.hf), **SIZES) as engine:
        params = SamplingParams(max_tokens=4, min_tokens=4, repetition_penalty=1.2)
        assert len(engine.generate([5, 6], params)[0].outputs[0].token_ids) == 4


def test_an_engine_built_in_inference_mode_loads_adapters_outside_of_it(paths, oracle):
    with torch.inference_mode():
        engine = Engine(paths["model"], adapters={"a": paths["a"]}, **SIZES)
    with engine:
        params = greedy(4, logprobs=0)
        oracle.check(engine.generate([5, 6, 7], params, "a")[0])
        engine.load_adapter("b", paths["b"])
        engine.unload_adapter("a")
        oracle.check(engine.generate([5, 6, 7], params, "b")[0])
