"""The linear layers that an adapter can touch, in the order of the pointer tables' rows."""

from enum import IntEnum


class Target(IntEnum):
    """A row of the per-layer LoRA tables. Slices that share their input stand side by side.

    The experts' targets have tables of their own, with a column per expert.
    """

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
    EXPERT_GATE_PROJ = 14
    EXPERT_UP_PROJ = 15
    EXPERT_DOWN_PROJ = 16

    @property
    def module_name(self) -> str:
        """The module's name as PEFT's `target_modules` has it: "q_proj", "experts.up_proj"."""
        return _MODULE_NAMES.get(self, self.name.lower())


_MODULE_NAMES = {
    Target.ROUTER: "gate",
    Target.SHARED_GATE_PROJ: "shared_expert.gate_proj",
    Target.SHARED_UP_PROJ: "shared_expert.up_proj",
    Target.SHARED_DOWN_PROJ: "shared_expert.down_proj",
    Target.EXPERT_GATE_PROJ: "experts.gate_proj",
    Target.EXPERT_UP_PROJ: "experts.up_proj",
    Target.EXPERT_DOWN_PROJ: "experts.down_proj",
}

ATTENTION_TARGETS = (Target.Q_PROJ, Target.K_PROJ, Target.V_PROJ, Target.O_PROJ)
MLP_TARGETS = (Target.GATE_PROJ, Target.UP_PROJ, Target.DOWN_PROJ)
SHARED_EXPERT_TARGETS = (
    Target.SHARED_GATE_PROJ,
    Target.SHARED_UP_PROJ,
    Target.SHARED_DOWN_PROJ,
    Target.SHARED_EXPERT_GATE,
)
EXPERT_TARGETS = (Target.EXPERT_GATE_PROJ, Target.EXPERT_UP_PROJ, Target.EXPERT_DOWN_PROJ)
NUM_LINEAR_TARGETS = int(Target.EXPERT_GATE_PROJ)  # those before the experts'
DENSE_TARGETS = ATTENTION_TARGETS + MLP_TARGETS  # of a layer without experts
