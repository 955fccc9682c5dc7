"""A request and its sequences: what was asked, what came of it so far.

Knows nothing of devices, pages' contents or when a sequence runs: the scheduler writes `slot`,
`pages`, `computed` and `launched`; results come in through `Sequence.append`.
"""

import hashlib
from dataclasses import dataclass, field, replace

from engine.adapter_registry import Adapter
from engine.errors import EngineError
from engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from engine.sampling_params import SamplingParams
from engine.tokenizer import IncrementalDetokenizer


def derived_seed(engine_seed: int, ordinal: int) -> int:
    """The seed of a request that brings none: from the engine's seed and the request's order."""
    digest = hashlib.blake2b(f"{engine_seed}:{ordinal}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def as_int64(seed: int) -> int:
    """`seed` modulo 2^64 as a signed 64-bit number."""
    return (seed + 2**63) % 2**64 - 2**63


@dataclass(eq=False)
class Request:
    """One prompt, its parameters and its `n` sequences. `for_step`: `step()` hands it out."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    adapter: Adapter | None
    seed: int
    stop_ids: frozenset[int]
    metrics: RequestMetrics
    sequences: list["Sequence"] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    error: EngineError | None = None
    for_step: bool = False

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        """Generated so far, by all sequences."""
        return sum(len(sequence.output_ids) for sequence in self.sequences)

    @property
    def adapter_version(self) -> int:
        return self.adapter.version if self.adapter else 0

    @property
    def first_stop_position(self) -> int:
        """The first position at which a stop token may be drawn."""
        return len(self.prompt_ids) + self.params.min_tokens

    def output(self) -> RequestOutput:
        """All so far, as a copy that later steps do not change."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_ids),
            prompt_logprobs=list(self.prompt_logprobs) if self.prompt_logprobs else None,
            adapter=self.adapter.name if self.adapter else None,
            outputs=[sequence.output() for sequence in self.sequences],
            finished=self.finished,
            error=self.error,
            metrics=replace(self.metrics),
        )


class Sequence:
    """One completion of a request, and where it stands on the device.

    `computed` tokens have had their prefill launched, of `prefill_tokens`; `launched` output
    tokens have had their drawing launched, at most one step more than `output_ids` holds.
    """

    def __init__(
        self, request: Request, index: int, detokenizer: IncrementalDetokenizer | None
    ) -> None:
        self.request = request
        self.index = index
        self.output_ids: list[int] = []
        self.logprobs: list[dict[int, float]] = []
        self.cumulative_logprob = 0.0
        self.text = ""
        self.finish_reason: str | None = None
        self.slot: int | None = None
        self.pages: list[int] = []
        self.page_keys: list[bytes] = []
        self.prefill_tokens = 0
        self.computed = 0
        self.launched = 0
        self.overtaken = 0
        self._detokenizer = detokenizer

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output, as far as the host knows them."""
        return self.request.prompt_ids + self.output_ids

    @property
    def num_tokens(self) -> int:
        """Length of `token_ids`."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def prefilled(self) -> bool:
        return self.slot is not None and self.computed == self.prefill_tokens

    @property
    def most_tokens_fed(self) -> int:
        """Tokens with KV when the sequence is at its longest: the last drawn is never fed."""
        return len(self.request.prompt_ids) + self.request.params.max_tokens - 1

    @property
    def next_position(self) -> int:
        """Position of the token that the next decode step feeds."""
        return len(self.request.prompt_ids) + self.launched - 1

    @property
    def all_launched(self) -> bool:
        return self.launched >= self.request.params.max_tokens

    def append(self, token_id: int, logprob: float, top: dict[int, float] | None) -> None:
        """Take in a drawn token and decide whether the sequence ends with it."""
        params = self.request.params
        stopped = token_id in self.request.stop_ids
        shown = not stopped or token_id in self._shown_stops()
        piece = self._detokenizer.append(token_id) if self._detokenizer and shown else ""
        self.output_ids.append(token_id)  # from here on nothing can fail
        self.cumulative_logprob += logprob
        if params.logprobs is not None:
            self.logprobs.append({**(top or {}), token_id: logprob})
        searched = len(self.text)
        self.text += piece
        enough = len(self.output_ids) >= params.min_tokens
        if stopped and enough:
            self.finish("stop")
        elif enough and self._cut_at_stop_string(searched):
            self.finish_reason = "stop"
        elif len(self.output_ids) >= params.max_tokens:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """End here: what the detokenizer held back for more bytes is shown."""
        searched = len(self.text)
        if self._detokenizer is not None:
            self.text += self._detokenizer.flush()
        if self._cut_at_stop_string(searched) and reason == "length":
            reason = "stop"
        self.finish_reason = reason

    def output(self) -> CompletionOutput:
        """A copy as it stands. Text that may turn out to begin a stop string is held back."""
        held = 0 if self.finished else self._held_back()
        return CompletionOutput(
            index=self.index,
            text=self.text[: len(self.text) - held],
            token_ids=list(self.output_ids),
            logprobs=list(self.logprobs) if self.request.params.logprobs is not None else None,
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=self.finish_reason,
        )

    def _shown_stops(self) -> tuple[int, ...]:
        return tuple(self.request.params.stop_token_ids or ())

    def _cut_at_stop_string(self, searched: int) -> bool:
        """Cut the text before the stop string that ends first, beyond `searched` characters."""
        found = []
        for stop in self.request.params.stop_strings:
            start = self.text.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            self.text = self.text[: min(found)[1]]
        return bool(found)

    def _held_back(self) -> int:
        held = 0
        for stop in self.request.params.stop_strings:
            for length in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:length]):
                    held = length
                    break
        return held
