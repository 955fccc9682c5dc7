"""Rotary position embedding as a checkpoint states it: the frequencies, and no tensors to apply.

Two kinds are served: `default` and `llama3`. Both the layout of transformers 5
(`rope_parameters`, with `rope_theta` inside) and the older one (`rope_theta` beside
`rope_scaling`) are read.
"""

import math
from dataclasses import dataclass

import torch

from engine.config_reader import ConfigReader

DEFAULT_THETA = 10_000.0
ACCEPTED_KINDS = ("default", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """The fields after `kind` are used by kind "llama3" only (Llama 3.1, as Meta published it)."""

    theta: float = DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Angle per position of each rotated pair, on the CPU: float32 [head_dim / 2].

        default: f_i = theta^(-2i / head_dim). llama3 leaves f_i where its wavelength is below
        original / high_freq_factor, divides it by `factor` where it is above
        original / low_freq_factor, and blends the two linearly in original / wavelength between.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        plain = 1.0 / self.theta**exponents  # [head_dim / 2]
        if self.kind == "default":
            return plain
        wavelengths = 2 * math.pi / plain
        low, high = self.low_freq_factor, self.high_freq_factor
        share = (self.original_max_position / wavelengths - low) / (high - low)
        blended = (1 - share) * plain / self.factor + share * plain
        is_long = wavelengths > self.original_max_position / low
        is_short = wavelengths < self.original_max_position / high
        return torch.where(is_long, plain / self.factor, torch.where(is_short, plain, blended))


def read_rope(config: ConfigReader, max_position: int, default_theta: float) -> RopeConfig:
    """The rope part of a config.json; CheckpointError for any kind but default and llama3."""
    theta = config.number("rope_theta", default_theta)
    if config.value("partial_rotary_factor", 1.0) not in (None, 1):
        config.refuse("partial_rotary_factor", "1: every dimension of a head is rotated")
    original = config.optional_integer("original_max_position_embeddings")
    scaling, parameters = config.section("rope_scaling"), config.section("rope_parameters")
    rope = scaling or parameters
    if rope is None:
        return RopeConfig(theta)
    theta = rope.number("rope_theta", theta)
    if rope.value("partial_rotary_factor", 1.0) not in (None, 1):
        rope.refuse("partial_rotary_factor", "1: every dimension of a head is rotated")
    name = "rope_type" if "rope_type" in rope else "type"
    other = rope.value("type")
    kind = rope.value(name, "default")
    if kind not in ACCEPTED_KINDS or other not in (None, kind):
        rope.refuse(name if other in (None, kind) else "type", " or ".join(ACCEPTED_KINDS))
    if kind == "default":
        rope.finish()
        return RopeConfig(theta)
    result = RopeConfig(
        theta=theta,
        kind=kind,
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=original
        or rope.integer("original_max_position_embeddings", max_position),
    )
    if result.high_freq_factor <= result.low_freq_factor:
        rope.refuse("high_freq_factor", f"above low_freq_factor, {result.low_freq_factor}")
    rope.value("original_max_position_embeddings")
    rope.finish()
    return result
