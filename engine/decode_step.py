"""One decode step as a callable over static buffers: what a graph records."""

import torch

from engine.attention import DecodeAttention
from engine.decoder import Decoder, StepTokens
from engine.lora_delta import LoRABackend, LoRADelta
from engine.side_branch import SideBranch
from engine.trace import Trace
from graphs.graph_key import GraphKey
from kernels.logprobs import logprobs
from kernels.sampling import sample
from kernels.sampling_tables import NUM_LOGPROBS
from kernels.step_inputs import gather_step_inputs
from memory.lora_batch_info import LoRABatchInfo
from memory.manager import MemoryManager
from memory.request_tables import RequestTables
from memory.step_buffers import StepBuffers
from memory.step_outputs import StepOutputs
from memory.workspace import Workspace


class DecodeStep:
    """Gathers the rows' state, runs the decoder, draws a token per row, writes the state back.

    The next step's inputs are then on the device already: a steady batch needs no upload. Of
    two steps of one batch size, one runs no adapters: for batches in which no row has one.
    """

    def __init__(
        self,
        decoder: Decoder,
        memory: MemoryManager,
        lora_backend: LoRABackend,
        side: SideBranch,
        trace: Trace,
    ) -> None:
        self._decoder, self._memory, self._lora_backend = decoder, memory, lora_backend
        self._side, self._trace = side, trace

    def __call__(self, buffers: StepBuffers, key: GraphKey) -> None:
        memory, tables, ws = self._memory, self._memory.tables, buffers.workspace
        gather_step_inputs(
            buffers.row_request,
            tables.last_token,
            tables.positions,
            tables.adapter_slots,
            tables.block_tables,
            tables.sampling_ints[:, NUM_LOGPROBS],
            memory.config.page_size,
            buffers.token_ids,
            buffers.positions,
            buffers.seq_lens,
            buffers.kv_slots,
            buffers.lora.row_adapter,
            buffers.row_num_logprobs,
        )
        lora = None
        if key.lora:
            lora = lora_delta(
                memory, self._lora_backend, self._side, buffers.lora, buffers.adapter_enabled, ws
            )
        attention = DecodeAttention(
            tables.block_tables,
            buffers.row_request,
            buffers.seq_lens,
            buffers.partial_out,
            buffers.partial_lse,
            ws.attention_arrivals,
        )
        tokens = StepTokens(
            buffers.token_ids, buffers.positions, buffers.kv_slots, row_mask=buffers.seq_lens
        )
        self._decoder.forward(tokens, attention, lora, memory.kv_cache, ws)
        self._decoder.logits(ws.hidden, ws.logits)
        with self._trace.range("sample"):
            draw(tables, ws, buffers.row_request, buffers.row_num_logprobs, buffers.outputs)


def lora_delta(
    memory: MemoryManager,
    backend: LoRABackend,
    side: SideBranch,
    info: LoRABatchInfo,
    adapter_enabled: torch.Tensor,
    ws: Workspace,
) -> LoRADelta | None:
    """The step's LoRA with its metadata derived, or None on an engine without adapter slots."""
    if memory.config.max_loras == 0:
        return None
    store = memory.adapters
    delta = LoRADelta(
        backend=backend,
        side=side,
        info=info,
        tables=store.tables,
        adapter_enabled=adapter_enabled,
        arena=store.arena,
        arena_address=store.arena_address,
        shrunk=ws.shrunk,
        arrivals=ws.shrink_arrivals,
        max_rank=memory.config.max_lora_rank,
    )
    delta.derive_metadata()
    return delta


def draw(
    tables: RequestTables,
    ws: Workspace,
    row_request: torch.Tensor,
    row_num_logprobs: torch.Tensor,
    outputs: StepOutputs,
) -> None:
    """From `ws.logits` [B, V], draw a token per row, record it in the tables and the outputs,
    with its logprob and those of the likeliest tokens where a row asks for them."""
    sample(
        ws.logits,
        row_request,
        tables.sampling_floats,
        tables.sampling_ints,
        tables.seeds,
        tables.token_state,
        tables.logit_bias,
        tables.last_token,
        tables.positions,
        ws.scratch,
        ws.sampling_partials,
        outputs.sampled,
        outputs.normalizer,
    )
    logprobs(
        ws.logits,
        outputs.sampled,
        row_num_logprobs,
        outputs.normalizer,
        outputs.target_logprob,
        outputs.top_values,
        outputs.top_ids,
    )
