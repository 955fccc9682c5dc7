"""Text as it grows, and the strings that end it."""

from dataclasses import replace
from itertools import pairwise

import pytest

from engine import Engine, SamplingParams
from engine.outputs import RequestMetrics
from engine.request import Request, Sequence
from tests.tiny_models import save_model
from tests.tiny_tokenizer import save_tokenizer

# Only tokens of several letters: random bytes are seldom text.
LETTERS = dict.fromkeys(range(3 + 256, 515), 30.0)
TEXT = SamplingParams(max_tokens=24, seed=11, ignore_eos=True, logit_bias=LETTERS)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = save_tokenizer(save_model("llama", tmp_path_factory.mktemp("text")))
    sizes = {"max_batch_size": 6, "max_seq_len": 64, "prefill_chunk_tokens": 16, "max_loras": 0}
    with Engine(path, device="cpu", graph_batch_sizes=[1, 6], **sizes, debug=True) as engine:
        yield engine


def tokens(output):
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def written(engine):
    """A text, and how much of it there is after each of its tokens."""
    output = engine.generate("bado", TEXT)[0]
    ids = tokens(output)
    lengths = [len(engine.tokenizer.decode(ids[: at + 1])) for at in range(len(ids))]
    text = output.outputs[0].text
    assert text == engine.tokenizer.decode(ids)
    assert lengths[-1] == len(text) > 40
    return text, lengths


def crossing_stops(text, lengths):
    """Strings that begin in one token and end in a later one, and occur once."""
    for at, end in enumerate(lengths[2:-4], start=2):
        for before, after in ((1, 1), (2, 1), (1, 3)):
            stop = text[end - before : end + after]
            if text.find(stop) == end - before:
                tokens_needed = next(i for i, n in enumerate(lengths) if n >= end + after) + 1
                assert tokens_needed > at + 1
                yield stop, end - before, tokens_needed


def test_stop_strings_across_tokens_end_the_text_before_them(engine, written):
    cases = list(crossing_stops(*written))[:12]
    assert len(cases) == 12
    text = written[0]
    outputs = engine.generate(
        ["bado"] * 12, [replace(TEXT, stop=["\x00", stop]) for stop, _, _ in cases]
    )
    for output, (_, start, tokens_needed) in zip(outputs, cases, strict=True):
        assert output.outputs[0].text == text[:start]
        assert output.outputs[0].finish_reason == "stop"
        assert len(tokens(output)) == tokens_needed


def test_streamed_text_holds_back_what_may_begin_a_stop_string(engine, written):
    stop, start, _ = list(crossing_stops(*written))[3]
    shown = [output.outputs[0].text for output in engine.stream("bado", replace(TEXT, stop=stop))]
    assert shown[-1] == written[0][:start]
    for earlier, later in pairwise(shown):
        assert later.startswith(earlier)


def test_text_held_back_is_shown_when_no_stop_string_comes(engine, written):
    text, lengths = written
    almost = text[lengths[4] - 2 : lengths[4]] + "\x00"
    to_the_end = text[-2:] + "\x00"
    outputs = list(engine.stream("bado", replace(TEXT, stop=[almost, to_the_end])))
    shown = [output.outputs[0].text for output in outputs]
    assert shown[4] == text[: lengths[4] - 2]
    assert shown[5] == text[: lengths[5]]
    assert shown[-1] == text
    assert outputs[-1].outputs[0].finish_reason == "length"
    for earlier, later in pairwise(shown):
        assert later.startswith(earlier)


def test_the_prompt_is_no_part_of_what_stops(engine, written):
    output = engine.generate("bado", replace(TEXT, stop=["bado" + written[0][:1]]))[0]
    assert output.outputs[0].text == written[0]


def test_streamed_text_never_shows_half_a_character(engine):
    params = SamplingParams(max_tokens=40, seed=4, ignore_eos=True)  # bytes, mostly invalid
    outputs = [output.outputs[0] for output in engine.stream("é", params)]
    assert outputs[-1].text == engine.tokenizer.decode(outputs[-1].token_ids)
    assert "\ufffd" in outputs[-1].text
    for earlier, later in pairwise(outputs):
        assert later.text.startswith(earlier.text)


