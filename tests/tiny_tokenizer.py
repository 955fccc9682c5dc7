"""A byte-level tokenizer over the tiny models' vocabulary, to save beside one of them."""

from pathlib import Path

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tests.tiny_models import SIZES

BOS, EOS = SIZES["bos_token_id"], SIZES["eos_token_id"]


def save_tokenizer(directory: Path) -> Path:
    """Ids 0 to 2 are <pad>, <s> and </s>; every other id has text, many of several letters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"],
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    syllables = [first + vowel for first in "bdfgklmnprst" for vowel in "aeiou"]
    words = [a + b + c for a in syllables for b in syllables[::7] for c in syllables[::11]]
    backend.train_from_iterator([" ".join(words)], trainer)
    assert backend.get_vocab_size() == SIZES["vocab_size"]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(directory)
    return directory
