"""Launches what the scheduler planned: admissions, prefill chunks, the decode replay.

Between the scheduler's lists and the device's tensors; decides nothing.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from engine.decode_step import DecodeStep
from engine.decoder import Decoder
from engine.decoder_weights import Projection
from engine.lora_delta import LoRABackend
from engine.prefill import Prefill
from engine.request import Sequence
from engine.request_admission import RequestAdmission
from engine.scheduler import StepPlan
from engine.side_branch import SideBranch
from engine.trace import Trace
from engine.warm_up_sizes import eager_batch_sizes, prefill_sizes, product_sizes
from graphs.graph_capturer import Backend, GraphCapturer
from graphs.graph_key import GraphKey
from graphs.graph_runner import GraphRunner
from graphs.graph_stats import GraphStats
from graphs.ladder import Ladder
from memory.capture_state import CaptureState
from memory.manager import MemoryManager
from memory.readback import Readback, ReadbackRing
from memory.step_buffers import StepBuffers


@dataclass(frozen=True)
class InFlight:
    """A launch whose results have not been read: the sequence of each row."""

    sequences: list[Sequence]
    readback: Readback


class ModelRunner:
    """Owns the captured graphs."""

    def __init__(
        self,
        decoder: Decoder,
        memory: MemoryManager,
        lora_backend: LoRABackend,
        graphs: Backend,
        ladder: Ladder,
        trace: Trace,
        debug: bool,
    ) -> None:
        self.memory = memory
        self.trace = trace
        self._side = side = SideBranch(memory.device)
        self._step = DecodeStep(decoder, memory, lora_backend, side, trace)
        readback = ReadbackRing(memory.workspace.logits.shape[0], memory.device)
        self._readback = readback
        self.prefill = Prefill(decoder, memory, lora_backend, side, readback, trace)
        self._admission = RequestAdmission(memory.tables, memory.device)
        self._staged: tuple[int, ...] = ()
        self._capture(graphs, ladder, debug, list(decoder.weights.projections()))

    @property
    def stats(self) -> GraphStats:
        return self.graphs.stats

    @property
    def host_to_device_copies(self) -> int:
        return self._admission.copies + self.memory.staging.copies

    def launch(self, plan: StepPlan) -> list[InFlight]:
        """Launch a plan without waiting for it; what it will draw is in the result.

        Whatever breaks it off, what is launched next comes after all that it launched.
        """
        try:
            return self._launch(plan)
        except BaseException:
            self._side.join()  # it may have broken off between a fork and its join
            raise

    def _launch(self, plan: StepPlan) -> list[InFlight]:
        flights = []
        self._admission.admit(plan.admitted)
        self._admission.write_pages(plan.page_writes)
        if plan.prefill:
            with self.trace.range("prefill"):
                drawn = self.prefill.run(plan.prefill)
            if drawn is not None:
                flights.append(InFlight(*drawn))
        if plan.decode:
            flights.append(self._decode(plan.decode))
        return flights

    @torch.inference_mode()
    def step_eagerly(self, rows: int, lora: bool) -> None:
        """The step of the bucket of `rows` once more, outside its graph and on the batch staged
        last: for measurements, which count what it launches."""
        self._step(self.graphs.buffers_for(rows), GraphKey(rows, lora))

    def close(self) -> None:
        self.graphs.close()

    def _decode(self, sequences: list[Sequence]) -> InFlight:
        lora = any(sequence.request.adapter is not None for sequence in sequences)
        with self.trace.range("replay"):
            buffers = self.graphs.run(
                len(sequences), lambda buffers: self._stage(buffers, sequences), lora
            )
        with_top = any(sequence.request.params.logprobs for sequence in sequences)
        readback = self._readback.start(buffers.outputs, len(sequences), with_top)
        return InFlight(list(sequences), readback)

    def _stage(self, buffers: StepBuffers, sequences: Items[Sequence]) -> None:
        """Swap in the real masks and rows, where they are not those of the last step."""
        padding = [self.memory.tables.dummy] * (buffers.batch_size - len(sequences))
        slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
        values = (*self.memory.adapters.enabled, *slots, *padding)
        if values != self._staged:
            self._staged = ()  # until the upload is done, nobody knows what lies there
            with self.trace.range("stage"):
                self.memory.staging.upload(values, buffers.inputs)
            self._staged = values

    def _capture(
        self, backend: Backend, ladder: Ladder, debug: bool, projections: list[Projection]
    ) -> None:
        memory = self.memory
        loras, max_rank = memory.config.max_loras, memory.config.max_lora_rank
        on_gpu = memory.device.type != "cpu"  # where nothing is compiled, one size will do
        state = CaptureState(memory.tables, memory.adapters)
        with self.trace.range("capture"):
            with state.synthetic():
                most = memory.config.max_seq_len * memory.config.max_batch_size
                most = min(memory.config.prefill_chunk_tokens, most)
                products = product_sizes(projections, loras, max_rank, most)
                for tokens in prefill_sizes(memory.dims.moe, most, products) if on_gpu else [1]:
                    self.prefill.warm_up(tokens)
            capturer = GraphCapturer(
                backend,
                self._step,
                memory.step_buffers,
                state,
                prepare=state.stage,
                shared_tensors=self._shared_tensors,
                poison=scratch_tensors if debug else None,
            )
            variants = (False, True) if loras else (False,)
            captured = capturer.capture(
                GraphKey(size, lora) for size in ladder.sizes for lora in variants
            )
            with state.synthetic(), torch.inference_mode():
                largest, most = ladder.sizes[-1], memory.config.max_batch_size
                products = product_sizes(projections, loras, max_rank, most)
                sizes = eager_batch_sizes(memory.dims.moe, largest, most, products)
                for rows in sizes if on_gpu else []:
                    buffers = memory.step_buffers(rows)
                    state.stage(buffers)
                    for lora in variants:
                        self._step(buffers, GraphKey(rows, lora))
        self.graphs = GraphRunner(
            captured, self._step, memory.step_buffers, capturer.stats, debug=debug
        )

    def _shared_tensors(self) -> dict[str, torch.Tensor]:
        memory = self.memory
        groups = {
            "tables": memory.tables.tensors(),
            "adapters": {"arena": memory.adapters.arena, **memory.adapters.tables.tensors()},
            "cache": memory.kv_cache.tensors(),
        }
        return {f"{g}.{name}": t for g, named in groups.items() for name, t in named.items()}


def scratch_tensors(buffers: StepBuffers) -> list[torch.Tensor]:
    """What every step writes before it reads: poisoned before each tape replay in debug mode."""
    inputs = (buffers.token_ids, buffers.positions, buffers.seq_lens, buffers.kv_slots)
    constant = ("pair_weight", "moe.lora.row_indptr")
    named = {**buffers.lora.tensors(), **buffers.workspace.tensors()}
    return [
        *inputs,
        buffers.row_num_logprobs,
        *(
            tensor
            for name, tensor in named.items()
            if name not in constant and not name.endswith("arrivals")
        ),
        *buffers.outputs.tensors().values(),
    ]
