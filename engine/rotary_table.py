"""Cosines and sines of rotary position embeddings, for every position, once.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv:2104.09864).
"""

import torch

from engine.rope_config import RopeConfig


def rotary_table(
    rope: RopeConfig, head_dim: int, positions: int, device: torch.device
) -> torch.Tensor:
    """float32 [positions, head_dim]: the cosines of head_dim/2 angles, then their sines."""
    frequencies = rope.inverse_frequencies(head_dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
