"""Device tables by request slot: state that belongs to a request, whatever row it runs on.

The last slot is the dummy request of padding rows: token 0, position 0, no adapter, dummy page.
Written at admission and by prefill, then by the graph itself.
"""

from dataclasses import dataclass

import torch

from kernels.sampling_tables import NUM_COLUMNS, NUM_LOGPROBS, REPETITION, TOP_P


@dataclass(frozen=True)
class RequestTables:
    """R = max_batch_size + 1 request slots; all int32 unless said.

    `last_token` [R] and `positions` [R] (of that token) advance inside the graph. `adapter_slots`
    [R] is -1 for the base model. `block_tables` [R, max_pages] lists KV pages. The columns
    and bits of `sampling_floats` float32 [R, 8], `sampling_ints` [R, 8] and `token_state` [R, V]
    are named in `kernels.sampling_tables`; `seeds` int64 [R]; `logit_bias` float32 [R, V].
    """

    last_token: torch.Tensor
    positions: torch.Tensor
    adapter_slots: torch.Tensor
    block_tables: torch.Tensor
    sampling_floats: torch.Tensor
    sampling_ints: torch.Tensor
    seeds: torch.Tensor
    token_state: torch.Tensor
    logit_bias: torch.Tensor

    @property
    def num_slots(self) -> int:
        """Request slots, the dummy included."""
        return self.last_token.shape[0]

    @property
    def dummy(self) -> int:
        return self.num_slots - 1

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(vars(self))

    @classmethod
    def allocate(
        cls, max_batch_size: int, max_pages: int, vocab_size: int, device: torch.device
    ) -> "RequestTables":
        slots = max_batch_size + 1

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        tables = cls(
            last_token=ints(slots),
            positions=ints(slots),
            adapter_slots=ints(slots).fill_(-1),
            block_tables=ints(slots, max_pages),
            sampling_floats=floats(slots, NUM_COLUMNS),
            sampling_ints=ints(slots, NUM_COLUMNS),
            seeds=torch.zeros(slots, dtype=torch.int64, device=device),
            token_state=ints(slots, vocab_size),
            logit_bias=floats(slots, vocab_size),
        )
        tables.sampling_floats[:, TOP_P] = 1.0
        tables.sampling_floats[:, REPETITION] = 1.0
        tables.sampling_ints[:, NUM_LOGPROBS] = -1
        return tables
