"""A decoder's weights on the device, allocated once; stacked where one GEMM reads several.

Every weight is named together with the place it is loaded to, in one list: the one place where a
slice of a weight can be chosen.
"""

from dataclasses import dataclass

import torch

from engine.architecture import Architecture
from engine.checkpoint import WeightSource
from memory.lora_targets import Target


@dataclass(frozen=True)
class Projection:
    """`weight` [out, in] and `bias` [out], of one linear layer or of several stacked on out."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    slice_sizes: list[int]  # widths of the stacked layers


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer."""

    input_norm: torch.Tensor
    qkv: Projection
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Projection
    post_attention_norm: torch.Tensor
    gate_up: Projection
    down: Projection


class DecoderWeights:
    """`embedding` and `head` [V, H] (one tensor where tied), `norm` [H], and the layers."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._architecture, self._dtype, self._device = architecture, dtype, device
        self._destinations: dict[str, torch.Tensor] = {}
        vocab, hidden = architecture.vocab_size, architecture.hidden_size
        self.embedding = self._parameter("model.embed_tokens.weight", vocab, hidden)
        self.head = self.embedding
        if not architecture.tie_word_embeddings:
            self.head = self._parameter("lm_head.weight", vocab, hidden)
        self.norm = self._parameter("model.norm.weight", hidden)
        self.layers = [self._layer(index) for index in range(architecture.num_layers)]

    def load(self, source: WeightSource) -> None:
        """Stream every weight to its place. Raises CheckpointError naming file and tensor."""
        for name, destination in self._destinations.items():
            source.copy_into(name, destination)

    def _layer(self, index: int) -> LayerWeights:
        prefix, hidden = f"model.layers.{index}", self._architecture.hidden_size
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        a = self._architecture
        head_norm = (a.head_dim,) if a.qk_norm else None
        return LayerWeights(
            input_norm=self._parameter(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._stacked(attention, [Target.Q_PROJ, Target.K_PROJ, Target.V_PROJ], a.qkv_bias),
            q_norm=head_norm and self._parameter(f"{attention}.q_norm.weight", *head_norm),
            k_norm=head_norm and self._parameter(f"{attention}.k_norm.weight", *head_norm),
            o=self._stacked(attention, [Target.O_PROJ], a.o_bias),
            post_attention_norm=self._parameter(
                f"{prefix}.post_attention_layernorm.weight", hidden
            ),
            gate_up=self._stacked(mlp, [Target.GATE_PROJ, Target.UP_PROJ], a.mlp_bias),
            down=self._stacked(mlp, [Target.DOWN_PROJ], a.mlp_bias),
        )

    def _stacked(self, prefix: str, targets: list[Target], has_bias: bool) -> Projection:
        shapes = [self._architecture.target_shape(target) for target in targets]
        sizes = [out for out, _ in shapes]
        weight = self._empty(sum(sizes), shapes[0][1])
        bias = self._empty(sum(sizes)) if has_bias else None
        for target, rows in zip(targets, weight.split(sizes), strict=True):
            self._destinations[f"{prefix}.{target.name.lower()}.weight"] = rows
        if bias is not None:
            for target, part in zip(targets, bias.split(sizes), strict=True):
                self._destinations[f"{prefix}.{target.name.lower()}.bias"] = part
        return Projection(weight, bias, sizes)

    def _parameter(self, name: str, *shape: int) -> torch.Tensor:
        self._destinations[name] = self._empty(*shape)
        return self._destinations[name]

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
