"""A batch under way: prompts are computed, so that every further step is one decode replay."""

import time
from types import TracebackType

import torch

from engine import Engine, SamplingParams

PROMPT_TOKENS = 128


def random_prompts(engine: Engine, batch: int) -> list[list[int]]:
    """`batch` prompts of 128 random tokens, always the same."""
    generator = torch.Generator().manual_seed(batch)
    shape = (batch, PROMPT_TOKENS)
    return torch.randint(0, engine.architecture.vocab_size, shape, generator=generator).tolist()


class RunningBatch:
    """Greedy requests of up to `max_tokens`, one a row with the adapter named for it. At the end
    of the `with` block they are aborted."""

    def __init__(self, engine: Engine, adapters: list[str | None], max_tokens: int) -> None:
        self.engine, self.size = engine, len(adapters)
        self.params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._adapters = adapters
        self._lora = any(name is not None for name in adapters)
        self.requests: list[str] = []

    def __enter__(self) -> "RunningBatch":
        engine, prompts = self.engine, random_prompts(self.engine, self.size)
        self.requests = [
            engine.add_request(prompt, self.params, name)
            for prompt, name in zip(prompts, self._adapters, strict=True)
        ]
        for _ in range(self.size * PROMPT_TOKENS // engine.config.prefill_chunk_tokens + 8):
            engine.step()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for request in self.requests:
            self.engine.abort(request)
        while self.engine.has_unfinished():
            self.engine.step()

    def replay(self, repeats: int = 1) -> None:
        """The graph of the batch staged last, without the engine's host work. What the replays
        draw nobody reads; each moves the rows one token on."""
        graphs = self.engine.runner.graphs
        for _ in range(repeats):
            graphs.run(self.size, lambda buffers: None, self._lora)

    def replay_ms(self, repeats: int = 50) -> float:
        """Milliseconds a replay, back to back."""
        self.synchronize()
        start = time.perf_counter()
        self.replay(repeats)
        self.synchronize()
        return (time.perf_counter() - start) / repeats * 1e3

    def step_eagerly(self) -> None:
        """The graph's step, launched from Python."""
        self.engine.runner.step_eagerly(self.size, self._lora)

    def synchronize(self) -> None:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
