"""SamplingParams: what it accepts, and what it says about anything else."""

import copy
import inspect
from dataclasses import fields, replace

import pytest

from engine import EngineError, RequestError, SamplingParams

NAN, INFINITY = float("nan"), float("inf")
HUGE = 10**5000

ACCEPTED = [
    {"n": 1024},
    {"max_tokens": 1},
    {"temperature": 0},
    {"temperature": 1e-30},
    {"temperature": 1e6},
    {"top_p": 1e-30},
    {"top_p": 1},
    {"top_k": -1},
    {"top_k": 2**31 - 1},
    {"min_p": 0},
    {"min_p": 1.0},
    {"repetition_penalty": 1e-6},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 2},
    {"seed": -(2**63)},
    {"seed": 2**64 - 1},
    {"stop": "x"},
    {"stop": ("x", "yy")},
    {"stop": []},
    {"stop_token_ids": [0, 5]},
    {"stop_token_ids": {5}},
    {"stop_token_ids": ()},
    {"min_tokens": 16},
    {"logprobs": 0},
    {"logprobs": 20},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 20},
    {"logit_bias": {5: -INFINITY, 6: 3}},
    {"logit_bias": {}},
]

# The bad value, and what the message says is accepted.
REFUSED = [
    ({"n": 0}, "from 1 to 1024"),
    ({"n": 1025}, "from 1 to 1024"),
    ({"n": 1.0}, "whole number"),
    ({"n": True}, "whole number"),
    ({"max_tokens": 0}, "from 1"),
    ({"max_tokens": None}, "whole number"),
    ({"max_tokens": "16"}, "whole number"),
    ({"temperature": -0.1}, "from 0"),
    ({"temperature": NAN}, "from 0"),
    ({"temperature": INFINITY}, "from 0"),
    ({"temperature": "hot"}, "number"),
    ({"temperature": True}, "number"),
    ({"top_p": 0}, "above 0 to 1"),
    ({"top_p": 1.01}, "above 0 to 1"),
    ({"top_k": -2}, "from -1"),
    ({"top_k": 2.5}, "whole number"),
    ({"min_p": -0.1}, "from 0 to 1"),
    ({"min_p": 1.1}, "from 0 to 1"),
    ({"repetition_penalty": 0}, "from 1e-06"),
    ({"repetition_penalty": -1.0}, "from 1e-06"),
    ({"presence_penalty": NAN}, "number"),
    ({"frequency_penalty": INFINITY}, "number"),
    ({"seed": 1.5}, "whole number"),
    ({"seed": 2**64}, "whole number"),
    ({"stop": ""}, "non-empty string"),
    ({"stop": ["x", ""]}, "non-empty string"),
    ({"stop": [5]}, "non-empty string"),
    ({"stop": 5}, "non-empty string"),
    ({"stop": b"x"}, "non-empty string"),
    ({"stop_token_ids": 5}, "list of token ids"),
    ({"stop_token_ids": [-1]}, "token id"),
    ({"stop_token_ids": ["x"]}, "token id"),
    ({"stop_token_ids": [True]}, "token id"),
    ({"ignore_eos": 1}, "True or False"),
    ({"min_tokens": -1}, "from 0 to 16"),
    ({"min_tokens": 17}, "from 0 to 16"),
    ({"logprobs": 21}, "from 0 to 20"),
    ({"logprobs": -1}, "from 0 to 20"),
    ({"logprobs": True}, "from 0 to 20"),
    ({"prompt_logprobs": 21}, "from 0 to 20"),
    ({"logit_bias": [5]}, "mapping"),
    ({"logit_bias": {-1: 1.0}}, "token id"),
    ({"logit_bias": {"x": 1.0}}, "token id"),
    ({"logit_bias": {5: NAN}}, "number"),
    ({"logit_bias": {5: INFINITY}}, "number"),
    ({"logit_bias": {5: 1e39}}, "number"),  # beyond float32
    ({"logit_bias": {5: "x"}}, "number"),
    ({"logit_bias": {5: True}}, "number"),
]


def test_defaults():
    assert SamplingParams() == SamplingParams(
        n=1,
        max_tokens=16,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=None,
        stop=None,
        stop_token_ids=None,
        ignore_eos=False,
        min_tokens=0,
        logprobs=None,
        prompt_logprobs=None,
        logit_bias=None,
    )


@pytest.mark.parametrize("keywords", ACCEPTED, ids=str)
def test_accepts(keywords):
    params = SamplingParams(**keywords)
    ((name, value),) = keywords.items()
    assert getattr(params, name) == value


