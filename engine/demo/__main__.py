"""One batch, every row with another adapter or none, shown side by side.

    python -m engine.demo PATH [--max-tokens 60] [--graphs auto|cuda|tape|off] [--device cuda|cpu]
    python -m engine.demo --moe PATH [...]

PATH is SmolLM2-135M-Instruct, as a .gguf file or a directory in Hugging Face layout; with --moe the
mixture of experts that `python -m engine.demo.upcycle` makes of it. Each question is asked twice in
the batch: of the base model and with an adapter trained for it.
"""

import argparse
import shutil
import textwrap
import time
import unicodedata

from engine import Engine, EngineError, RequestOutput, SamplingParams
from engine.demo.adapter_list import ADAPTERS, MOE_ADAPTERS

QUESTIONS = (
    "What is the capital of Japan?",
    "Give me a tip for sleeping well.",
    "How do plants grow?",
    "Tell me about the moon.",
    "Why is the sky blue?",
    "How do I boil an egg?",
)
COLUMNS = ("question", "adapter", "with the adapter", "without")
NARROW = 8  # width of the adapters' names


def main() -> None:
    options = _parse()
    try:
        _run(options)
    except EngineError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


def _run(options: argparse.Namespace) -> None:
    adapters = MOE_ADAPTERS if options.moe else ADAPTERS
    names = list(adapters)
    pairs = [(question, names[i % len(names)]) for i, question in enumerate(QUESTIONS)]
    print(f"loading {options.model} and {len(names)} adapter{'s' * (len(names) > 1)}", flush=True)
    start = time.perf_counter()
    with Engine(
        options.model,
        adapters=adapters,
        max_batch_size=2 * len(pairs),
        max_seq_len=1024,
        graphs=options.graphs,
        device=options.device,
    ) as engine:
        ready = time.perf_counter() - start
        assert engine.tokenizer is not None, "a chat needs a tokenizer"
        prompts = [
            engine.tokenizer.apply_chat_template([{"role": "user", "content": question}])
            for question, _ in pairs
        ]
        params = SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
        start = time.perf_counter()
        outputs = engine.generate(
            prompts + prompts, params, [name for _, name in pairs] + [None] * len(pairs)
        )
        seconds = time.perf_counter() - start
        print(_table(pairs, outputs))
        print(_summary(engine, outputs, ready, seconds))


def _table(pairs: list[tuple[str, str]], outputs: list[RequestOutput]) -> str:
    width = min(max(shutil.get_terminal_size((132, 24)).columns, 60), 160)
    question_width = 18
    text_width = (width - question_width - NARROW - 3 * 2) // 2
    widths = (question_width, NARROW, text_width, text_width)
    lines = _cells(COLUMNS, widths) + ["  ".join("-" * w for w in widths)]
    count = len(pairs)
    for (question, name), adapted, base in zip(
        pairs, outputs[:count], outputs[count:], strict=True
    ):
        texts = map(_text, (adapted, base))
        lines += [*_cells((question, name, *texts), widths), ""]
    return "\n".join(lines)


def _text(output: RequestOutput) -> str:
    completion = output.outputs[0]
    return completion.text.strip() + (" …" if completion.finish_reason == "length" else "")


def _cells(texts: tuple[str, ...], widths: tuple[int, ...]) -> list[str]:
    """One table row, wrapped: as many lines as its longest cell needs."""
    cells = []
    for text, width in zip(texts, widths, strict=True):
        lines = [piece for line in text.splitlines() for piece in textwrap.wrap(line, width)]
        cells.append(lines or [""])
    height = max(map(len, cells))
    padded = [cell + [""] * (height - len(cell)) for cell in cells]
    return [
        "  ".join(_padded(text, width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*padded, strict=True)
    ]


def _padded(text: str, width: int) -> str:
    """`text` filled up to `width` columns of a terminal, on which wide characters take two."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return text + " " * (width - len(text) - wide)


def _summary(engine: Engine, outputs: list[RequestOutput], ready: float, seconds: float) -> str:
    stats = engine.stats()
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    sizes = ", ".join(map(str, stats.captured_batch_sizes))
    return "\n".join(
        [
            f"{engine.device}, {str(engine.dtype).removeprefix('torch.')}, ready after "
            f"{ready:.1f} s",
            f"{len(outputs)} rows, {tokens} tokens in {seconds:.2f} s: "
            f"{tokens / seconds:.1f} tokens/s",
            f"graphs ({stats.graphs}): sizes {sizes} captured in {stats.capture_seconds:.2f} s, "
            f"{stats.capture_bytes / 2**20:.1f} MiB",
            f"{stats.replays} replays, {stats.eager_fallbacks} eager fallbacks, "
            f"{stats.padded_rows} padded rows, {stats.prefill_chunks} prefill chunks, "
            f"{stats.host_to_device_copies} uploads",
            stats.memory,
        ]
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="SmolLM2-135M-Instruct: a .gguf file or a directory")
    parser.add_argument("--moe", action="store_true", help="the model is the upcycled mixture")
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--graphs", default="auto", choices=("auto", "cuda", "tape", "off"))
    parser.add_argument("--device", help="cuda, cuda:N or cpu; a GPU if there is one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
