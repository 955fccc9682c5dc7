"""The byte budget: planned before anything is allocated, compared with what was taken after.

The KV cache gets what the other rows leave.
"""

import os
from dataclasses import dataclass, field

import torch

from memory.errors import CapacityError

MIB = 2**20


@dataclass
class BudgetRow:
    """`planned_bytes` before allocation, `actual_bytes` after (None where not yet known), and
    what a user can change to make the row smaller."""

    name: str
    planned_bytes: int
    knob: str
    actual_bytes: int | None = None


@dataclass
class Budget:
    """Rows that together must not pass `total_bytes`."""

    total_bytes: int
    rows: list[BudgetRow] = field(default_factory=list)

    @classmethod
    def of_device(cls, device: torch.device, fraction: float) -> "Budget":
        """`fraction` of all the memory of `device`, less what is in use on a GPU by now."""
        if device.type != "cuda":
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return cls(int(total * fraction))
        torch.cuda.empty_cache()  # of an engine that is gone
        free, total = torch.cuda.mem_get_info(device)
        return cls(max(0, int(total * fraction) - (total - free)))

    def plan(self, name: str, planned_bytes: int, knob: str) -> None:
        """Add a row, or raise CapacityError where it does not fit, saying what to change."""
        left = self.left_bytes
        self.rows.append(BudgetRow(name, planned_bytes, knob))
        if planned_bytes <= left:
            return
        largest = max(self.rows, key=lambda row: row.planned_bytes)
        raise CapacityError(
            f"{name}: {planned_bytes / MIB:.1f} MiB needed and {left / MIB:.1f} MiB of "
            f"{self.total_bytes / MIB:.1f} MiB left; the largest row is {largest.name} with "
            f"{largest.planned_bytes / MIB:.1f} MiB: change {largest.knob}, or memory_fraction if "
            f"that is below 1\n{self.table()}"
        )

    @property
    def planned_bytes(self) -> int:
        return sum(row.planned_bytes for row in self.rows)

    @property
    def left_bytes(self) -> int:
        return self.total_bytes - self.planned_bytes

    def record(self, name: str, actual_bytes: int) -> None:
        """Note what the row called `name` took in the end."""
        self.row(name).actual_bytes = actual_bytes

    def row(self, name: str) -> BudgetRow:
        return next(row for row in self.rows if row.name == name)

    def table(self) -> str:
        """The rows as text, planned beside taken."""
        lines = [f"{'memory':<18}{'planned MiB':>13}{'taken MiB':>13}"]
        for row in self.rows:
            taken = "-" if row.actual_bytes is None else f"{row.actual_bytes / MIB:.1f}"
            lines.append(f"{row.name:<18}{row.planned_bytes / MIB:>13.1f}{taken:>13}")
        lines.append(f"{'sum':<18}{self.planned_bytes / MIB:>13.1f}")
        lines.append(f"{'budget':<18}{self.total_bytes / MIB:>13.1f}")
        return "\n".join(lines)
