"""A seeded programme of requests that join, end and are aborted while adapters come and go.

Run twice, on engines that should agree, it gives lists to compare bit for bit.
"""

import random
from collections.abc import Mapping
from pathlib import Path

from engine import Engine, RequestOutput, SamplingParams

VOCAB = 515


def run_programme(
    engine: Engine, adapters: Mapping[str, Path], seed: int, arrivals: int
) -> list[tuple]:
    """Add `arrivals` requests at random steps, abort a few, and reload adapters under the same
    names with other weights now and then. Returns every output in the order it came."""
    draw = random.Random(seed)
    names = sorted(adapters)
    loaded: list[str] = []
    log: list[tuple] = []
    alive: list[str] = []
    added = 0
    while added < arrivals or engine.has_unfinished():
        if added < arrivals:
            for _ in range(draw.choice((0, 1, 1, 3))):
                choices = [None, *loaded]
                params = SamplingParams(
                    max_tokens=draw.randint(1, 60),
                    temperature=draw.choice((0.0, 0.0, 0.9)),
                    top_k=draw.choice((0, 20)),
                    top_p=draw.choice((1.0, 0.9)),
                    repetition_penalty=draw.choice((1.0, 1.3)),
                    ignore_eos=True,
                    logprobs=draw.choice((None, 0, 3)),
                )
                prompt = [draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 30))]
                alive.append(engine.add_request(prompt, params, draw.choice(choices), f"r{added}"))
                added += 1
            if draw.random() < 0.5:
                swap_adapter(engine, adapters, names, loaded, draw)
            if alive and draw.random() < 0.1:
                log.append(("abort", engine.abort(draw.choice(alive))))
        for output in engine.step():
            log.append(as_bits(output))
            if output.finished and output.request_id in alive:
                alive.remove(output.request_id)
    return log


def swap_adapter(
    engine: Engine,
    adapters: Mapping[str, Path],
    names: list[str],
    loaded: list[str],
    draw: random.Random,
) -> None:
    """Load one more adapter, or replace a loaded one by another's weights under its name."""
    if len(loaded) < len(names) and draw.random() < 0.7:
        name = names[len(loaded)]
        engine.load_adapter(name, adapters[name])
        loaded.append(name)
    elif loaded:
        name = draw.choice(loaded)
        engine.unload_adapter(name)
        engine.load_adapter(name, adapters[draw.choice(names)])


def as_bits(output: RequestOutput) -> tuple:
    """Everything about an output that has bits, floats exact."""
    return (
        output.request_id,
        output.finished,
        *(
            (
                completion.index,
                tuple(completion.token_ids),
                completion.cumulative_logprob.hex(),
                completion.finish_reason,
                tuple(
                    tuple((token, value.hex()) for token, value in row.items())
                    for row in completion.logprobs or ()
                ),
            )
            for completion in output.outputs
        ),
    )
