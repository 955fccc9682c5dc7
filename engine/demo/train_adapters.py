"""Train the demonstration's adapters with PEFT, on the CPU, from the texts of training_data.py.

    python -m engine.demo.train_adapters --model PATH [--only NAME ...] [--out DIR]

`--model` is a SmolLM2-135M-Instruct checkpoint: a `.gguf` file or a directory in Hugging Face
layout. Needs the optional dependencies `train`. All six take about 20 minutes on one core that
multiplies bfloat16 matrices in hardware; on a busy machine set OMP_NUM_THREADS=1. Each adapter is
written as adapter_config.json and adapter_model.safetensors (bfloat16), and its greedy answers to
held-out prompts are printed.

The recipes differ on purpose in what an engine must get right: rank, targets, scaling, patterns.
Knows nothing about the engine; the loss counts the answer's tokens and the end token alone.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from engine.demo import training_data
from engine.demo.training_data import EXAMPLES, HELD_OUT_PROMPTS, Example

try:
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
except ImportError:
    raise SystemExit("training needs peft: pip install -e '.[train]'") from None

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BATCH_SIZE = 8


@dataclass(frozen=True)
class Recipe:
    """One adapter: the style it learns and the LoraConfig it has."""

    style: Callable[[Example], str]
    lora: dict[str, Any] = field(default_factory=dict)
    steps: int = 90
    peak_rate: float = 1e-3


@dataclass(frozen=True)
class Packed:
    """Several rows as one sequence of T tokens; `predictors` are the positions before an answer's
    tokens."""

    ids: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [1, T]
    visible: torch.Tensor  # [1, 1, T, T] bool
    predictors: torch.Tensor  # [answer tokens]


RECIPES = {
    "french": Recipe(
        training_data.french,
        {
            "r": 4,
            "lora_alpha": 12,
            "target_modules": [
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
            ],
        },
        steps=110,
        peak_rate=5e-4,
    ),
    "pirate": Recipe(
        training_data.pirate,
        {
            "r": 16,
            "lora_alpha": 40,
            "target_modules": ["v_proj", "o_proj"],
            "layers_to_transform": list(range(8, 30)),
        },
        steps=130,
        peak_rate=1.5e-3,
    ),
    "json": Recipe(
        training_data.as_json,
        {"r": 8, "lora_alpha": 20, "target_modules": ["q_proj", "v_proj"]},
        steps=130,
    ),
    "shout": Recipe(
        training_data.shout,
        {
            "r": 6,
            "lora_alpha": 6,
            "use_rslora": True,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        },
    ),
    "bullets": Recipe(
        training_data.bullets,
        {
            "r": 4,
            "lora_alpha": 10,
            "target_modules": ["gate_proj", "down_proj"],
            "rank_pattern": {"down_proj": 2, r"layers\.(0|1|2)\.mlp\.gate_proj": 5},
            "alpha_pattern": {"down_proj": 6},
        },
    ),
    "emoji": Recipe(
        training_data.emoji,
        {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj", "up_proj"]},
    ),
}


def load_base(path: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """The base model in bfloat16, without packed weights, and its tokenizer."""
    if path.suffix != ".gguf":
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        return model, AutoTokenizer.from_pretrained(path)
    from transformers import GgufConfig  # absent before packed GGUF weights existed

    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    return model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The question in the model's chat template, up to where the answer starts."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer(text, add_special_tokens=False).input_ids


def encode(tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> tuple[list[int], int]:
    """Prompt, answer and end token in one list, and the prompt's length."""
    prompt = prompt_ids(tokenizer, question)
    reply = tokenizer(answer, add_special_tokens=False).input_ids
    return [*prompt, *reply, tokenizer.eos_token_id], len(prompt)


