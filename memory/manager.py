"""Plans the budget and allocates, once, everything whose address a graph will hold."""

from dataclasses import dataclass

import torch

from kernels.attention_tiles import decode_splits
from kernels.linear_arrangement import MOST_PARTS
from kernels.linear_config import ROW_BLOCKS, linear_splits
from kernels.lora_arguments import FEW_PARTS
from kernels.lora_segments import MAX_SPLIT_ROWS, shrink_split_k
from kernels.lora_shrink import shrink_arrivals
from kernels.moe_lora_shrink import SPLIT_PAIRS, moe_shrink_arrivals, moe_shrink_split_k
from kernels.sampling import sampling_partials_shape
from memory.adapter_store import AdapterStore
from memory.adapter_tables import column_ints
from memory.budget import MIB, Budget
from memory.extents import ALIGNMENT_BYTES, aligned
from memory.kv_cache import KVCache, page_bytes
from memory.lora_batch_info import LoRABatchInfo
from memory.lora_targets import EXPERT_TARGETS
from memory.model_dims import ModelDims, adapter_bytes, all_targets, qkv_sizes
from memory.page_pool import PagePool
from memory.request_tables import RequestTables
from memory.staging import StagingRing
from memory.step_buffers import PrefillBuffers, StepBuffers, pack_padded
from memory.step_outputs import StepOutputs
from memory.workspace import Workspace, WorkspaceSizes, workspace_bytes

CPU_KV_BYTES = 1024 * MIB
CPU_ADAPTER_BYTES = 1024 * MIB
GRAPH_BYTES_EACH = 4 * MIB  # a graph's own nodes and library workspaces; compared after capture
STACKED_SLICES = 3  # q, k and v shrink together
STACKED_EXPERT_SLICES = 2  # gate and up of the experts


@dataclass(frozen=True)
class MemoryConfig:
    """The sizes that the engine's keywords fix; bytes and tokens may be left to the budget."""

    max_batch_size: int
    max_seq_len: int
    max_loras: int
    max_lora_rank: int
    prefill_chunk_tokens: int
    page_size: int
    num_graphs: int
    memory_fraction: float
    lora_memory_bytes: int | None
    kv_cache_tokens: int | None


