"""What a step hands to the host: sampled ids and logprobs, one tensor for one copy."""

from dataclasses import dataclass

import torch

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class StepOutputs:
    """`chosen` int32 [2, B]: `sampled` ids, and the bits of `target_logprob` float32.

    `logsumexp` float32 [B] of the raw logits; `top_values` float32 and `top_ids` int32 [B, 20]
    are filled for rows that ask for them.
    """

    chosen: torch.Tensor
    logsumexp: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor

    @property
    def sampled(self) -> torch.Tensor:
        return self.chosen[0]

    @property
    def target_logprob(self) -> torch.Tensor:
        return self.chosen[1].view(torch.float32)

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(vars(self))

    @classmethod
    def allocate(cls, rows: int, device: torch.device) -> "StepOutputs":
        return cls(
            chosen=torch.zeros(2, rows, dtype=torch.int32, device=device),
            logsumexp=torch.zeros(rows, dtype=torch.float32, device=device),
            top_values=torch.zeros(rows, MAX_LOGPROBS, dtype=torch.float32, device=device),
            top_ids=torch.zeros(rows, MAX_LOGPROBS, dtype=torch.int32, device=device),
        )

    def view(self, rows: int) -> "StepOutputs":
        """The same memory for a smaller batch."""
        return StepOutputs(
            self.chosen[:, :rows],
            self.logsumexp[:rows],
            self.top_values[:rows],
            self.top_ids[:rows],
        )
