"""The engine: requests in, tokens out. Ties checkpoint, memory, scheduler and graphs together.

The host stays one step behind the device: a step launches what is known, then reads what the
step before it drew.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from os import PathLike
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from engine.adapter_files import read_adapter
from engine.adapter_registry import AdapterRegistry
from engine.checkpoint import Checkpoint, open_checkpoint
from engine.compiler_check import check_compiler
from engine.config import DTYPES, PAGE_SIZE, EngineConfig, check_path, compiler
from engine.decoder import Decoder
from engine.errors import EngineError, RequestError
from engine.model_runner import InFlight, ModelRunner
from engine.outputs import AdapterInfo, EngineStats, RequestOutput
from engine.prompts import Prompt, as_prompts, one_each
from engine.request import Request, Sequence, derived_seed
from engine.request_intake import RequestIntake
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.tokenizer import Tokenizer, load_tokenizer
from engine.trace import Trace
from memory.manager import MemoryConfig, MemoryManager
from memory.packed_adapter import pack_adapter

MODELS_TOKENIZER = object()  # the default of `tokenizer`: None means none at all


class Engine:
    """Decodes one base model for many LoRA adapters; see README.md for keywords and methods.

    `model` is a directory in Hugging Face layout, a .gguf file, a hub id, or an opened
    `Checkpoint`. `adapters` maps names to PEFT directories. Other keywords are `EngineConfig`'s.
    Safe to call from several threads: one step runs at a time.
    """

    def __init__(
        self,
        model: str | PathLike[str] | Checkpoint,
        *,
        adapters: Mapping[str, str | PathLike[str]] | None = None,
        tokenizer: Any = MODELS_TOKENIZER,
        **keywords: Any,
    ) -> None:
        self.config = EngineConfig.from_keywords(keywords)
        self._lock = threading.RLock()
        self._closed = False
        self.device = self.config.resolved_device()
        graphs = self.config.resolved_graphs(self.device)
        if self.device.type == "cuda":
            check_compiler(compiler())
            torch.cuda.set_device(self.device)
        trace = Trace(self.config.nvtx)
        checkpoint = (
            model if isinstance(model, Checkpoint) else open_checkpoint(check_path("model", model))
        )
        self.architecture = checkpoint.architecture
        self.dtype = self._choose_dtype()
        self.tokenizer = _choose_tokenizer(tokenizer, checkpoint)
        self.max_seq_len = self._choose_max_seq_len()
        self._intake = RequestIntake(
            self.tokenizer,
            self.architecture.vocab_size,
            self.max_seq_len,
            checkpoint.eos_token_ids,
        )
        ladder = self.config.ladder()
        shapes = self.architecture.parameter_shapes().values()
        self.memory = MemoryManager(
            self.architecture,
            self._memory_config(len(ladder.sizes)),
            sum(torch.Size(shape).numel() for shape in shapes) * self.dtype.itemsize,
            self.dtype,
            self.device,
        )
        with trace.range("load"):
            decoder = Decoder(
                self.architecture, checkpoint.source, self.max_seq_len, self.dtype, self.device
            )
        self._registry = AdapterRegistry(self.memory.adapters, self.config.max_cpu_loras)
        self._scheduler = Scheduler(
            self.memory.pages,
            self._registry,
            self.config.max_batch_size,
            self.config.prefill_chunk_tokens,
        )
        backend = "torch" if self.config.lora_backend == "torch" else "sgemm"
        self.runner = ModelRunner(
            decoder, self.memory, backend, graphs, ladder, trace, self.config.debug
        )
        self.memory.budget.record("graphs", self.runner.stats.capture_bytes)
        self._graphs = graphs
        self._trace = trace
        self._requests: dict[str, Request] = {}
        self._in_flight: list[InFlight] = []
        self._undelivered: list[RequestOutput] = []
        self._ordinal = 0
        self._next_id = 0
        for name, path in (adapters or {}).items():
            self.load_adapter(name, path)

    # Requests

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        adapter: str | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt (text or token ids); returns the request's id.

        Raises RequestError, UnknownAdapterError or CapacityError; nothing is queued then.
        """
        with self._lock:
            request = self._check(prompt, sampling_params, adapter, request_id)
            self._admit(request)
            return request.request_id

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Launch one step and read the one before; returns the requests that advanced."""
        with self._lock:
            self._check_open()
            advanced, self._undelivered = self._undelivered, []
            return advanced + self._step()

    def generate(
        self,
        prompts: Prompt | Items[Prompt],
        sampling_params: SamplingParams | Items[SamplingParams] | None = None,
        adapters: str | Items[str | None] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Decode all prompts to their ends; outputs are in the prompts' order.

        All are checked before any is queued. What other requests produce meanwhile is kept for
        the next `step()`.
        """
        prompt_list = as_prompts(prompts)
        count = len(prompt_list)
        params = one_each("sampling_params", sampling_params, SamplingParams, count)
        names = one_each("adapters", adapters, str, count)
        with self._lock:
            requests = [
                self._check(prompt, param, name, None)
                for prompt, param, name in zip(prompt_list, params, names, strict=True)
            ]
            for request in requests:
                self._admit(request)
        ids = {request.request_id for request in requests}
        outputs: dict[str, RequestOutput] = {}
        try:
            with tqdm(total=count, disable=not progress, unit="request") as bar:
                while len(outputs) < count:
                    for output in self._step_for(ids):
                        if output.finished:
                            outputs[output.request_id] = output
                            bar.update()
        finally:
            for request_id in ids - outputs.keys():
                self.abort(request_id)
        return [outputs[request.request_id] for request in requests]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        adapter: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Decode one prompt, yielding all so far whenever it advanced. Leaving early aborts it."""
        request_id = self.add_request(prompt, sampling_params, adapter)
        return self._stream(request_id)

    def abort(self, request_id: str) -> bool:
        """End a request where it stands; True if it was waiting or running."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None:
                return False
            self._end(request, None)
            self._undelivered.append(request.output())
            return True

    def has_unfinished(self) -> bool:
        """Whether a call of `step()` has anything left to do or to return."""
        with self._lock:
            return bool(self._requests or self._in_flight or self._undelivered)

    # Adapters

    def load_adapter(
        self, name: str, path: str | PathLike[str], *, pinned: bool = False
    ) -> AdapterInfo:
        """Register a PEFT directory under `name`; running requests go on meanwhile.

        Its files are read once, here. Raises AdapterError or CapacityError; nothing stays then.
        """
        self._check_open()
        with self._lock:
            self._registry.check_room(name)
        with self._trace.range("adapter load"):
            weights = read_adapter(
                check_path("path", path), self.architecture, self.config.max_lora_rank
            )
            packed = pack_adapter(weights, self.dtype, pinned=self.device.type == "cuda")
            with self._lock:
                return self._registry.register(name, packed, pinned).info()

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests of `name`; those that run finish on it, then its slot is free."""
        with self._lock:
            self._registry.unload(name)

    def adapters(self) -> list[AdapterInfo]:
        """Every adapter that is registered, and those that still drain."""
        with self._lock:
            return self._registry.infos()

    # The engine itself

    def stats(self) -> EngineStats:
        """Counts since the start."""
        with self._lock:
            graphs, pages = self.runner.stats, self.memory.pages
            return EngineStats(
                graphs=self._graphs,
                captured_batch_sizes=tuple(sorted(key.batch_size for key in graphs.captured)),
                replays=sum(graphs.replays.values()),
                replays_by_batch_size={k.batch_size: n for k, n in graphs.replays.items()},
                eager_fallbacks=graphs.eager_fallbacks,
                padded_rows=graphs.padded_rows,
                prefill_chunks=self.runner.prefill.chunks_run,
                host_to_device_copies=self.runner.host_to_device_copies,
                kv_pages_used=pages.used_pages,
                kv_pages_free=pages.free_pages,
                adapter_loads=self._registry.loads,
                adapter_evictions=self._registry.evictions,
                preemptions=self._scheduler.preemptions,
                capture_seconds=graphs.capture_seconds,
                capture_bytes=graphs.capture_bytes,
                memory=self.memory.budget.table(),
            )

    def close(self) -> None:
        """Free everything. Requests that are unfinished are lost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.runner.close()
            self._requests.clear()
            self._in_flight.clear()
            del self.runner, self._scheduler, self._registry, self.memory
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Steps

    def _step(self) -> list[RequestOutput]:
        """Plan, launch, then read the results of the launches before."""
        touched: dict[str, Request] = {}
        plan = self._scheduler.plan(lambda: self._collect(touched))
        for sequence, error in plan.refused:
            self._end(sequence.request, error)
            touched[sequence.request.request_id] = sequence.request
        owed, self._in_flight = self._in_flight, []
        self._in_flight = owed + self.runner.launch(plan)
        self._collect(touched, len(owed))
        if self._scheduler.idle:
            self._collect(touched)  # rows of ended sequences: nobody waits for them
            self._ordinal = 0
        return [request.output() for request in touched.values()]

    def _collect(self, touched: dict[str, Request], count: int | None = None) -> None:
        """Read the oldest `count` launches in flight, or all."""
        count = len(self._in_flight) if count is None else count
        flights, self._in_flight = self._in_flight[:count], self._in_flight[count:]
        for flight in flights:
            results = flight.readback.wait()
            now = time.perf_counter()
            for row, sequence in enumerate(flight.sequences):
                if sequence.finished:
                    continue  # ended while this step was already under way
                request = sequence.request
                top = None
                if request.params.logprobs:
                    top = results.top(row, request.params.logprobs)
                sequence.append(results.token_ids[row], results.logprobs[row], top)
                self._scheduler.key_pages(sequence)
                request.metrics.first_token_time = request.metrics.first_token_time or now
                touched[request.request_id] = request
                if sequence.finished:
                    self._scheduler.release(sequence)
                    self._forget_if_finished(request)

    def _end(self, request: Request, error: EngineError | None) -> None:
        """End whatever of `request` is unfinished: aborted, or broken by `error`."""
        request.error = error
        for sequence in request.sequences:
            if not sequence.finished:
                sequence.finish("abort")
                self._scheduler.release(sequence)
        self._forget_if_finished(request)

    def _forget_if_finished(self, request: Request) -> None:
        if request.finished and self._requests.pop(request.request_id, None) is not None:
            request.metrics.finished_time = time.perf_counter()
            if request.adapter is not None:
                self._registry.remove_request(request.adapter)

    def _step_for(self, ids: set[str]) -> list[RequestOutput]:
        """One step; the outputs of `ids`. Those of others wait for the next `step()`."""
        with self._lock, torch.inference_mode():
            self._check_open()
            waiting, self._undelivered = self._undelivered, []
            outputs = waiting + self._step()
            mine = [output for output in outputs if output.request_id in ids]
            self._undelivered += [output for output in outputs if output.request_id not in ids]
            return mine

    def _stream(self, request_id: str) -> Iterator[RequestOutput]:
        finished = False
        try:
            while not finished:
                for output in self._step_for({request_id}):
                    finished = output.finished
                    yield output
        finally:
            if not finished and not self._closed:
                self.abort(request_id)

    def _check(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        adapter_name: str | None,
        request_id: str | None,
    ) -> Request:
        """A request that can be served, not yet queued."""
        self._check_open()
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r} is already waiting or running")
        request = self._intake.request(prompt, params, request_id or self._new_id())
        self._scheduler.check_fits(
            len(request.prompt_ids) + request.params.max_tokens - 1, request.request_id
        )
        if adapter_name is not None:
            request.adapter = self._registry.find(adapter_name)
        return request

    def _admit(self, request: Request) -> None:
        if request.params.seed is None:
            request.seed = derived_seed(self.config.seed, self._ordinal)
        self._ordinal += 1
        if request.adapter is not None:
            self._registry.add_request(request.adapter)
        self._requests[request.request_id] = request
        for index in range(request.params.n):
            detokenizer = self.tokenizer.detokenizer() if self.tokenizer else None
            request.sequences.append(Sequence(request, index, detokenizer))
            self._scheduler.add(request.sequences[-1])

    def _new_id(self) -> str:
        while (name := str(self._next_id)) in self._requests:
            self._next_id += 1
        self._next_id += 1
        return name

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the engine is closed")

    def _choose_dtype(self) -> torch.dtype:
        if self.config.dtype is not None:
            return DTYPES[self.config.dtype]
        return self.architecture.dtype if self.device.type == "cuda" else torch.float32

    def _choose_max_seq_len(self) -> int:
        limit = self.architecture.max_position
        if self.config.max_seq_len is None:
            return min(limit, 4096)
        if self.config.max_seq_len > limit:
            raise RequestError(
                f"max_seq_len={self.config.max_seq_len}: the model goes to {limit} positions"
            )
        return self.config.max_seq_len

    def _memory_config(self, num_graphs: int) -> MemoryConfig:
        config = self.config
        return MemoryConfig(
            max_batch_size=config.max_batch_size,
            max_seq_len=self.max_seq_len,
            max_loras=config.max_loras,
            max_lora_rank=config.max_lora_rank,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            page_size=PAGE_SIZE,
            num_graphs=num_graphs,
            memory_fraction=config.memory_fraction,
            lora_memory_bytes=config.lora_memory_bytes,
            kv_cache_tokens=config.kv_cache_tokens,
        )


def _choose_tokenizer(tokenizer: Any, checkpoint: Checkpoint) -> Tokenizer | None:
    if tokenizer is MODELS_TOKENIZER:
        source = checkpoint.tokenizer_source
        return None if source is None else load_tokenizer(source)
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    return load_tokenizer(check_path("tokenizer", tokenizer))