# One sequence by itself, on a tokenizer whose token i is the i-th of given pieces


class Pieces:
    def __init__(self, pieces, held=""):
        self.pieces, self.held = pieces, held

    def append(self, token_id):
        return self.pieces[token_id]

    def flush(self):
        return self.held


def write(pieces, held="", **params):
    """The sequence after all pieces or its end, and what it showed after each."""
    params = SamplingParams(**{"max_tokens": len(pieces) + 1, **params})
    metrics = RequestMetrics(arrival_time=0.0)
    request = Request("0", None, [0], params, None, 0, frozenset({1000}), metrics)
    sequence = Sequence(request, 0, Pieces(pieces, held))
    shown = []
    for token in range(len(pieces)):
        if not sequence.finished:
            sequence.append(token, -1.0, None)
            shown.append(sequence.output().text)
    return sequence, shown


@pytest.mark.parametrize(
    ("pieces", "stop", "shown"),
    [
        (["ab", "c"], "bc", ["a", "a"]),
        (["a", "a", "b", "a", "a", "c"], "aac", ["", "", "aab", "aab", "aab", "aab"]),
        (["aab", "aac"], ["c", "aac"], ["aab", "aab"]),
        (["xy", "z"], ["yz!", "y?"], ["x", "x"]),
        (["abc"], ["b", "abc"], ["a"]),  # as if it had come letter by letter
        (["abcd"], ["cd", "bc"], ["a"]),
        (["ab", "ab"], "x", ["ab", "abab"]),
        (["ab", "ab"], None, ["ab", "abab"]),
    ],
)
def test_what_is_shown_token_by_token(pieces, stop, shown):
    assert write(pieces, stop=stop)[1] == shown


def test_the_stop_string_that_is_complete_first_counts():
    for pieces in (["abc"], ["a", "b", "c"], ["ab", "c"]):
        sequence, _ = write(pieces, stop=["abc", "b"])
        assert (sequence.text, sequence.finish_reason) == ("a", "stop")


def test_a_stop_string_within_min_tokens_does_not_count():
    sequence, shown = write(["a", "b", "c", "d", "ab"], stop="ab", min_tokens=3)
    assert shown == ["", "ab", "abc", "abcd", "abcd"]
    assert sequence.finish_reason == "stop"
    assert len(sequence.output_ids) == 5
    sequence, _ = write(["a", "b", "x"], stop="ab", min_tokens=2)
    assert (sequence.text, len(sequence.output_ids)) == ("", 2)


def test_a_stop_string_wins_over_the_last_token():
    sequence, _ = write(["a", "b"], stop="ab", max_tokens=2)
    assert (sequence.text, sequence.finish_reason) == ("", "stop")


def test_what_the_detokenizer_holds_is_shown_at_the_end():
    sequence, _ = write(["a", "b"], held="?", max_tokens=2)
    assert (sequence.text, sequence.finish_reason) == ("ab?", "length")
    sequence, _ = write(["a", "b"], held="?", max_tokens=2, stop="b?")
    assert (sequence.text, sequence.finish_reason) == ("a", "stop")


def test_an_aborted_sequence_shows_all_that_it_has():
    sequence, shown = write(["a", "b"], held="?", stop="bc")
    assert shown == ["a", "a"]
    sequence.finish("abort")
    assert (sequence.output().text, sequence.finish_reason) == ("ab?", "abort")
    sequence, _ = write(["a", "b"], held="?", stop="b?")
    sequence.finish("abort")
    assert (sequence.output().text, sequence.finish_reason) == ("a", "abort")


def test_the_model_end_token_has_no_text():
    params = SamplingParams(max_tokens=5)
    request = Request("0", None, [0], params, None, 0, frozenset({1}), RequestMetrics(0.0))
    sequence = Sequence(request, 0, Pieces(["a", "</s>"]))
    sequence.append(0, -1.0, None)
    sequence.append(1, -1.0, None)
    assert (sequence.text, sequence.finish_reason, sequence.output_ids) == ("a", "stop", [0, 1])
