"""Runs prompt tokens through the decoder: eager launches between replays, chunk by chunk.

A chunk packs several sequences; the ones whose prompt ends in it draw their first token.
"""

from collections.abc import Sequence as Items

import torch

from engine.attention import ExtendAttention
from engine.decode_step import draw, lora_delta
from engine.decoder import Decoder, StepTokens
from engine.lora_delta import LoRABackend
from engine.request import Sequence
from engine.scheduler import PrefillChunk
from engine.side_branch import SideBranch
from engine.trace import Trace
from kernels.logprobs import logprobs
from memory.manager import MemoryManager
from memory.page_pool import DUMMY_PAGE
from memory.readback import Readback, ReadbackRing
from memory.step_buffers import PrefillBuffers


class Prefill:
    """Owns no memory: it borrows the manager's prefill buffers for each chunk."""

    def __init__(
        self,
        decoder: Decoder,
        memory: MemoryManager,
        lora_backend: LoRABackend,
        side: SideBranch,
        readback: ReadbackRing,
        trace: Trace,
    ) -> None:
        self._decoder, self._memory, self._lora_backend = decoder, memory, lora_backend
        self._side, self._readback = side, readback
        self._trace = trace
        self.chunks_run = 0

    def run(self, chunks: Items[PrefillChunk]) -> tuple[list[Sequence], Readback] | None:
        """Launch `chunks`; the sequences that draw, in row order, and their results under way."""
        drawing = [chunk for chunk in chunks if chunk.draws]
        tokens = sum(chunk.count for chunk in chunks)
        scored = any(_scores(chunk.sequence) for chunk in chunks)
        most_rows = self._memory.workspace.logits.shape[0]
        logit_rows = min(tokens, most_rows) if scored else len(drawing)
        buffers = self._memory.prefill_buffers(tokens, len(chunks), logit_rows, len(drawing))
        self._memory.staging.upload(self._pack(chunks, drawing), buffers.packed)
        self._forward(buffers, max(chunk.count for chunk in chunks))
        self.chunks_run += 1
        if scored:
            self._score_prompts(chunks, buffers)
        if not drawing:
            return None
        ws, rows = buffers.workspace, len(drawing)
        hidden = ws.delta[:rows]  # free again after the last layer
        torch.index_select(ws.hidden, 0, buffers.logit_rows, out=hidden)
        ws = ws.view(rows, rows)
        self._decoder.logits(hidden, ws.logits)
        outputs = buffers.outputs.view(rows)
        with self._trace.range("sample"):
            draw(self._memory.tables, ws, buffers.row_request, buffers.row_num_logprobs, outputs)
        sequences = [chunk.sequence for chunk in drawing]
        with_top = any(s.request.params.logprobs for s in sequences)
        return sequences, self._readback.start(outputs, rows, with_top)

    def warm_up(self, tokens: int) -> None:
        """Run `tokens` tokens of the dummy request, so that kernels are compiled before serving.

        A chunk packs several sequences where `tokens` is more than the longest has.
        """
        memory = self._memory
        rows = min(tokens, memory.tables.num_slots - 1)
        longest = min(tokens, memory.config.max_seq_len)
        counts = [longest] * (tokens // longest)
        counts += [tokens % longest] if tokens % longest else []
        buffers = memory.prefill_buffers(tokens, len(counts), rows, rows)
        buffers.packed.zero_()
        buffers.adapter_enabled.fill_(1)
        buffers.lora.row_adapter.fill_(0 if memory.config.max_loras else -1)
        for tensor in (buffers.seq_request, buffers.row_request):
            tensor.fill_(memory.tables.dummy)
        buffers.seq_lens.copy_(torch.tensor(counts, device="cpu"))
        torch.cumsum(buffers.seq_lens, 0, dtype=torch.int32, out=buffers.q_indptr[1:])
        self._forward(buffers, longest)
        self._decoder.logits(buffers.workspace.hidden[:rows], buffers.workspace.logits)
        ws, outputs = buffers.workspace.view(rows, rows), buffers.outputs
        draw(memory.tables, ws, buffers.row_request, buffers.row_num_logprobs, outputs)
        logprobs(  # as prompts are scored
            ws.logits,
            outputs.sampled,
            buffers.row_num_logprobs,
            None,
            outputs.target_logprob,
            outputs.top_values,
            outputs.top_ids,
        )

    def _forward(self, buffers: PrefillBuffers, max_q_len: int) -> None:
        memory = self._memory
        lora = lora_delta(
            memory,
            self._lora_backend,
            self._side,
            buffers.lora,
            buffers.adapter_enabled,
            buffers.workspace,
        )
        attention = ExtendAttention(
            memory.tables.block_tables,
            buffers.seq_request,
            buffers.q_indptr,
            buffers.seq_lens,
            max_q_len,
        )
        tokens = StepTokens(buffers.token_ids, buffers.positions, buffers.kv_slots, row_mask=None)
        self._decoder.forward(tokens, attention, lora, memory.kv_cache, buffers.workspace)

    def _pack(self, chunks: Items[PrefillChunk], drawing: Items[PrefillChunk]) -> list[int]:
        """The values of `PrefillBuffers.packed`, in its order."""
        page_size = self._memory.config.page_size
        token_ids: list[int] = []
        positions: list[int] = []
        kv_slots: list[int] = []
        row_adapter: list[int] = []
        q_indptr = [0]
        ends: dict[int, int] = {}
        for chunk in chunks:
            sequence, stop = chunk.sequence, chunk.start + chunk.count
            token_ids += sequence.token_ids[chunk.start : stop]
            for position in range(chunk.start, stop):
                page = sequence.pages[position // page_size]
                assert page != DUMMY_PAGE
                kv_slots.append(page * page_size + position % page_size)
            positions += range(chunk.start, stop)
            adapter = sequence.request.adapter
            slot = adapter.slot if adapter is not None and adapter.slot is not None else -1
            row_adapter += [slot] * chunk.count
            q_indptr.append(q_indptr[-1] + chunk.count)
            ends[id(sequence)] = q_indptr[-1] - 1
        slots = [_slot(chunk.sequence) for chunk in chunks]
        seq_lens = [chunk.start + chunk.count for chunk in chunks]
        wanted = [chunk.sequence.request.params.logprobs for chunk in drawing]
        return PrefillBuffers.pack(
            [
                self._memory.adapters.enabled,
                token_ids,
                positions,
                kv_slots,
                row_adapter,
                slots,
                seq_lens,
                q_indptr,
                [ends[id(chunk.sequence)] for chunk in drawing],
                [_slot(chunk.sequence) for chunk in drawing],
                [-1 if k is None else k for k in wanted],
            ]
        )

    def _score_prompts(self, chunks: Items[PrefillChunk], buffers: PrefillBuffers) -> None:
        """Logprobs of the prompts' own tokens, for requests that ask for them.

        The head runs over as many rows at a time as decode has logits for; the host waits.
        """
        first = 0
        for chunk in chunks:
            if _scores(chunk.sequence):
                self._score(chunk, first, buffers)
            first += chunk.count

    def _score(self, chunk: PrefillChunk, first: int, buffers: PrefillBuffers) -> None:
        request, ws = chunk.sequence.request, buffers.workspace
        device, count = ws.logits.device, request.params.prompt_logprobs or 0
        if request.prompt_logprobs is None or chunk.start == 0:
            request.prompt_logprobs = [None]
        targets = request.prompt_ids[chunk.start + 1 : chunk.start + chunk.count + 1]
        for start in range(0, len(targets), ws.logits.shape[0]):
            ids = targets[start : start + ws.logits.shape[0]]
            rows = len(ids)
            hidden = ws.hidden[first + start : first + start + rows]
            self._decoder.logits(hidden, ws.logits[:rows])
            outputs = buffers.outputs.view(rows)
            logprobs(
                ws.logits[:rows],
                torch.tensor(ids, dtype=torch.int32, device=device),
                torch.full((rows,), count, dtype=torch.int32, device=device),
                None,
                outputs.target_logprob,
                outputs.top_values,
                outputs.top_ids,
            )
            results = self._readback.start(outputs, rows, with_top=True).wait()
            for row, token in enumerate(ids):
                top = results.top(row, count)
                request.prompt_logprobs.append({**top, token: results.logprobs[row]})


def _scores(sequence: Sequence) -> bool:
    """Whether this sequence's prefill still owes its request prompt logprobs."""
    request = sequence.request
    if request.params.prompt_logprobs is None or sequence.index != 0:
        return False
    return len(request.prompt_logprobs or ()) < len(request.prompt_ids)


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, "only running sequences are launched"
    return sequence.slot
