"""Which products of a model are measured before anything is planned for them."""

import logging
from pathlib import Path

import torch

from engine.decoder_weights import DecoderWeights, DenseMLP, Projection
from kernels.choice_file import ChoiceFile
from kernels.linear_choice import ShapeWeights, settle
from kernels.linear_config import MIN_CAPABILITY, ROW_BUCKETS, card
from kernels.linear_timer import GraphTimer, measuring_stamp

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]


def choose_products(
    weights: DecoderWeights,
    device: torch.device,
    directory: Path | None,
) -> None:
    """Settle how products are computed on `device`: what no file in `directory` says is measured,
    on the loaded weights and the current stream.

    For every number of rows, whatever is captured: chunks of a prompt have any, and bits should
    follow from the file alone.

    Before workspaces are planned, which depends on it. Leaves no memory in use; where there is
    too little to measure in, the rule decides.
    """
    if device.type != "cuda" or card(device).capability < MIN_CAPABILITY:
        return
    file = ChoiceFile(directory, card(device).name, measuring_stamp())
    try:
        settle(weights_by_shape(weights), ROW_BUCKETS, card(device), file, GraphTimer(device))
    except torch.OutOfMemoryError as error:
        logger.warning("%s: products are chosen by rule, not measured: %s", device, error)
    torch.cuda.empty_cache()


def weights_by_shape(weights: DecoderWeights) -> list[ShapeWeights]:
    """Every weight that steps multiply with through `linear`, those of one shape together.

    Only what is added to the residual at once is left in partials: see `Decoder`.
    """
    found: dict[Shape, ShapeWeights] = {}

    def add(projection: Projection, takes_partials: bool) -> None:
        shape = tuple(projection.weight.shape)
        old = found.get(shape, ShapeWeights([], projection.bias, takes_partials))
        found[shape] = ShapeWeights(
            [*old.weights, projection.weight], old.bias, old.takes_partials and takes_partials
        )

    for layer in weights.layers:
        add(layer.qkv, takes_partials=False)
        add(layer.o, takes_partials=True)
        is_dense = isinstance(layer.mlp, DenseMLP)
        mlp = layer.mlp if isinstance(layer.mlp, DenseMLP) else layer.mlp.shared
        if mlp is not None:
            add(mlp.gate_up, takes_partials=False)
            add(mlp.down, takes_partials=is_dense)
    add(Projection(weights.head, None, [weights.head.shape[0]]), takes_partials=False)
    return list(found.values())
