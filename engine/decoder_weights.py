"""A decoder's weights on the device, allocated once; stacked where one GEMM reads several.

Every weight is named together with the place it is loaded to, in one list: the one place where a
slice of a weight can be chosen.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.architecture import Architecture, weight_paths
from engine.checkpoint import WeightSource
from memory.lora_targets import Target


@dataclass(frozen=True)
class Projection:
    """`weight` [out, in] and `bias` [out], of one linear layer or of several stacked on out."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    slice_sizes: list[int]  # widths of the stacked layers


@dataclass(frozen=True)
class DenseMLP:
    """`down(f(gate x) · up x)`; gate and up are stacked."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class SparseMLP:
    """`router` [E, H]; of every expert `gate_up` [E, 2 I, H] and `down` [E, H, I]; the expert that
    every token passes, `shared`, with its `shared_gate`, one logit."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: DenseMLP | None
    shared_gate: Projection | None


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer."""

    input_norm: torch.Tensor
    qkv: Projection
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Projection
    post_attention_norm: torch.Tensor
    mlp: DenseMLP | SparseMLP


class DecoderWeights:
    """`embedding` and `head` [V, H] (one tensor where tied), `norm` [H], and the layers;
    `num_bytes` of all of them."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._architecture, self._dtype, self._device = architecture, dtype, device
        self._destinations: dict[str, torch.Tensor] = {}
        self.num_bytes = 0
        vocab, hidden = architecture.vocab_size, architecture.hidden_size
        self.embedding = self._parameter("model.embed_tokens.weight", vocab, hidden)
        self.head = self.embedding
        if not architecture.tie_word_embeddings:
            self.head = self._parameter("lm_head.weight", vocab, hidden)
        self.norm = self._parameter("model.norm.weight", hidden)
        self.layers = [self._layer(index) for index in range(architecture.num_layers)]

    def projections(self) -> Iterator[Projection]:
        """Every layer's, which are one product each."""
        for layer in self.layers:
            yield from (layer.qkv, layer.o)
            mlp = layer.mlp.shared if isinstance(layer.mlp, SparseMLP) else layer.mlp
            if mlp is not None:
                yield from (mlp.gate_up, mlp.down)
            if isinstance(layer.mlp, SparseMLP) and layer.mlp.shared_gate is not None:
                yield layer.mlp.shared_gate

    def load(self, source: WeightSource) -> None:
        """Stream every weight to its place. Raises CheckpointError naming file and tensor."""
        for name, destination in self._destinations.items():
            source.copy_into(name, destination)

    def _layer(self, index: int) -> LayerWeights:
        prefix, hidden = f"model.layers.{index}", self._architecture.hidden_size
        a = self._architecture
        norms: dict[str, torch.Tensor | None] = {"q_norm": None, "k_norm": None}
        sizes = {
            name: a.target_shape(target)[0]
            for name, target in (("q_norm", Target.Q_PROJ), ("k_norm", Target.K_PROJ))
        }
        if a.qk_norm or a.row_qk_norm:
            for name, size in sizes.items():
                width = a.head_dim if a.qk_norm else size
                norms[name] = self._parameter(f"{prefix}.self_attn.{name}.weight", width)
        qkv = [Target.Q_PROJ, Target.K_PROJ, Target.V_PROJ]
        return LayerWeights(
            input_norm=self._parameter(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._stacked(prefix, qkv, a.qkv_bias),
            q_norm=norms["q_norm"],
            k_norm=norms["k_norm"],
            o=self._stacked(prefix, [Target.O_PROJ], a.o_bias),
            post_attention_norm=self._parameter(
                f"{prefix}.post_attention_layernorm.weight", hidden
            ),
            mlp=self._sparse_mlp(prefix) if a.is_sparse(index) else self._dense_mlp(prefix),
        )

    def _dense_mlp(self, prefix: str) -> DenseMLP:
        has_bias = self._architecture.mlp_bias
        return DenseMLP(
            self._stacked(prefix, [Target.GATE_PROJ, Target.UP_PROJ], has_bias),
            self._stacked(prefix, [Target.DOWN_PROJ], has_bias),
        )

    def _sparse_mlp(self, prefix: str) -> SparseMLP:
        moe = self._architecture.moe
        assert moe is not None
        width, hidden = moe.intermediate_size, self._architecture.hidden_size
        gate_up = self._empty(moe.num_experts, 2 * width, hidden)
        down = self._empty(moe.num_experts, hidden, width)
        for target, places in (
            (Target.EXPERT_GATE_PROJ, gate_up[:, :width]),
            (Target.EXPERT_UP_PROJ, gate_up[:, width:]),
            (Target.EXPERT_DOWN_PROJ, down),
        ):
            for path, place in zip(weight_paths(target, moe.num_experts), places, strict=True):
                self._destinations[f"{prefix}.{path}.weight"] = place
        shared = shared_gate = None
        if moe.shared_intermediate_size:
            shared = DenseMLP(
                self._stacked(prefix, [Target.SHARED_GATE_PROJ, Target.SHARED_UP_PROJ], False),
                self._stacked(prefix, [Target.SHARED_DOWN_PROJ], False),
            )
            shared_gate = self._stacked(prefix, [Target.SHARED_EXPERT_GATE], False)
        router = self._stacked(prefix, [Target.ROUTER], False).weight
        return SparseMLP(router, gate_up, down, shared, shared_gate)

    def _stacked(self, prefix: str, targets: list[Target], has_bias: bool) -> Projection:
        shapes = [self._architecture.target_shape(target) for target in targets]
        sizes = [out for out, _ in shapes]
        weight = self._empty(sum(sizes), shapes[0][1])
        bias = self._empty(sum(sizes)) if has_bias else None
        paths = [f"{prefix}.{weight_paths(target, 0)[0]}" for target in targets]
        for path, rows in zip(paths, weight.split(sizes), strict=True):
            self._destinations[f"{path}.weight"] = rows
        if bias is not None:
            for path, part in zip(paths, bias.split(sizes), strict=True):
                self._destinations[f"{path}.bias"] = part
        return Projection(weight, bias, sizes)

    def _parameter(self, name: str, *shape: int) -> torch.Tensor:
        self._destinations[name] = self._empty(*shape)
        return self._destinations[name]

    def _empty(self, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.num_bytes += tensor.nbytes
        return tensor
