"""What each engine step did beside its replay: uploads, synchronisations, pages, composition."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.scheduler import StepPlan


@dataclass
class StepCount:
    """One call of `Engine.step()`. `changed`: requests joined or left, or adapters came or went;
    `pages`: entries of block tables were written."""

    pages: bool = False
    changed: bool = False
    copies: int = 0
    waits: int = 0
    seconds: float = 0.0

    @property
    def case(self) -> str:
        if self.changed:
            return "composition changed"
        return "pages reserved" if self.pages else "steady"


class StepCounter:
    """Fed with plans, and asked after each step. A plan shows a change of composition by what it
    admits, computes of prompts, or decodes other than the plan before."""

    def __init__(self) -> None:
        self.steps: list[StepCount] = []
        self._rows: tuple[int, ...] = ()
        self._open = StepCount()

    def see_plan(self, plan: StepPlan) -> None:
        rows = tuple(id(sequence) for sequence in plan.decode)
        self._open.pages = bool(plan.page_writes)
        self._open.changed = bool(plan.admitted or plan.prefill or rows != self._rows)
        self._rows = rows

    def end_step(self, copies: int, waits: int, seconds: float) -> None:
        step, self._open = self._open, StepCount()
        step.copies, step.waits, step.seconds = copies, waits, seconds
        self.steps.append(step)


def by_case(steps: Iterable[StepCount]) -> list[dict[str, Any]]:
    """Steps of each case, with how many took how many copies and waits, and their mean time."""
    cases: dict[str, list[StepCount]] = {}
    for step in steps:
        cases.setdefault(step.case, []).append(step)
    return [
        {
            "case": case,
            "steps": len(found),
            "ms_per_step": round(sum(step.seconds for step in found) / len(found) * 1e3, 4),
            "copies_per_step": _histogram(step.copies for step in found),
            "waits_per_step": _histogram(step.waits for step in found),
        }
        for case, found in cases.items()
    ]


def _histogram(values: Iterable[int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(values).items())}