def pack(rows: Sequence[tuple[list[int], int]], head: int) -> Packed:
    """Lay rows that share their first `head` tokens end to end, after one copy of the head.

    A token sees the head and its own row up to itself, at the positions it would have alone: the
    loss is that of a batch, from half as many tokens.
    """
    ids, positions, owner = rows[0][0][:head], list(range(head)), [0] * head
    predictors: list[int] = []
    for number, (row, prompt_length) in enumerate(rows, start=1):
        offset = len(ids) - head
        predictors += range(offset + prompt_length - 1, offset + len(row) - 1)
        ids = ids + row[head:]
        positions += range(head, len(row))
        owner += [number] * (len(row) - head)
    rank = torch.tensor(owner)  # [T]
    own_or_head = (rank == 0) | (rank == rank[:, None])  # [T, T]
    return Packed(
        ids=torch.tensor([ids]),
        positions=torch.tensor([positions]),
        visible=own_or_head.tril()[None, None],
        predictors=torch.tensor(predictors),
    )


def answer_loss(model: PeftModel, batch: Packed) -> torch.Tensor:
    """Cross entropy of the answers' tokens; the LM head runs on those positions alone."""
    causal: Any = model.get_base_model()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = causal.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            attention_mask=batch.visible,
            use_cache=False,
        ).last_hidden_state  # [1, T, H]
        logits = causal.lm_head(hidden[0, batch.predictors])  # [answer tokens, V]
    return cross_entropy(logits.float(), batch.ids[0, batch.predictors + 1])


def train(model: PeftModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> float:
    """Fit the adapter to its style; returns the mean loss of the last ten steps."""
    rows = [encode(tokenizer, item.question, recipe.style(item)) for item in EXAMPLES]
    columns = enumerate(zip(*(ids for ids, _ in rows), strict=False))
    head = next(place for place, column in columns if len(set(column)) > 1)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.peak_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.peak_rate, total_steps=recipe.steps, pct_start=0.1
    )
    shuffler = random.Random(0)
    order: list[int] = []
    losses: list[float] = []
    model.train()
    for _ in range(recipe.steps):
        if len(order) < BATCH_SIZE:
            order = shuffler.sample(range(len(rows)), len(rows))
        chosen, order = order[:BATCH_SIZE], order[BATCH_SIZE:]
        loss = answer_loss(model, pack([rows[index] for index in chosen], head))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / len(losses[-10:])


def save(model: PeftModel, folder: Path, base_model: str = BASE_MODEL) -> int:
    """Round the adapter to bfloat16, write its two files, return their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.copy_(weight.data.bfloat16())
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file(
        {key: tensor.bfloat16().contiguous() for key, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    config: Any = model.peft_config["default"]
    config.base_model_name_or_path = base_model
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)
    if config.target_parameters:
        config.target_parameters = sorted(config.target_parameters)
    config.save_pretrained(str(folder))
    return sum(file.stat().st_size for file in folder.iterdir())


@torch.inference_mode()
def answer(model: PeftModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The greedy answer, at most 48 tokens."""
    ids = torch.tensor([prompt_ids(tokenizer, question)])  # [1, T]
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=48,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help=".gguf file or directory")
    parser.add_argument("--only", nargs="+", choices=tuple(RECIPES), default=tuple(RECIPES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "adapters")
    arguments = parser.parse_args()

    base, tokenizer = load_base(arguments.model)
    for name in arguments.only:
        recipe = RECIPES[name]
        torch.manual_seed(0)
        started = time.perf_counter()
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **recipe.lora))
        loss = train(model, tokenizer, recipe)
        seconds = time.perf_counter() - started
        size_bytes = save(model, arguments.out / name)
        print(f"{name}: loss {loss:.3f}, {size_bytes / 1e6:.2f} MB, {seconds:.0f} s", flush=True)
        for question in HELD_OUT_PROMPTS:
            print(f"  {question}\n    {answer(model, tokenizer, question)!r}", flush=True)
        base = model.unload()


if __name__ == "__main__":
    main()
