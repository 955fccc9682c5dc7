"""Loading tokenizers, and text that grows token by token."""

from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.errors import CheckpointError
from engine.tokenizer import Tokenizer, TokenizerSource, load_tokenizer
from tests.smollm2 import smollm2_path

TEXT = "Hello, world: naïve café 你好 🙂👩‍🚀 don't, said the fox .\n  two spaces"


def byte_level() -> transformers.PreTrainedTokenizerFast:
    """As GPT-2's, Llama 3's, Qwen's: every character is bytes, tokens may cut it anywhere."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world the fox said two spaces"] * 4, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )


def byte_fallback() -> transformers.PreTrainedTokenizerFast:
    """As Llama 2's, Mistral's, Gemma's: spaces by ▁, bytes only for what has no token."""
    words = ["<s>", "</s>", "<unk>", *(f"<0x{value:02X}>" for value in range(256))]
    words += ["▁", *"abcdefghijklmnopqrstuvwxyzHé,.:'", "▁t", "he", "▁the"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[("▁", "t"), ("h", "e"), ("▁t", "he")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def tokenizer(request) -> Tokenizer:
    return Tokenizer(request.param())


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.append(token_id) for token_id in token_ids]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    return [*pieces, detokenizer.flush()]


def test_pieces_add_up(tokenizer):
    token_ids = tokenizer.encode(TEXT)
    pieces = stream(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    assert "".join(pieces) == TEXT
    assert len([piece for piece in pieces if piece]) > len(TEXT) // 3
    assert all(piece.count("🙂") in (0, 1) for piece in pieces)


def test_a_character_appears_with_its_last_byte(tokenizer):
    token_ids = tokenizer.encode("a🙂")[-4:]
    pieces = stream(tokenizer, token_ids)
    assert pieces == ["", "", "", "🙂", ""]
    assert "".join(stream(tokenizer, token_ids[:2])) == tokenizer.decode(token_ids[:2])
    assert stream(tokenizer, token_ids[:2])[-1].startswith("\ufffd")


def test_special_and_unknown_ids_have_no_text(tokenizer):
    word = tokenizer.encode("he the")
    eos = tokenizer.eos_token_ids[0]
    token_ids = [eos, *word[:2], eos, eos, 10**6, *word[2:], eos]
    pieces = stream(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids) == "he the"
    assert [pieces[index] for index in (0, 3, 4, 5, -2, -1)] == [""] * 6


def test_each_step_decodes_a_few_ids_only(tokenizer):
    longest = 0

    def decode(token_ids):
        nonlocal longest
        longest = max(longest, len(token_ids))
        return tokenizer.decode(token_ids)

    detokenizer = tokenizer.detokenizer()
    detokenizer._decode = decode
    for token_id in [*tokenizer.encode(TEXT * 20), *tokenizer.eos_token_ids * 50]:
        detokenizer.append(token_id)
    assert longest <= 24  # a few characters of up to eleven bytes


def test_random_ids_of_a_byte_level_tokenizer():
    tokenizer = Tokenizer(byte_level())
    for seed in range(20):
        token_ids = [(seed * 7919 + index * index * 104729) % 290 for index in range(60)]
        assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_load_from_a_directory(tmp_path):
    saved = byte_level()
    saved.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    saved.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode(TEXT) == saved(TEXT)["input_ids"]
    assert loaded.eos_token_ids == (1,)
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}]) == "[user] hi"


def test_errors_name_the_place(tmp_path):
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no tokenizer that transformers"):
        load_tokenizer(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model.gguf: no tokenizer that transformers"):
        load_tokenizer(tmp_path / "model.gguf")
    too_long = tmp_path / ("x" * 300)
    with pytest.raises(CheckpointError, match=f"{too_long}: no tokenizer .*File name too long"):
        load_tokenizer(too_long)


def test_sources():
    assert TokenizerSource.at("org/name") == TokenizerSource("org/name")
    here = Path(__file__).parent
    assert TokenizerSource.at(here) == TokenizerSource(str(here))


def test_smollm2():
    path = smollm2_path()
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode([2]) == ""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_end|>") == [2]
    token_ids = tokenizer.encode(TEXT)
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids) == TEXT
    assert [token_id for token_id in range(17) if tokenizer.has_text(token_id)] == [
        token_id for token_id in range(17) if tokenizer.decode([token_id])
    ]
