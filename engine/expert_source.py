"""One name for each expert's weights, however the file keeps them.

Files hold an expert's three matrices by themselves (`mlp.experts.N.gate_proj`, or Mixtral's
`block_sparse_moe.experts.N.w1`), or all experts of a layer in two tensors of three dimensions
(`mlp.experts.gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I], as transformers 5 holds them).
"""

import re
from dataclasses import dataclass

import torch

from engine.errors import CheckpointError
from engine.weight_source import Part, WeightSource, check_destination

_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_BLOCK = re.compile(r"(?P<layer>model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.(?P<rest>.+)")
_EXPERT = re.compile(r"experts\.(?P<expert>\d+)\.(?P<name>w[123])\.weight")
_FUSED = re.compile(r"experts\.(?P<name>gate_up_proj|down_proj)(?:\.weight)?")


@dataclass(frozen=True)
class _Place:
    """Where a canonical tensor lies: a whole tensor of the file, or rows of one expert of it."""

    name: str
    expert: int | None = None
    first: int = 0
    count: int = 0


class ExpertSource:
    """`source` with every expert's weights under the canonical name.

    CheckpointError if two tensors of the file claim one name (so an expert is kept in one form,
    which may differ from layer to layer), or if a fused tensor cannot be that of `num_experts`.
    """

    def __init__(self, source: WeightSource, num_experts: int):
        self._source = source
        self._places: dict[str, _Place] = {}
        for name in sorted(source.names()):
            places = _canonical(name, source.shape(name), num_experts)
            if places is None:
                raise CheckpointError(
                    f"{source.origin(name)}: shape {source.shape(name)}; accepted, for all experts "
                    f"in one tensor: {num_experts} matrices, those of gate and up stacked"
                )
            for canonical, place in places:
                if (other := self._places.setdefault(canonical, place)) is not place:
                    raise CheckpointError(
                        f"{source.origin(name)}: {canonical} is also in {source.origin(other.name)}"
                        "; accepted: one form of each expert's weights"
                    )
        self._names = frozenset(self._places)

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        shape = self._source.shape(place.name)
        return shape if place.expert is None else (place.count, *shape[2:])

    def origin(self, name: str) -> str:
        place = self._places.get(name, _Place(name))
        where = self._source.origin(place.name)
        return where if place.expert is None else f"{where}, expert {place.expert}"

    def copy_into(self, name: str, dst: torch.Tensor, part: Part = ()) -> None:
        check_destination(self, name, dst, part)
        place = self._places[name]
        if place.expert is None:
            self._source.copy_into(place.name, dst, part)
            return
        rows = range(place.first, place.first + place.count)
        rows = rows[part[0]] if part else rows
        within = (slice(place.expert, place.expert + 1), slice(rows.start, rows.stop, rows.step))
        self._source.copy_into(place.name, dst[None], (*within, *part[1:]))

    def close(self) -> None:
        self._source.close()


def _canonical(
    name: str, shape: tuple[int, ...], num_experts: int
) -> list[tuple[str, _Place]] | None:
    """The canonical tensors that the file's tensor `name` holds; None if a fused one cannot."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        return [(name, _Place(name))]
    layer, rest = f"{block['layer']}.mlp", block["rest"]
    if expert := _EXPERT.fullmatch(rest):
        rest = f"experts.{expert['expert']}.{_MIXTRAL[expert['name']]}.weight"
    fused = _FUSED.fullmatch(rest)
    if fused is None:
        return [(f"{layer}.{rest}", _Place(name))]
    slices = ("gate_proj", "up_proj") if fused["name"] == "gate_up_proj" else ("down_proj",)
    if len(shape) != 3 or shape[0] != num_experts or shape[1] % len(slices):
        return None
    count = shape[1] // len(slices)
    return [
        (
            f"{layer}.experts.{expert}.{slice_name}.weight",
            _Place(name, expert, index * count, count),
        )
        for expert in range(shape[0])
        for index, slice_name in enumerate(slices)
    ]