@pytest.mark.parametrize(("keywords", "accepted"), REFUSED, ids=str)
def test_refuses_and_says_what_is_accepted(keywords, accepted):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**keywords)
    ((name, value),) = keywords.items()
    message = str(caught.value)
    assert name in message
    assert accepted in message
    inside = value.values() if isinstance(value, dict) else value
    parts = list(inside) if isinstance(value, dict | list) else []
    keys = list(value) if isinstance(value, dict) else []
    assert any(repr(found) in message for found in [value, *parts, *keys])
    assert isinstance(caught.value, EngineError)
    assert isinstance(caught.value, ValueError)


def test_an_unknown_name_is_refused():
    with pytest.raises(RequestError, match=r"'max_new_tokens'; it takes n, max_tokens, temper"):
        SamplingParams(max_new_tokens=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([1] * 40, "given 40 values; it takes n, max"), ([2, 3], "'max_tokens' twice")],
)
def test_too_many_values_are_refused(arguments, message):
    assert SamplingParams(2, 3, 0.5) == SamplingParams(n=2, max_tokens=3, temperature=0.5)
    with pytest.raises(RequestError, match=message):
        SamplingParams(*arguments, max_tokens=4)


@pytest.mark.parametrize(
    "keywords",
    [
        {"n": HUGE},
        {"seed": -HUGE},
        {"temperature": HUGE},
        {"stop": HUGE},
        {"stop_token_ids": [-HUGE]},
        {"ignore_eos": HUGE},
        {"logit_bias": HUGE},
        {"logit_bias": {-HUGE: 1.0}},
        {"logit_bias": {HUGE: HUGE}},
    ],
    ids=lambda keywords: next(iter(keywords)),
)
def test_numbers_that_python_does_not_print_are_refused_too(keywords):
    with pytest.raises(RequestError, match=rf"{next(iter(keywords))}.*about 5001 digits"):
        SamplingParams(**keywords)


def test_min_tokens_may_not_exceed_max_tokens():
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    with pytest.raises(RequestError, match="min_tokens=6 is not a whole number from 0 to 5"):
        SamplingParams(max_tokens=5, min_tokens=6)


def test_stop_is_one_string_or_several():
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop_strings == ("ab", "c")


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, False),
        ({"temperature": 0, "top_k": 5, "logit_bias": {1: 1.0}}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"min_tokens": 1}, True),
    ],
    ids=str,
)
def test_token_state_is_kept_only_where_it_is_read(keywords, expected):
    assert SamplingParams(**keywords).needs_token_state is expected


@pytest.mark.parametrize("keywords", [{"stop_token_ids": [514]}, {"logit_bias": {514: 1.0}}])
def test_token_ids_are_checked_against_the_vocabulary(keywords):
    params = SamplingParams(**keywords)
    params.check_vocabulary(515)
    ((name, _),) = keywords.items()
    with pytest.raises(RequestError, match=f"{name}: token id 514 .* accepted: 0 to 513"):
        params.check_vocabulary(514)
    with pytest.raises(RequestError, match="stop_token_ids: token id <integer of about"):
        SamplingParams(stop_token_ids=[HUGE]).check_vocabulary(514)


def test_a_copy_shares_no_list():
    params = SamplingParams(stop=["x"], stop_token_ids=[5], logit_bias={6: 1.0}, seed=3)
    mine = params.copy()
    params.stop.append("y")
    params.stop_token_ids.append(7)
    params.logit_bias[8] = 2.0
    assert mine.stop_strings == ("x",)
    assert list(mine.stop_token_ids) == [5]
    assert mine.logit_bias == {6: 1.0}
    assert mine.seed == 3


def test_parameters_can_be_copied_and_replaced():
    params = SamplingParams(n=2, seed=3)
    assert copy.deepcopy(params) == params
    assert replace(params, n=4) == SamplingParams(n=4, seed=3)
    with pytest.raises(RequestError, match="n=0"):
        replace(params, n=0)
    with pytest.raises(AttributeError):
        params.n = 3


def test_help_shows_what_it_takes():
    parameters = inspect.signature(SamplingParams).parameters
    assert list(parameters) == [field.name for field in fields(SamplingParams)]
    assert parameters["temperature"].default == 1.0

    class Other(SamplingParams):
        def __init__(self, heat):
            super().__init__(temperature=heat)

    assert list(inspect.signature(Other.__init__).parameters) == ["self", "heat"]
    assert "top_p" not in inspect.signature(Other).parameters
