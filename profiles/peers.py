"""What other engines take per decode step on one NVIDIA H200, and what Encore is to reach.

Milliseconds, measured as `profiles.decode` measures, bfloat16, greedy, CUDA graphs at these batch
sizes, rank 16 on every linear layer and expert. vLLM 0.26.0 with its defaults; SGLang 0.5.16 with
its default LoRA backend (csgmv); SGLang 0.5.23 with its newest (`triton_v2`, MoE runner
`lora_triton`, torch 2.14.1), which was not run on D8.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PeerTimes:
    """Milliseconds per step; `goal` is Encore's own."""

    vllm: float
    sglang: float
    sglang_v2: float | None
    goal: float

    @property
    def best(self) -> float:
        return min(time for time in (self.vllm, self.sglang, self.sglang_v2) if time is not None)


_Times = tuple[float, float, float | None, float]
_D8: dict[str, dict[int, _Times]] = {
    "none": {
        1: (4.89, 7.33, None, 4.2),
        8: (5.00, 7.39, None, 4.3),
        32: (5.54, 8.01, None, 4.6),
        128: (7.42, 10.05, None, 5.8),
    },
    "one": {
        1: (6.71, 9.21, None, 4.3),
        8: (6.52, 9.33, None, 4.4),
        32: (7.27, 10.20, None, 4.8),
        128: (11.24, 13.29, None, 6.0),
    },
    "mix8": {
        8: (9.54, 9.68, None, 4.6),
        32: (9.63, 10.34, None, 5.0),
        128: (13.01, 13.35, None, 6.2),
    },
}
_M16: dict[str, dict[int, _Times]] = {
    "none": {
        1: (2.26, 2.90, 2.84, 1.0),
        8: (3.41, 4.67, 3.14, 2.6),
        32: (5.49, 6.81, 5.42, 5.0),
        128: (6.96, 8.16, 6.93, 5.9),
    },
    "one": {
        1: (3.12, 3.39, 2.20, 1.1),
        8: (4.41, 5.78, 3.38, 2.7),
        32: (6.74, 8.48, 5.66, 5.1),
        128: (8.92, 10.03, 7.19, 6.1),
    },
    "mix8": {
        8: (5.26, 6.03, 3.43, 2.75),
        32: (7.48, 9.74, 5.73, 5.3),
        128: (9.96, 13.79, 7.93, 6.8),
    },
}
PEERS = {"D8": _D8, "M16": _M16}


def peer_times(model: str, case: str, batch: int) -> PeerTimes | None:
    """Of one row of the benchmark's table; None where nothing was measured."""
    found = PEERS.get(model, {}).get(case, {}).get(batch)
    return None if found is None else PeerTimes(*found)
