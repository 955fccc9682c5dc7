"""Small adapters of a mixture of experts for tests, written by hand in every form of file."""

import torch

from engine.adapter_files import read_adapter
from memory.lora_targets import Target

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, RANK = 2, 6, 32, 24, 4
DENSE_LAYER = 1
BLOCK = "base_model.model.model.layers.0.mlp"
EXPERT_SLICES = (Target.EXPERT_GATE_PROJ, Target.EXPERT_UP_PROJ, Target.EXPERT_DOWN_PROJ)
NAMINGS = {
    "qwen": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "mixtral 5": ("mlp", ("w1", "w3", "w2")),
}


class TinyMixture:
    """The shapes of a model with a shared expert whose second layer is dense."""

    num_layers = LAYERS

    def __init__(self, hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=EXPERTS):
        self.num_experts = num_experts
        attention = dict.fromkeys((Target.Q_PROJ, Target.V_PROJ), (hidden, hidden))
        self._dense = attention | _mlp(Target.GATE_PROJ, hidden, 40)
        self._sparse = (
            attention
            | {Target.ROUTER: (num_experts, hidden), Target.SHARED_EXPERT_GATE: (1, hidden)}
            | _mlp(Target.SHARED_GATE_PROJ, hidden, 20)
            | _mlp(Target.EXPERT_GATE_PROJ, hidden, intermediate)
        )

    def has_target(self, target, layer):
        return target in (self._dense if layer == DENSE_LAYER else self._sparse)

    def target_shape(self, target):
        return (self._dense | self._sparse)[target]


def _mlp(gate, hidden, intermediate):
    gate, up, down = (Target(gate + index) for index in range(3))
    return {
        gate: (intermediate, hidden),
        up: (intermediate, hidden),
        down: (hidden, intermediate),
    }


def random_factors(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def pair(name, out_features, in_features, rank=RANK):
    """Both factors of one linear layer, under PEFT's keys."""
    generator = torch.Generator().manual_seed(hash_of(name))
    return {
        f"{name}.lora_A.weight": torch.randn(rank, in_features, generator=generator),
        f"{name}.lora_B.weight": torch.randn(out_features, rank, generator=generator),
    }


def hash_of(name):
    return int.from_bytes(name.encode(), "little") % 2**31


def expert_name(expert, target, naming="qwen", layer=0):
    block, names = NAMINGS[naming]
    name = names[EXPERT_SLICES.index(target)]
    return f"base_model.model.model.layers.{layer}.{block}.experts.{expert}.{name}"


def expert_tensors(experts=range(EXPERTS), naming="qwen", rank=RANK):
    """A linear layer's factors for every projection of some experts of layer 0."""
    shapes = TinyMixture()
    tensors = {}
    for expert in experts:
        for target in EXPERT_SLICES:
            tensors |= pair(expert_name(expert, target, naming), *shapes.target_shape(target), rank)
    return tensors


def fused_tensors(which=("gate_up_proj", "down_proj"), swapped=False, rank=RANK, shapes=None):
    """PEFT's target_parameters on layer 0; `swapped` as versions up to 0.19.0 wrote them."""
    shapes = shapes or TinyMixture()
    experts = shapes.num_experts
    intermediate, hidden = shapes.target_shape(Target.EXPERT_GATE_PROJ)
    sizes = {"gate_up_proj": (2 * intermediate, hidden), "down_proj": (hidden, intermediate)}
    tensors = {}
    for name in which:
        inner = ".base_layer" if name == "gate_up_proj" and len(which) == 2 else ""
        out_features, in_features = sizes[name][::-1] if swapped else sizes[name]
        tensors |= pair(f"{BLOCK}.experts{inner}", out_features, in_features, experts * rank)
    return tensors


def stacked_tensors(name, a_count, b_count, rank=RANK):
    """Stacks of factors of layer 0's experts for one projection, by one of its names."""
    width = INTERMEDIATE if name in ("w2", "down_proj") else HIDDEN
    height = {"w2": HIDDEN, "down_proj": HIDDEN, "gate_up_proj": 2 * INTERMEDIATE}
    prefix = f"{BLOCK}.experts.{name}"
    return {
        f"{prefix}.lora_A.weight": random_factors(a_count, rank, width),
        f"{prefix}.lora_B.weight": random_factors(b_count, height.get(name, INTERMEDIATE), rank),
    }


def read(folder, shapes=None, max_lora_rank=64, dtype=None):
    """The adapter as the tiny mixture's engine would read it."""
    return read_adapter(folder, shapes or TinyMixture(), max_lora_rank, dtype)


def by_place(adapter):
    """Its modules by target and expert, once their order and layout are right."""
    modules = {(module.target, module.expert): module for module in adapter.modules}
    assert len(modules) == len(adapter.modules)
    places = [(m.layer, m.target, -1 if m.expert is None else m.expert) for m in adapter.modules]
    assert places == sorted(places)
    assert all(m.a.is_contiguous() and m.b.is_contiguous() for m in adapter.modules)
    return modules


def without(tensors, part):
    return {key: tensor for key, tensor in tensors.items() if part not in key}
