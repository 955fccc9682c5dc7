"""Recognise Llama 3.1's rope scaling in the divisors that a GGUF file carries instead of it.

llama.cpp's converter writes, for each rotated pair, the number its frequency is divided by. The
parameters are recovered from a known set and checked against every divisor, never guessed.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from engine.errors import CheckpointError
from engine.rope_config import RopeConfig

# The published models: Llama 3.1 and 3.3 scale by 8, Llama 3.2 by 32.
_PUBLISHED = RopeConfig(
    kind="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
)
_TOLERANCE = 1e-5  # relative: float32 rounding of both computations, near 1e-6, with room


def recognise_rope(
    plain: RopeConfig, divisors: np.ndarray, head_dim: int, path: Path
) -> RopeConfig:
    """The llama3 rope whose frequencies are `plain`'s over `divisors` [head_dim / 2]."""
    found = torch.from_numpy(divisors)
    candidate = replace(_PUBLISHED, theta=plain.theta, factor=float(divisors.max()))
    wanted = plain.inverse_frequencies(head_dim) / candidate.inverse_frequencies(head_dim)
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=_TOLERANCE, atol=0):
        raise CheckpointError(
            f"{path}: rope_freqs.weight holds a rope scaling that is not recognised; accepted: "
            f"Llama 3.1's, with low and high frequency factors 1 and 4 over 8192 positions"
        )
    return candidate
