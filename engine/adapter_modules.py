"""From an adapter's named tensors to modules of the base model: all are bound, or refused.

Every tensor is used by one module or names the key that is at fault. The experts' tensors come in
three forms (see engine/adapter_keys.py); whatever the form, the modules are those of single
experts, and a factor that several of them share is one tensor object. Knows no files.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from engine.adapter_config import CONFIG_NAME, AdapterConfig
from engine.adapter_keys import AdapterKey, Form, parse_key
from engine.adapter_tensor import AdapterTensor
from engine.errors import AdapterError
from engine.fused_experts import PROJECTIONS, FusedProjection
from engine.shown import shown
from memory.adapter_weights import LoRAModule
from memory.lora_targets import EXPERT_TARGETS, Target


class TargetShapes(Protocol):
    """What of a base model decides whether an adapter fits it."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_experts(self) -> int:
        """Of each layer that has any; 0 for a dense model."""
        ...

    def has_target(self, target: Target, layer: int) -> bool: ...

    def target_shape(self, target: Target) -> tuple[int, int]:
        """`(out, in)` of the linear layer's weight."""
        ...


class _Pair(NamedTuple):
    """Both factors of a module."""

    key: AdapterKey
    a: AdapterTensor
    b: AdapterTensor


@dataclass(frozen=True)
class ModuleReader:
    """Binds tensors to a base model that runs in `dtype`, as a config says."""

    config: AdapterConfig
    architecture: TargetShapes
    max_lora_rank: int
    dtype: torch.dtype | None

    def read(self, tensors: Sequence[AdapterTensor]) -> tuple[LoRAModule, ...]:
        """All modules, by layer, target and expert."""
        tensors = sorted(tensors, key=lambda stored: stored.key)  # files have no order of their own
        named = [(_key(stored), stored) for stored in tensors]
        for key, stored in named:
            self._check_place(key, stored)
        pairs = list(_pairs(named))
        swapped = self._swapped([pair for pair in pairs if pair.key.form is Form.FUSED])
        bound = [(module, pair.a) for pair in pairs for module in self._modules(pair, swapped)]
        bound.sort(key=lambda item: _place(item[0]))
        for (module, first), (other, second) in pairwise(bound):
            if _place(module) == _place(other):
                name = f"{module.target.module_name} of expert {module.expert}"
                raise second.refusal(f"and {first.key!r} both hold {name}", "one of each")
        modules = tuple(module for module, _ in bound)
        self._check_parameters(pairs, {module.target for module in modules})
        self._check_fused_layers(pairs, {(module.layer, module.target) for module in modules})
        return modules

    def _check_place(self, key: AdapterKey, stored: AdapterTensor) -> None:
        """Refuse layers, targets and experts that the base model lacks."""
        base = self.architecture
        if key.layer >= base.num_layers:
            accepted = f"layers 0 to {base.num_layers - 1} of the base model"
            raise stored.refusal(f"names layer {key.layer}", accepted)
        for target in key.targets or EXPERT_TARGETS:
            if not base.has_target(target, key.layer):
                has = [other for other in Target if base.has_target(other, key.layer)]
                accepted = f"the layer's own: {', '.join(other.module_name for other in has)}"
                found = f"names {target.module_name}, which layer {key.layer} lacks"
                raise stored.refusal(found, accepted)
        if key.expert is not None and key.expert >= base.num_experts:
            accepted = f"experts 0 to {base.num_experts - 1} of the base model"
            raise stored.refusal(f"names expert {key.expert}", accepted)

    def _check_parameters(self, pairs: Sequence[_Pair], bound: set[Target]) -> None:
        """Refuse a config that targets parameters by name which the files do not hold."""
        unused = set(self.config.target_parameters)
        for pair in pairs:
            for path in pair.key.paths:
                unused.difference_update(self.config.parameters_naming(f"{path}.weight"))
        for parameter in sorted(unused):
            if bound.isdisjoint(PROJECTIONS.get(parameter.rpartition(".")[2], ())):
                raise AdapterError(
                    f"{self.config.file}: target_parameters names {shown(parameter)}, of which the "
                    "files hold no factors; accepted: parameters whose factors are there"
                )

    def _check_fused_layers(self, pairs: Sequence[_Pair], bound: set[tuple[int, Target]]) -> None:
        """Refuse files of fused experts that lack a layer's: PEFT writes all that it targets."""
        fused = next((pair for pair in pairs if pair.key.form is Form.FUSED), None)
        for layer in range(self.architecture.num_layers if fused else 0):
            assert fused is not None
            own, other = f"layers.{fused.key.layer}.", f"layers.{layer}."
            for name, targets in PROJECTIONS.items():
                paths = [f"{path.replace(own, other)}.{name}" for path in fused.key.paths]
                is_targeted = any(self.config.parameters_naming(path) for path in paths)
                exists = self.architecture.has_target(targets[0], layer)
                if is_targeted and exists and (layer, targets[0]) not in bound:
                    raise AdapterError(
                        f"{fused.a.file}: holds no factors of {paths[0]}, which target_parameters "
                        "names; accepted: those of every layer that it names"
                    )

    def _modules(self, pair: _Pair, swapped: bool) -> Iterator[LoRAModule]:
        match pair.key.form:
            case Form.LINEAR:
                yield self._linear(pair)
            case Form.STACKED:
                yield from self._stacked(pair)
            case Form.FUSED:
                yield from self._fused(pair, swapped)

    def _linear(self, pair: _Pair) -> LoRAModule:
        key, (target,) = pair.key, pair.key.targets
        names = self._names(key)
        if not names:
            raise pair.a.refusal(
                f"is not among the modules that {CONFIG_NAME} targets",
                "what target_modules, target_parameters, exclude_modules and layers_to_transform "
                "select",
            )
        rank, scaling = self._rank_and_scaling(pair, names)
        out_features, in_features = self.architecture.target_shape(target)
        name = target.module_name
        a_why, b_why = f"rank in {CONFIG_NAME}, input of {name}", f"output of {name}, rank there"
        a = pair.a.check((rank, in_features), a_why, self.dtype)
        b = pair.b.check((out_features, rank), b_why, self.dtype)
        return LoRAModule(key.layer, target, a, b, scaling, key.expert)

    def _names(self, key: AdapterKey) -> list[str]:
        """What PEFT calls a linear layer where it puts LoRA on it; none where it does not."""
        parameters = [f"{path}.weight" for path in key.paths]
        names = parameters if any(map(self.config.targets_parameter, parameters)) else []
        if names and self.config.target_modules is None:
            return names
        by_module = any(self.config.targets(path, key.layer) for path in key.paths)
        return [*names, *key.paths] if by_module else names

    def _stacked(self, pair: _Pair) -> Iterator[LoRAModule]:
        """Stacks of 2-D factors, as exporters of shared outer factors write them (not PEFT)."""
        key, config = pair.key, self.config
        named = any(config.targets(name, key.layer) for name in key.aliases) or any(
            map(config.targets_parameter, key.aliases)
        )
        if not named or any(map(config.excludes, key.aliases)):
            raise pair.a.refusal(
                f"is not among the modules that {CONFIG_NAME} targets",
                "target_modules or target_parameters that name the experts' projections",
            )
        rank, scaling = self._rank_and_scaling(pair, key.aliases)
        shapes = [self.architecture.target_shape(target) for target in key.targets]
        out_features, in_features = sum(out for out, _ in shapes), shapes[0][1]
        experts = self.architecture.num_experts
        why = f"experts or 1 for all of them, rank in {CONFIG_NAME}, input"
        a_count = 1 if pair.a.shape[:1] == (1,) else experts
        a = pair.a.check((a_count, rank, in_features), why, self.dtype)
        why = f"experts or 1 for all of them, output, rank in {CONFIG_NAME}"
        b_count = 1 if pair.b.shape[:1] == (1,) else experts
        b = pair.b.check((b_count, out_features, rank), why, self.dtype)
        yield from self._of_experts(key, key.targets, a, b, scaling)

    def _fused(self, pair: _Pair, swapped: bool) -> Iterator[LoRAModule]:
        key, projection = pair.key, self._projection(pair)
        names = [f"{path}.{projection.name}" for path in key.paths]
        if not any(map(self.config.targets_parameter, names)):
            found = f"is of {projection.name}, which {CONFIG_NAME} does not target"
            raise pair.a.refusal(found, f"target_parameters with mlp.experts.{projection.name}")
        rank, scaling = self._rank_and_scaling(pair, names)
        a_shape, b_shape = projection.shapes(rank, swapped)
        a_why, b_why = "experts · rank, width", "width, rank · experts"
        why = f"of {projection.name}, rank in {CONFIG_NAME}"
        a, b = projection.split(
            pair.a.check(a_shape, f"{a_why} {why}", self.dtype),
            pair.b.check(b_shape, f"{b_why} {why}", self.dtype),
            swapped,
        )
        yield from self._of_experts(key, PROJECTIONS[projection.name], a, b, scaling)

    def _of_experts(
        self,
        key: AdapterKey,
        targets: Sequence[Target],
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
    ) -> Iterator[LoRAModule]:
        """Modules of all experts. A [E or 1, r, in] serves every target; each has its rows of
        B [E or 1, out, r]."""
        heights = [self.architecture.target_shape(target)[0] for target in targets]
        a_of = a.unbind()
        b_of = [factor.split(heights) for factor in b.unbind()]
        for expert in range(self.architecture.num_experts):
            a_factor, b_factors = a_of[expert % len(a_of)], b_of[expert % len(b_of)]
            for target, b_factor in zip(targets, b_factors, strict=True):
                yield LoRAModule(key.layer, target, a_factor, b_factor, scaling, expert)

    def _swapped(self, fused: Sequence[_Pair]) -> bool:
        """Whether the fused tensors have input and output swapped, as old versions of PEFT."""
        layers = {(pair.key.layer, pair.key.inner) for pair in fused}
        told: dict[bool, _Pair] = {}  # a tensor that can be read one way only, for each way
        for pair in fused:
            if pair.key.inner and (pair.key.layer, False) not in layers:
                found = "wraps one parameter of the experts, and the other is missing"
                raise pair.a.refusal(found, "experts.lora_A and experts.lora_B beside it")
            projection = self._projection(pair)
            ways = [way for way in (False, True) if projection.fits(*_widths(pair), way)]
            if len(ways) == 1:
                told[ways[0]] = pair
        if len(told) == 2:
            found = f"has input and output the other way round than {told[False].a.key!r}"
            raise told[True].a.refusal(found, "one orientation in all of the files")
        if told or not fused:
            return True in told
        swapped = self.config.swaps_expert_features
        if swapped is None:
            raise fused[0].a.refusal(
                "may have input and output swapped, and its shape does not tell",
                f"peft_version in {CONFIG_NAME}: up to 0.19.0 swapped, from 0.19.1 on not",
            )
        return swapped and self.architecture.num_experts > 1

    def _projection(self, pair: _Pair) -> FusedProjection:
        """The parameter whose widths these are: no two of them have the same, either way round."""
        base, accepted = self.architecture, list[str]()
        for name, targets in PROJECTIONS.items():
            shapes = [base.target_shape(target) for target in targets]
            out_features, in_features = sum(out for out, _ in shapes), shapes[0][1]
            projection = FusedProjection(name, base.num_experts, out_features, in_features)
            if any(projection.fits(*_widths(pair), way) for way in (False, True)):
                return projection
            accepted.append(f"A [E·r, {in_features}] with B [{out_features}, r·E] for {name}")
        found = f"has shape {list(pair.a.shape)} and its lora_B {list(pair.b.shape)}"
        raise pair.a.refusal(found, ", or ".join(accepted))

    def _rank_and_scaling(self, pair: _Pair, names: Sequence[str]) -> tuple[int, float]:
        """A module's, which all its names must agree on."""
        readings = {
            (self.config.rank_of(name), self.config.scaling_of(name)): name for name in names
        }
        if len(readings) > 1:
            one, other, *_ = readings.values()
            raise pair.a.refusal(
                f"has another rank or alpha as {one} than as {other}",
                "rank_pattern and alpha_pattern that match both alike",
            )
        ((rank, scaling),) = readings
        if rank > self.max_lora_rank:
            accepted = f"at most max_lora_rank = {self.max_lora_rank}"
            if any(name.endswith("gate_up_proj") for name in names):
                accepted += " (PEFT doubles a rank where it fuses gate and up)"
            raise pair.a.refusal(f"has rank {rank}", accepted)
        return rank, scaling


