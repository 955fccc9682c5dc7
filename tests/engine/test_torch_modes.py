"""What the caller set in torch before building an engine: default dtype and inference mode."""

import pytest
import torch

from engine import Engine, SamplingParams
from tests.api_engine import PROMPTS, SIZES

NAMES = ["a", "b", None]
SAMPLED = SamplingParams(max_tokens=6, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)


def open_float32(paths) -> Engine:
    adapters = {name: paths[name] for name in "ab"}
    return Engine(paths["model"], adapters=adapters, dtype="float32", **SIZES, debug=True)


def serve(engine: Engine, oracle) -> None:
    for output in engine.generate(PROMPTS, GREEDY, NAMES):
        assert output.error is None, output.error
        oracle.check(output)


def tokens(engine: Engine) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in engine.generate(PROMPTS, SAMPLED, NAMES)]


def test_a_default_dtype_of_fewer_bits_changes_nothing(paths, oracle):
    with open_float32(paths) as engine:
        expected = tokens(engine)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with open_float32(paths) as engine:
            outputs = engine.generate(PROMPTS, GREEDY, NAMES)
            found = tokens(engine)
    finally:
        torch.set_default_dtype(torch.float32)
    for output in outputs:
        assert output.error is None, output.error
        oracle.check(output)
    assert found == expected


def test_an_engine_built_in_inference_mode_serves_and_loads_in_any_mode(paths, oracle):
    with torch.inference_mode():
        engine = open_float32(paths)
        serve(engine, oracle)
    with engine:
        for mode in (False, True, False):
            with torch.inference_mode(mode):
                for name in "ab":
                    engine.unload_adapter(name)
                for name in "ba":
                    engine.load_adapter(name, paths[name])
        with torch.inference_mode():
            serve(engine, oracle)


@pytest.mark.parametrize("built", [True, False])
def test_an_engine_serves_in_the_mode_it_was_not_built_in(paths, oracle, built):
    with torch.inference_mode(built):
        engine = open_float32(paths)
    with engine, torch.inference_mode(not built):
        serve(engine, oracle)
