"""What users get back."""

from dataclasses import dataclass, field

from engine.errors import EngineError


@dataclass
class CompletionOutput:
    """One of a request's `n` completions, with all its tokens so far.

    `logprobs` has one `{token_id: logprob}` per generated token where they were asked for;
    `cumulative_logprob` sums the chosen tokens' always. `finish_reason` is "stop", "length",
    "abort", or None while it runs.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    cumulative_logprob: float
    finish_reason: str | None


@dataclass
class RequestMetrics:
    """Host clock in seconds; None until it happened."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0


@dataclass
class RequestOutput:
    """A request as it stands. `error` is the EngineError that ended it, or None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, float] | None] | None
    adapter: str | None
    outputs: list[CompletionOutput]
    finished: bool
    error: EngineError | None
    metrics: RequestMetrics

    @property
    def num_tokens(self) -> int:
        """Generated so far, by all completions."""
        return sum(len(completion.token_ids) for completion in self.outputs)


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter as registered. `slot` is None while it is only in host memory; `requests` are
    those waiting or running; `bytes` are what it takes on the device."""

    name: str
    path: str
    rank: int
    target_modules: tuple[str, ...]
    slot: int | None
    pinned: bool
    bytes: int
    requests: int


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine started; `capture_seconds` and `capture_bytes` are of the graphs.

    `host_to_device_copies` are the uploads of requests, pages, chunks and batches; what an adapter
    takes to the device is counted in `adapter_loads`.
    """

    graphs: str
    captured_batch_sizes: tuple[int, ...]
    replays: int
    replays_by_batch_size: dict[int, int]
    eager_fallbacks: int
    padded_rows: int
    prefill_chunks: int
    host_to_device_copies: int
    kv_pages_used: int
    kv_pages_free: int
    adapter_loads: int
    adapter_evictions: int
    preemptions: int
    capture_seconds: float
    capture_bytes: int
    memory: str = field(repr=False, default="")
