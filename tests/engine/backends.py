"""The two ways an end-to-end test runs the engine, and how near the oracle each must come."""

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class TestedBackend:
    """`tolerance` bounds |Δlogprob| to the float32 reference, in nats, at every position."""

    device: str
    graphs: str
    tolerance: float


# float32 on both. The CPU's bound is the design's. On a GPU nothing is rounded below float32
# either: Triton's dots are "ieee" and torch's products run without TF32, so only the order of sums
# differs. 1e-3 leaves room for that, is what one bfloat16 product would break, and is far below
# the distance that tells adapters apart.
BACKENDS = [
    pytest.param(TestedBackend("cpu", "tape", 1e-4), id="tape"),
    pytest.param(TestedBackend("cuda", "cuda", 1e-3), id="cuda", marks=pytest.mark.gpu),
]
