"""A timer whose times are made up, and a shape whose weights nobody reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kernels.linear_choice import ShapeWeights, Trial
from kernels.linear_config import LinearConfig

Times = Callable[[LinearConfig | None], float]


def shape_weights(
    out_features: int = 2048, in_features: int = 1024, layers: int = 8, **keywords
) -> ShapeWeights:
    weights = [torch.empty(out_features, in_features, dtype=torch.bfloat16) for _ in range(layers)]
    return ShapeWeights(weights, **keywords)


@dataclass
class MadeUpTimer:
    """`times` of a configuration, or of the library as None; those of `refused` do not run."""

    times: Times = lambda config: 1.0
    refused: Callable[[LinearConfig | None], bool] = lambda config: False
    l2_bytes: int = 2**20
    timed: list[Sequence[Trial]] = field(default_factory=list)

    def runs(self, trials: Sequence[Trial]) -> list[bool]:
        return [not self.refused(trial.config) for trial in trials]

    def seconds(self, trials: Sequence[Trial]) -> float:
        self.timed.append(trials)
        return self.times(trials[0].config)