def _place(module: LoRAModule) -> tuple[int, Target, int]:
    return module.layer, module.target, -1 if module.expert is None else module.expert


def _widths(pair: _Pair) -> tuple[int, int]:
    """The side of each factor that is not the rank's; (−1, −1) for what are no matrices."""
    a, b = pair.a.shape, pair.b.shape
    return (a[1], b[0]) if len(a) == len(b) == 2 else (-1, -1)


def _key(stored: AdapterTensor) -> AdapterKey:
    try:
        return parse_key(stored.key)
    except AdapterError as error:
        raise AdapterError(f"{stored.file}: {error}") from None


def _pairs(named: Sequence[tuple[AdapterKey, AdapterTensor]]) -> Iterator[_Pair]:
    """Bring the factors of each module together, in the order of layers."""
    keys: dict[tuple[object, ...], AdapterKey] = {}
    modules: dict[tuple[object, ...], dict[str, AdapterTensor]] = {}
    origins: dict[tuple[str, str | None], AdapterTensor] = {}  # one of each prefix and name
    for key, stored in named:
        factors = modules.setdefault(key.module, {})
        if key.factor in factors:
            twin = factors[key.factor].key
            raise stored.refusal(f"and {twin!r} are the same factor", "one of each")
        if keys.setdefault(key.module, key).block != key.block:
            twin = next(iter(factors.values())).key
            raise stored.refusal(f"goes by another name than {twin!r}", "one name of a module")
        factors[key.factor] = stored
        origins.setdefault((key.containers, key.adapter), stored)
    if len(origins) > 1:
        first, other, *_ = origins.values()
        found = f"has another prefix or adapter name than {first.key!r}"
        raise other.refusal(found, "one adapter in the files")
    for module, key in sorted(keys.items(), key=lambda item: item[1].layer):
        factors = modules[module]
        for absent in {"A", "B"} - factors.keys():
            (present,) = factors.values()
            found = f"has no lora_{absent} beside it"
            raise present.refusal(found, "both factors of each module")
        yield _Pair(key, factors["A"], factors["B"])
