"""The mixture of experts that a config.json describes."""

from engine.config_reader import ConfigReader
from engine.model_family import MoEFamily
from kernels.moe_top_k import MAX_EXPERTS
from memory.model_dims import MoEDims

MAX_TOP_K = 10


def read_moe(config: ConfigReader, family: MoEFamily, num_layers: int) -> MoEDims | None:
    """Sizes, and which layers have experts; None if no layer does.

    CheckpointError names the key and what is accepted.
    """
    experts_key = next((key for key in family.experts_keys if key in config), None)
    experts_key = experts_key or family.experts_keys[0]
    num_experts = config.integer(experts_key, family.default_experts, maximum=MAX_EXPERTS)
    for synonym in family.experts_keys:
        if config.value(synonym, num_experts) != num_experts:
            config.refuse(synonym, f"{num_experts}, as {experts_key} has it")
    maximum = min(MAX_TOP_K, num_experts)
    top_k = config.integer("num_experts_per_tok", family.default_top_k, maximum=maximum)
    if family.default_intermediate is None:
        intermediate = config.integer(family.intermediate_key)
    else:
        intermediate = config.integer(family.intermediate_key, family.default_intermediate)
    shared = 0
    if family.default_shared:
        shared = config.integer("shared_expert_intermediate_size", family.default_shared)
    sparse = [True] * num_layers
    if family.has_dense_layers:
        sparse = _read_sparse_layers(config, num_layers)
    if not any(sparse):
        return None
    return MoEDims(num_experts, top_k, intermediate, shared, tuple(sparse))


def _read_sparse_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    step = config.integer("decoder_sparse_step", 1)
    dense = config.value("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(
        isinstance(layer, bool) or not isinstance(layer, int) for layer in dense
    ):
        config.refuse("mlp_only_layers", "a list of layers, or null")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