class MemoryManager:
    """Owns the tables, the KV cache, the adapter store, the workspace and the step buffers.

    `budget` is what they share, the weights planned in it already.
    """

    @torch.inference_mode(False)  # written in any mode later, which inference tensors refuse
    def __init__(
        self,
        dims: ModelDims,
        config: MemoryConfig,
        budget: Budget,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.dims, self.config, self.dtype, self.device = dims, config, dtype, device
        self._sizes = self._workspace_sizes()
        self.max_pages = -(-config.max_seq_len // config.page_size) + 1  # the last stays dummy
        self.budget = budget
        self._plan()
        num_pages = self._plan_kv_pages()
        self.tables = RequestTables.allocate(
            config.max_batch_size, self.max_pages, dims.vocab_size, device
        )
        self.workspace = Workspace.allocate(dims, self._sizes, dtype, device)
        self.adapters = AdapterStore(
            dims,
            config.max_loras,
            config.max_lora_rank,
            self.budget.row("adapters").planned_bytes,
            dtype,
            device,
        )
        self.kv_cache = KVCache(dims, num_pages, config.page_size, dtype, device)
        self.pages = PagePool(num_pages, config.page_size)
        rows = config.max_batch_size
        self._step_inputs = torch.zeros(config.max_loras + rows, dtype=torch.int32, device=device)
        self._step_ints = torch.zeros(5, rows, dtype=torch.int32, device=device)
        self._step_lora = LoRABatchInfo.allocate(rows, config.max_loras, device)
        self._step_outputs = StepOutputs.allocate(rows, device)
        self._step_buffers: dict[int, StepBuffers] = {}
        self._prefill_lora = LoRABatchInfo.allocate(self._sizes.rows, config.max_loras, device)
        self._prefill_outputs = StepOutputs.allocate(self._sizes.logit_rows, device)
        packed = config.max_loras + 4 * self._sizes.rows + 6 * rows + 1 + 11 * pack_padded(1)
        self._packed = torch.zeros(packed, dtype=torch.int32, device=device)
        self.staging = StagingRing(packed, device)
        tables = self.tables.tensors() | self.adapters.tables.tensors()
        tables["staged"] = self.adapters.tables.staged
        self.budget.record("tables", _bytes(tables))
        self.budget.record("workspace", self.workspace.bytes)
        self.budget.record("adapters", self.adapters.capacity_bytes)
        self.budget.record("KV cache", _bytes(self.kv_cache.tensors()))

    def step_buffers(self, batch_size: int) -> StepBuffers:
        """The buffers of a decode step of `batch_size` rows: always the same object."""
        if batch_size not in self._step_buffers:
            self._step_buffers[batch_size] = self._view_step(batch_size)
        return self._step_buffers[batch_size]

    def _view_step(self, rows: int) -> StepBuffers:
        heads, loras = self.dims.num_q_heads, self.config.max_loras
        splits = self._splits(rows)
        partials = rows * heads * splits
        token_ids, positions, seq_lens, kv_slots, row_num_logprobs = self._step_ints[:, :rows]
        return StepBuffers(
            batch_size=rows,
            inputs=self._step_inputs[: loras + rows],
            adapter_enabled=self._step_inputs[:loras],
            row_request=self._step_inputs[loras : loras + rows],
            token_ids=token_ids,
            positions=positions,
            seq_lens=seq_lens,
            kv_slots=kv_slots,
            row_num_logprobs=row_num_logprobs,
            partial_out=self.workspace.attention_out[: partials * self.dims.head_dim].view(
                rows, heads, splits, self.dims.head_dim
            ),
            partial_lse=self.workspace.attention_lse[:partials].view(rows, heads, splits),
            lora=self._step_lora.view(rows),
            workspace=self.workspace.view(rows, rows),
            outputs=self._step_outputs.view(rows),
        )

    def prefill_buffers(
        self, tokens: int, sequences: int, logit_rows: int, sampled_rows: int
    ) -> PrefillBuffers:
        """Views for a chunk of `tokens` of `sequences`; `logit_rows` at most need logits at once,
        `sampled_rows` end their prompt."""
        sizes = [self.config.max_loras, tokens, tokens, tokens, tokens]
        sizes += [sequences, sequences, sequences + 1, sampled_rows, sampled_rows, sampled_rows]
        padded = [pack_padded(size) for size in sizes]
        packed = self._packed[: sum(padded)]
        whole = packed.split_with_sizes(padded)
        parts = [part[:size] for part, size in zip(whole, sizes, strict=True)]
        lora = self._prefill_lora.view(tokens)
        lora = LoRABatchInfo(**{**lora.tensors(), "row_adapter": parts[4]})
        return PrefillBuffers(
            packed=packed,
            adapter_enabled=parts[0],
            token_ids=parts[1],
            positions=parts[2],
            kv_slots=parts[3],
            seq_request=parts[5],
            seq_lens=parts[6],
            q_indptr=parts[7],
            logit_rows=parts[8],
            row_request=parts[9],
            row_num_logprobs=parts[10],
            lora=lora,
            workspace=self.workspace.view(tokens, logit_rows),
            outputs=self._prefill_outputs.view(logit_rows),
        )

    def _splits(self, rows: int) -> int:
        sms = 1
        if self.device.type == "cuda":
            sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return decode_splits(rows, self.dims.num_kv_heads, self.config.max_seq_len, sms)

    def _workspace_sizes(self) -> WorkspaceSizes:
        config, dims = self.config, self.dims
        decode_rows = range(1, config.max_batch_size + 1)
        rows = max(config.max_batch_size, config.prefill_chunk_tokens)
        partials = max(n * dims.num_q_heads * self._splits(n) for n in decode_rows)
        shapes = [sampling_partials_shape(n, dims.vocab_size) for n in decode_rows]
        return WorkspaceSizes(
            rows=rows,
            max_loras=config.max_loras,
            logit_rows=config.max_batch_size,
            shrink_numel=self._shrink_numel(rows) if config.max_loras else 0,
            shrink_arrivals=self._shrink_arrivals(rows) if config.max_loras else 0,
            product_numel=self._product_numel(rows),
            attention_numel=partials * dims.head_dim,
            attention_lse_numel=partials,
            attention_arrivals=config.max_batch_size * dims.num_kv_heads,
            sampling_shape=tuple(max(sizes) for sizes in zip(*shapes, strict=True)),
        )

    def _shrink_numel(self, most: int) -> int:
        """Of x Aᵀ in as many parts as its sums are made of, in steps of up to `most` rows."""
        dims, moe = self.dims, self.dims.moe
        linear = [target for target in all_targets(dims) if target not in EXPERT_TARGETS]
        inputs = {dims.target_shape(target)[1] for target in linear}
        rows = max(
            tokens * shrink_split_k(tokens, width)
            for tokens in range(1, most + 1)
            for width in inputs
        )
        if moe is not None:
            inputs = {dims.target_shape(target)[1] for target in EXPERT_TARGETS}
            pairs = range(moe.top_k, most * moe.top_k + 1, moe.top_k)
            rows = max(rows, *(n * moe_shrink_split_k(n, width) for n in pairs for width in inputs))
        in_parts = max(MOST_PARTS, STACKED_SLICES * FEW_PARTS)
        slices = max(rows * STACKED_SLICES, min(most, ROW_BLOCKS[-1]) * in_parts)
        return slices * self.config.max_lora_rank

    def _shrink_arrivals(self, most: int) -> int:
        """Counters of the largest launch that splits the sums of x Aᵀ, in steps of up to `most`
        rows."""
        loras, rank = self.config.max_loras, self.config.max_lora_rank
        needed = shrink_arrivals(min(most, MAX_SPLIT_ROWS), STACKED_SLICES, loras, rank)
        moe = self.dims.moe
        if moe is None:
            return needed
        pairs = min(most * moe.top_k, SPLIT_PAIRS[-1])
        return max(needed, moe_shrink_arrivals(pairs, STACKED_EXPERT_SLICES, rank))

    def _product_numel(self, most: int) -> int:
        """Of the partials of attention's and the MLP's last products, which steps of few rows
        split."""
        hidden, device = self.dims.hidden_size, self.device
        widths = {qkv_sizes(self.dims)[0], self.dims.intermediate_size}
        splits = {
            (rows, linear_splits(rows, hidden, width, self.dtype, device))
            for rows in range(1, min(most, ROW_BLOCKS[-1]) + 1)
            for width in widths
        }
        return max((rows * count * hidden for rows, count in splits if count > 1), default=0)

    def _plan(self) -> None:
        config, budget = self.config, self.budget
        meta = RequestTables.allocate(
            config.max_batch_size, self.max_pages, self.dims.vocab_size, torch.device("meta")
        )
        workspace = workspace_bytes(self.dims, self._sizes, self.dtype)
        num_experts = self.dims.moe.num_experts if self.dims.moe else 0
        column_bytes = 4 * column_ints(self.dims.num_layers, num_experts)
        adapter_tables = column_bytes * (config.max_loras + 1)  # and one that is being written
        tables = _bytes(meta.tensors()) + adapter_tables
        budget.plan("tables", tables, "max_batch_size or max_loras")
        budget.plan("workspace", workspace, "prefill_chunk_tokens, max_batch_size or max_loras")
        graph_bytes = config.num_graphs * GRAPH_BYTES_EACH if self.device.type == "cuda" else 0
        budget.plan("graphs", graph_bytes, "graph_batch_sizes")
        adapters = self._plan_adapter_bytes(budget.left_bytes)
        budget.plan("adapters", adapters, "max_loras, max_lora_rank or lora_memory_bytes")

    def _plan_adapter_bytes(self, left_bytes: int) -> int:
        config = self.config
        if config.max_loras == 0:
            return 0
        if config.lora_memory_bytes is not None:
            return aligned(config.lora_memory_bytes)
        one = adapter_bytes(self.dims, config.max_lora_rank, self.dtype, ALIGNMENT_BYTES)
        limit = CPU_ADAPTER_BYTES if self.device.type == "cpu" else left_bytes // 4
        return aligned(min(config.max_loras * one, max(limit, one)))

    def _plan_kv_pages(self) -> int:
        config = self.config
        one = page_bytes(self.dims, config.page_size, self.dtype)
        useful = config.max_batch_size * (self.max_pages - 1) + 1
        if config.kv_cache_tokens is not None:
            pages = -(-config.kv_cache_tokens // config.page_size) + 1
        else:
            limit = CPU_KV_BYTES if self.device.type == "cpu" else self.budget.left_bytes
            pages = max(2, min(useful, limit // one))
        self.budget.plan("KV cache", pages * one, "kv_cache_tokens")
        return pages


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())
