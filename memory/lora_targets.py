"""The linear layers that an adapter can touch, in the order of the pointer tables' rows."""

from enum import IntEnum


class Target(IntEnum):
    """A row of the per-layer LoRA tables. Slices that share their input stand side by side."""

    Q_PROJ = 0
    K_PROJ = 1
    V_PROJ = 2
    O_PROJ = 3
    GATE_PROJ = 4
    UP_PROJ = 5
    DOWN_PROJ = 6
    EMBED_TOKENS = 7
    LM_HEAD = 8
    ROUTER = 9
    SHARED_GATE_PROJ = 10
    SHARED_UP_PROJ = 11
    SHARED_DOWN_PROJ = 12
    SHARED_EXPERT_GATE = 13


SERVED = tuple(Target)[: Target.DOWN_PROJ + 1]
