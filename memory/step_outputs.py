"""What a step hands to the host: sampled ids and logprobs, one run of memory for one copy."""

from dataclasses import dataclass

import torch

MAX_LOGPROBS = 20
_ALIGNED_ROWS = 4  # int32 of 16 bytes: kernels are compiled for the alignment of what they get


def chosen_line(rows: int) -> int:
    """int32 from the first sampled id of `rows` rows to the first logprob."""
    return -(-rows // _ALIGNED_ROWS) * _ALIGNED_ROWS


@dataclass(frozen=True)
class StepOutputs:
    """`chosen` int32, flat: the `sampled` ids of B rows, then from `chosen_line(B)` on the bits
    of their `target_logprob` float32.

    `normalizer` float32 [B, 2] (see `kernels.log_normalizer`) stays on the device; `top_values`
    float32 and `top_ids` int32 [B, 20] are filled for rows that ask for them.
    """

    chosen: torch.Tensor
    normalizer: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor

    @property
    def sampled(self) -> torch.Tensor:
        return self.chosen[: len(self.normalizer)]

    @property
    def target_logprob(self) -> torch.Tensor:
        rows = len(self.normalizer)
        return self.chosen[chosen_line(rows) :][:rows].view(torch.float32)

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(vars(self))

    @classmethod
    def allocate(cls, rows: int, device: torch.device) -> "StepOutputs":
        chosen = torch.zeros(2 * chosen_line(rows), dtype=torch.int32, device=device)
        return cls(
            chosen=chosen,
            normalizer=torch.zeros(rows, 2, dtype=torch.float32, device=device),
            top_values=torch.zeros(rows, MAX_LOGPROBS, dtype=torch.float32, device=device),
            top_ids=torch.zeros(rows, MAX_LOGPROBS, dtype=torch.int32, device=device),
        )

    def view(self, rows: int) -> "StepOutputs":
        """The same memory for a smaller batch, whose values lie elsewhere in it."""
        return StepOutputs(
            self.chosen[: 2 * chosen_line(rows)],
            self.normalizer[:rows],
            self.top_values[:rows],
            self.top_ids[:rows],
        )
