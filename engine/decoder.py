"""The decoder: one pass over a step's tokens, written for buffers that exist already.

Nothing is allocated and nothing is read on the host, so the same code runs eagerly, on the tape
and in a CUDA graph. What differs between families is data of the architecture.
"""

from dataclasses import dataclass

import torch

from engine.architecture import Architecture
from engine.attention import Attention
from engine.checkpoint import WeightSource
from engine.decoder_weights import DecoderWeights, LayerWeights, Projection, SparseMLP
from engine.lora_delta import LoRADelta, project
from engine.mixture import run_mixture
from engine.rotary_table import rotary_table
from kernels.activation import gated_activation
from kernels.add_expand import add_expand
from kernels.embedding import embed
from kernels.linear import linear
from kernels.linear_arrangement import MOST_PARTS
from kernels.linear_config import linear_config, linear_splits
from kernels.lora_arguments import FEW_PARTS, NO_LORA
from kernels.norm import add_rms_norm, holds_delta, rms_norm
from kernels.rotary import rotary_kv_write
from memory.kv_cache import KVCache
from memory.lora_targets import Target
from memory.workspace import Workspace


@dataclass(frozen=True)
class StepTokens:
    """The tokens of one pass, T rows; int32 [T]: ids, positions, and where K and V go; rows whose
    `row_mask` is 0 are padding (None: there are none)."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    row_mask: torch.Tensor | None


class Decoder:
    """Weights and the forward pass. Knows neither requests nor batches' composition."""

    def __init__(
        self,
        architecture: Architecture,
        source: WeightSource,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.architecture = architecture
        self.weights = DecoderWeights(architecture, dtype, device)
        self.weights.load(source)
        self._embedding_scale = architecture.embedding_scale_in(dtype)
        self._cos_sin = rotary_table(architecture.rope, architecture.head_dim, max_seq_len, device)

    def forward(
        self,
        tokens: StepTokens,
        attention: Attention,
        lora: LoRADelta | None,
        cache: KVCache,
        ws: Workspace,
    ) -> None:
        """Run all layers: `ws.hidden` [T, H] is the final norm's output, K and V are cached."""
        a, layers = self.architecture, self.weights.layers
        norm = (a.norm_eps, a.norm_weight_offset)
        embed(tokens.token_ids, self.weights.embedding, self._embedding_scale, ws.residual)
        rms_norm(ws.residual, layers[0].input_norm, *norm, ws.hidden)
        next_norms = [layer.input_norm for layer in layers[1:]] + [self.weights.norm]
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            self._attend(index, layer, tokens, attention, lora, cache, ws)
            post_norm, mlp = layer.post_attention_norm, layer.mlp
            self._add_and_norm(ws.attended, layer.o, index, Target.O_PROJ, lora, post_norm, ws)
            if isinstance(mlp, SparseMLP):
                run_mixture(index, mlp, a, tokens.row_mask, lora, ws)
                add_rms_norm(ws.delta, ws.residual, *NO_LORA, next_norm, *norm, ws.hidden)
                continue
            delta = project(
                ws.hidden, mlp.gate_up, index, Target.GATE_PROJ, lora, ws.gate_up, fold=True
            )
            gated_activation(ws.gate_up, *delta, a.activation, ws.activated)
            self._add_and_norm(ws.activated, mlp.down, index, Target.DOWN_PROJ, lora, next_norm, ws)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """The LM head: `hidden` [B, H] to `out` [B, V], in place."""
        linear(hidden, self.weights.head, None, out)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        tokens: StepTokens,
        attention: Attention,
        lora: LoRADelta | None,
        cache: KVCache,
        ws: Workspace,
    ) -> None:
        a = self.architecture
        between = a.row_qk_norm or a.clip_qkv is not None  # what reads q and k before rotation
        product = (ws.hidden, layer.qkv, index, Target.Q_PROJ, lora, ws.qkv)
        delta = project(*product, fold=not between, most_parts=FEW_PARTS)
        if a.row_qk_norm:
            q, k, _ = ws.qkv.split(layer.qkv.slice_sizes, dim=1)
            for part, weight in ((q, layer.q_norm), (k, layer.k_norm)):
                assert weight is not None
                rms_norm(part, weight, a.norm_eps, a.norm_weight_offset, part)
        if a.clip_qkv is not None:
            torch.clamp(ws.qkv, -a.clip_qkv, a.clip_qkv, out=ws.qkv)
        rotary_kv_write(
            ws.qkv,
            *delta,
            layer.q_norm if a.qk_norm else None,
            layer.k_norm if a.qk_norm else None,
            a.norm_eps,
            a.norm_weight_offset,
            self._cos_sin,
            tokens.positions,
            tokens.kv_slots,
            a.num_q_heads,
            a.num_kv_heads,
            cache.keys[index],
            cache.values[index],
        )
        attention(
            ws.qkv,
            cache.keys[index],
            cache.values[index],
            a.head_dim**-0.5,
            a.layer_windows[index],
            ws.attended,
        )

    def _add_and_norm(
        self,
        x: torch.Tensor,
        projection: Projection,
        index: int,
        target: Target,
        lora: LoRADelta | None,
        norm_weight: torch.Tensor,
        ws: Workspace,
    ) -> None:
        """`ws.residual` += x Wᵀ and its deltas, `ws.hidden` the norm of the sum."""
        norm = (norm_weight, self.architecture.norm_eps, self.architecture.norm_weight_offset)
        (tokens, width), hidden = x.shape, ws.delta.shape[1]
        product = (tokens, hidden, width, x.dtype, x.device)
        splits, out = linear_splits(*product), ws.delta
        if splits > 1:  # the op that adds them up is the next anyway
            out = ws.product[: splits * out.numel()].view(splits, *out.shape)
        holds = lora is None or holds_delta(
            tokens, hidden, lora.max_rank, lora.arena.dtype, linear_config(*product) is not None
        )
        most_parts = MOST_PARTS if holds else 0
        delta = project(x, projection, index, target, lora, out, fold=True, most_parts=most_parts)
        if holds or delta is NO_LORA:
            add_rms_norm(out, ws.residual, *delta, *norm, ws.hidden)
        else:
            add_expand(out, ws.residual, *delta)
            rms_norm(ws.residual, *norm, ws.hidden)
