"""The engine: prompts in, outputs out. What users call, and the lock around it.

Builds the parts in order and checks what is asked; `engine.step_loop` does the work.
"""

import threading
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from os import PathLike
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from engine.adapter_files import read_adapter
from engine.adapter_registry import AdapterRegistry
from engine.checkpoint import Checkpoint, open_checkpoint
from engine.compiler_check import check_compiler
from engine.config import (
    EngineConfig,
    cache_directory,
    check_adapters,
    check_path,
    compiler,
    is_measured,
)
from engine.decoder import Decoder
from engine.device_scope import DeviceScope
from engine.errors import RequestError
from engine.model_runner import ModelRunner
from engine.outputs import AdapterInfo, EngineStats, RequestOutput
from engine.product_choice import choose_products
from engine.prompts import Prompt, as_prompts, one_each
from engine.request import Request
from engine.request_intake import RequestIntake
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.settings import MODELS_TOKENIZER, Settings
from engine.step_loop import StepLoop
from engine.trace import Trace
from memory.budget import Budget
from memory.manager import MemoryManager
from memory.packed_adapter import pack_adapter


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
        self._graphs = self.config.resolved_graphs(self.device)
        named = check_adapters(adapters)
        if self.device.type == "cuda":
            check_compiler(compiler())
        self._trace = Trace(self.config.nvtx)
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
        settings = Settings.of(self.config, checkpoint, self.device, tokenizer)
        self.architecture = checkpoint.architecture
        self.dtype = settings.dtype
        self.max_seq_len = settings.max_seq_len
        self.tokenizer = settings.tokenizer
        self._intake = RequestIntake(
            self.tokenizer,
            self.architecture.vocab_size,
            self.max_seq_len,
            checkpoint.eos_token_ids,
        )
        self._scope = DeviceScope(self.device)
        with self._scope.entered(), torch.inference_mode(False):
            self._build(checkpoint, settings)
        self._next_id = 0
        try:
            for name, path in named.items():
                self.load_adapter(name, path)
        except BaseException:
            self.close()
            raise

    def _build(self, checkpoint: Checkpoint, settings: Settings) -> None:
        """Allocate everything, load the weights and capture the graphs."""
        shapes = self.architecture.parameter_shapes().values()
        weight_bytes = sum(torch.Size(shape).numel() for shape in shapes) * self.dtype.itemsize
        budget = Budget.of_device(self.device, settings.memory.memory_fraction)
        budget.plan("weights", weight_bytes, "dtype")
        with self._trace.range("load"):
            decoder = Decoder(
                self.architecture, checkpoint.source, self.max_seq_len, self.dtype, self.device
            )
        budget.record("weights", decoder.weights.num_bytes)
        with self._trace.range("measure"):
            if is_measured():
                choose_products(decoder.weights, self.device, cache_directory())
        self.memory = MemoryManager(
            self.architecture, settings.memory, budget, self.dtype, self.device
        )
        self._registry = AdapterRegistry(self.memory.adapters, self.config.max_cpu_loras)
        self._scheduler = Scheduler(
            self.memory.pages,
            self._registry,
            self.config.max_batch_size,
            self.config.prefill_chunk_tokens,
        )
        self.runner = ModelRunner(
            decoder,
            self.memory,
            settings.lora_backend,
            self._graphs,
            self.config.ladder(),
            self._trace,
            self.config.debug,
        )
        self.memory.budget.record("graphs", self.runner.stats.capture_bytes)
        self._loop = StepLoop(self._scheduler, self.runner, self._registry, self.config.seed)

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
            request.for_step = True
            self._admit(request)
            return request.request_id

    def step(self) -> list[RequestOutput]:
        """Launch one step and read the one before; returns the requests that advanced."""
        with self._lock:
            self._advance()
            return [request.output() for request in self._loop.take_advanced()]

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
        self._check_open()
        prompt_list = as_prompts(prompts)
        params = one_each("sampling_params", sampling_params, SamplingParams, len(prompt_list))
        names = one_each("adapters", adapters, str, len(prompt_list))
        each = enumerate(zip(prompt_list, params, names, strict=True))
        pending: list[Request] = []
        try:
            with self._lock:
                requests = [self._check(*given, label=f"prompts[{index}]") for index, given in each]
                pending += requests[::-1]
                for request in requests:
                    self._admit(request)
            with tqdm(total=len(requests), disable=not progress, unit="request") as bar:
                while pending:
                    if pending[-1].finished:
                        pending.pop()
                        bar.update()
                    else:
                        self._advance()
        finally:
            for request in pending:
                self._abandon(request)
        return [request.output() for request in requests]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        adapter: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Decode one prompt, yielding all so far whenever it advanced. Leaving early aborts it."""
        with self._lock:
            request = self._check(prompt, sampling_params, adapter)
            self._admit(request)
        outputs = self._stream(request)
        next(outputs)  # enter it: from here on, dropping the iterator aborts the request
        return outputs

    def abort(self, request_id: str) -> bool:
        """End a request where it stands; True if it was waiting or running."""
        with self._on_device():
            known = isinstance(request_id, str) and not self._closed
            if not known or request_id not in self._loop.requests:
                return False
            self._loop.end(self._loop.requests[request_id])
            return True

    def has_unfinished(self) -> bool:
        """Whether a call of `step()` has anything left to do or to return."""
        with self._lock:
            return not self._closed and self._loop.busy

    # Adapters

    def load_adapter(
        self, name: str, path: str | PathLike[str], *, pinned: bool = False
    ) -> AdapterInfo:
        """Register a PEFT directory under `name`; running requests go on meanwhile.

        Its files are read once, here. Raises AdapterError or CapacityError; nothing stays then.
        """
        if not isinstance(pinned, bool):
            raise RequestError(f"pinned={pinned!r} is not True or False")
        with self._lock:
            self._check_open()
            self._registry.check_room(name)
        with self._trace.range("adapter load"):
            weights = read_adapter(
                check_path("path", path), self.architecture, self.config.max_lora_rank, self.dtype
            )
            packed = pack_adapter(weights, self.dtype, pinned=self.device.type == "cuda")
            with self._on_device():
                self._check_open()
                return self._registry.register(name, packed, pinned).info()

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests of `name`; those that run finish on it, then its slot is free."""
        with self._on_device():
            self._check_open()
            self._registry.unload(name)

    def adapters(self) -> list[AdapterInfo]:
        """Every adapter that is registered, and those that still drain."""
        with self._lock:
            self._check_open()
            return self._registry.infos()

    # The engine itself

    def stats(self) -> EngineStats:
        """Counts since the start."""
        with self._lock:
            self._check_open()
            graphs, pages = self.runner.stats, self.memory.pages
            by_batch_size = dict.fromkeys((key.batch_size for key in graphs.replays), 0)
            for key, count in graphs.replays.items():  # of a size with adapters and without
                by_batch_size[key.batch_size] += count
            return EngineStats(
                graphs=self._graphs,
                captured_batch_sizes=tuple(sorted({key.batch_size for key in graphs.captured})),
                replays=sum(graphs.replays.values()),
                replays_by_batch_size=by_batch_size,
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
        with self._on_device():
            if self._closed:
                return
            self._closed = True
            self._scope.wait()
            self.runner.close()
            del self._loop, self.runner, self._scheduler, self._registry, self.memory
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def __enter__(self) -> "Engine":
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Steps

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """The lock, and this engine's device and stream, whatever thread this is."""
        with self._lock, self._scope.entered():
            yield

    @torch.inference_mode()
    def _advance(self) -> None:
        with self._on_device():
            self._check_open()
            self._loop.step()

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        output = request.output()
        try:
            yield output  # to `stream` itself
            while not output.finished:
                seen = output.num_tokens
                if request.num_tokens == seen and not request.finished:
                    self._advance()
                with self._lock:
                    output = request.output()
                if output.finished or output.num_tokens > seen:
                    yield output
        finally:
            self._abandon(request)

    def _abandon(self, request: Request) -> None:
        with self._on_device():
            if not self._closed:
                self._loop.abandon(request)

    def _check(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        adapter_name: str | None,
        request_id: str | None = None,
        label: str = "prompt",
    ) -> Request:
        """A request that can be served, not yet queued."""
        self._check_open()
        request_id = self._new_id() if request_id is None else request_id
        request = self._intake.request(prompt, params, request_id, label)
        if request_id in self._loop.requests:
            raise RequestError(f"request_id={request_id!r} is already waiting or running")
        longest = len(request.prompt_ids) + request.params.max_tokens - 1
        self._scheduler.check_fits(longest, request_id)
        if adapter_name is not None:
            request.adapter = self._registry.find(adapter_name)
        return request

    def _admit(self, request: Request) -> None:
        self._loop.admit(request, self.tokenizer.detokenizer if self.tokenizer else None)

    def _new_id(self) -> str:
        while (name := str(self._next_id)) in self._loop.requests:
            self._next_id += 1
        self._next_id += 1
        return name

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the engine is closed")
