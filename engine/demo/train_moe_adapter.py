"""Train the expert adapter of the upcycled model with PEFT, on the CPU.

    python -m engine.demo.train_moe_adapter --model .models/SmolLM2-135M-Instruct-4x2 [--out DIR]

`--model` is what `python -m engine.demo.upcycle` makes. Needs the optional dependencies `train`.
Takes about five minutes on one core that multiplies bfloat16 matrices in hardware (set
OMP_NUM_THREADS=1 on a busy machine): PEFT adds the adapter to whole expert stacks at every step.

The adapter is of rank 2 on each of the four experts' three matrices in the upper twenty layers, as
PEFT's `target_parameters`; router and attention stay as they are. Loss, texts and files are those
of train_adapters.py.
"""

import argparse
import time
from pathlib import Path

import torch

from engine.demo import training_data
from engine.demo.train_adapters import Recipe, answer, load_base, save, train
from engine.demo.training_data import HELD_OUT_PROMPTS
from engine.demo.upcycle import NAME

ADAPTER = "moe-telegram"
LAYERS = range(10, 30)
RECIPE = Recipe(
    training_data.telegram,
    {
        "r": 2,
        "lora_alpha": 5,
        "target_modules": [],
        "target_parameters": sorted(
            f"layers.{layer}.mlp.experts.{projection}"
            for layer in LAYERS
            for projection in ("gate_up_proj", "down_proj")
        ),
    },
    steps=100,
    peak_rate=7e-4,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="the upcycled model's directory")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "adapters")
    arguments = parser.parse_args()
    from peft import LoraConfig, get_peft_model  # train_adapters says what to install

    base, tokenizer = load_base(arguments.model)
    torch.manual_seed(0)
    started = time.perf_counter()
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **RECIPE.lora))
    loss = train(model, tokenizer, RECIPE)
    seconds = time.perf_counter() - started
    size_bytes = save(model, arguments.out / ADAPTER, NAME)
    print(f"{ADAPTER}: loss {loss:.3f}, {size_bytes / 1e6:.2f} MB, {seconds:.0f} s", flush=True)
    model.merge_adapter()  # else every token would add it to the experts again
    for question in HELD_OUT_PROMPTS:
        print(f"  {question}\n    {answer(model, tokenizer, question)!r}", flush=True)


if __name__ == "__main__":
    main()
