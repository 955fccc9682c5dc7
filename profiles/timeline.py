"""One replay of a step, read: its layers, its critical path and the gaps on it, sums by op.

Pure arithmetic on matched kernels; knows neither torch nor a profiler.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from profiles.kernel_match import StepKernel, short_name
from profiles.op_log import LoggedOp
from profiles.op_table import OTHER

ROLES = ("q, k, v", "output", "gate, up", "down")  # of a dense layer's products, in order
PRODUCTS = ("linear", "linear_shrink", "linear_shrink_parts")
PRODUCTS_LORA = ("sgemm_a", "sgemm_b")
ATTENTION_OP = "paged_attention"
NORMS = ("rms_norm", "add_rms_norm")


def own_us(row: dict[str, Any]) -> float:
    """Of a kernel's time that after the one it waited for had ended: launched ahead, it starts
    early and stands there until then."""
    us: float = row["us"] + min(row.get("gap_us", 0.0), 0.0)
    return us


@dataclass(frozen=True)
class Timeline:
    """`kernels` in order of start, with the numbers of `ops`. `bandwidth` in bytes per second."""

    kernels: Sequence[StepKernel]
    ops: Sequence[LoggedOp]
    bandwidth: float

    @cached_property
    def layers(self) -> list[range]:
        """The ops of each layer.

        A layer has one attention; it starts as far before it as the first two layers' ops are
        the same, counted back from theirs, less the norm of what the layer before left.
        """
        names = [op.name for op in self.ops]
        at = [index for index, name in enumerate(names) if name == ATTENTION_OP]
        if len(at) < 2:
            return [range(at[0], at[0] + 1)] if at else []
        back = 0
        while back < at[0] and at[1] - back - 1 > at[0] and _same(names, at, back + 1):
            back += 1
        while names[at[0] - back] in NORMS:
            back -= 1
        starts = [index - back for index in at]
        ends = [*starts[1:], min(2 * starts[-1] - starts[-2], len(names))]
        return [range(start, end) for start, end in zip(starts, ends, strict=True)]

    @cached_property
    def labels(self) -> list[str]:
        """A name for each op: of a product in a layer, and of LoRA behind it, which one it is."""
        labels = [op.title for op in self.ops]
        for layer in self.layers:
            products = [index for index in layer if self.ops[index].name in PRODUCTS]
            if len(products) not in (2, len(ROLES)):
                continue
            for first, end, role in zip(products, [*products[1:], layer.stop], ROLES, strict=False):
                for index in range(first, end):
                    if self.ops[index].name in (*PRODUCTS, *PRODUCTS_LORA):
                        labels[index] = f"{role}: {self.ops[index].title}"
        if self.layers:
            for index in range(self.layers[-1].stop, len(self.ops)):
                if self.ops[index].name == "linear":
                    labels[index] = "LM head"
        return labels

    @cached_property
    def main_kernel(self) -> dict[int, int]:
        """Of each op the number of its longest kernel: there its bytes are shown."""
        longest: dict[int, int] = {}
        for index, kernel in enumerate(self.kernels):
            if kernel.op is not None:
                best = longest.setdefault(kernel.op, index)
                if kernel.us > self.kernels[best].us:
                    longest[kernel.op] = index
        return longest

    @cached_property
    def path(self) -> dict[int, float]:
        """The kernels on the critical path, by number, each with the gap before it in µs;
        negative where it started before the one that it follows had ended.

        Walked back from the last to end, each time to what the kernel had to wait for: the one
        before in its stream; on a branch the one before the fork; behind a branch's join the
        branch. The first kernel launched after a fork runs beside the branch.
        """
        if not self.kernels:
            return {}
        at = max(range(len(self.kernels)), key=lambda index: self.kernels[index].end_us)
        path: dict[int, float] = {}
        while True:
            before = self._waited_for(at)
            if before is None:
                path[at] = 0.0
                return path
            path[at] = self.kernels[at].start_us - self.kernels[before].end_us
            at = before

    @property
    def span_us(self) -> float:
        return max((kernel.end_us for kernel in self.kernels), default=0.0)

    def rows(self, ops: range) -> list[dict[str, Any]]:
        """A row for each kernel of these ops, and of those that no op is known for between them;
        in order of start, from the first one's."""
        first, last = self._launch_span(ops)
        chosen = [i for i, k in enumerate(self.kernels) if first <= k.launch <= last]
        return [self._row(index, self.kernels[chosen[0]].start_us) for index in chosen]

    def by_op(self) -> list[dict[str, Any]]:
        """Sums over the step by label, the largest first; of each kernel its own time."""
        return self._sums([self.labels[k.op] if k.op is not None else "?" for k in self.kernels])

    def by_kind(self) -> list[dict[str, Any]]:
        return self._sums([self._kind(kernel) for kernel in self.kernels])

    def path_sums(self) -> dict[str, Any]:
        """Where the step's time goes: kernels on the critical path, gaps between them, and what
        they overlap; they add up to the span."""
        gaps = self.path.values()
        return {
            "span_us": round(self.span_us, 2),
            "kernels_us": round(sum(self.kernels[index].us for index in self.path), 2),
            "gaps_us": round(sum(gap for gap in gaps if gap > 0), 2),
            "overlaps_us": round(-sum(gap for gap in gaps if gap < 0), 2),
            "kernels": len(self.path),
            "beside_us": round(
                sum(k.us for index, k in enumerate(self.kernels) if index not in self.path), 2
            ),
        }

    def share(self, moved: int | None, us: float) -> float | None:
        """Of the read bandwidth."""
        return round(moved / self.bandwidth / (us * 1e-6), 3) if moved and us else None

    def _waited_for(self, at: int) -> int | None:
        """Of the kernels that `at` may have had to wait for, the one that ended last."""
        start = self.kernels[at].start_us
        found = [i for i in self._predecessors[at] if self.kernels[i].start_us <= start]
        return max(found, key=lambda index: self.kernels[index].end_us, default=None)

    @cached_property
    def _predecessors(self) -> list[list[int]]:
        """Of each kernel, by number: see `path`."""
        found: list[list[int]] = [[] for _ in self.kernels]
        newest: dict[int, int] = {}  # by lane
        beside: dict[int, int] = {}  # of a branch's kernel, the first on the main stream after it
        for at in sorted(range(len(self.kernels)), key=lambda index: self.kernels[index].launch):
            kernel = self.kernels[at]
            found[at] = [newest[lane] for lane in {0, kernel.lane} if lane in newest]
            if kernel.lane != 0:
                beside[at] = -1
            else:
                for branch, first in beside.items():
                    if first < 0:
                        beside[branch] = at
                        continue
                    ended = self.kernels[branch].end_us <= kernel.start_us
                    if ended and self.kernels[first].op != kernel.op:
                        found[at].append(branch)
            newest[kernel.lane] = at
        return found

    def _launch_span(self, ops: range) -> tuple[float, float]:
        """From the first launch of these ops up to the first of the next."""
        places = [k.launch for k in self.kernels if k.op is not None and k.op in ops]
        return (min(places), max(places) + 0.5) if places else (0.0, -1.0)

    def _row(self, index: int, start_us: float) -> dict[str, Any]:
        kernel = self.kernels[index]
        row: dict[str, Any] = {
            "op": self.labels[kernel.op] if kernel.op is not None else "?",
            "kernel": short_name(kernel.name),
            "kind": self._kind(kernel),
            "lane": kernel.lane,
            "start_us": round(kernel.start_us - start_us, 3),
            "us": round(kernel.us, 3),
        }
        if index in self.path:
            row["gap_us"] = round(self.path[index], 3)
        if kernel.op is not None and self.main_kernel[kernel.op] == index:
            moved = self.ops[kernel.op].bytes
            if moved is not None:
                row["megabytes"] = round(moved / 1e6, 4)
                row["share"] = self.share(moved, own_us(row))
        return row

    def _kind(self, kernel: StepKernel) -> str:
        return self.ops[kernel.op].kind if kernel.op is not None else OTHER

    def _sums(self, keys: list[str]) -> list[dict[str, Any]]:
        """Of all kernels by key; bytes count once an op."""
        sums: dict[str, dict[str, Any]] = {}
        for index, (key, kernel) in enumerate(zip(keys, self.kernels, strict=True)):
            row = sums.setdefault(
                key, {"name": key, "kernels": 0, "us": 0.0, "beside_us": 0.0, "bytes": 0}
            )
            row["kernels"] += 1
            row["us"] += own_us({"us": kernel.us, "gap_us": self.path.get(index, 0.0)})
            row["beside_us"] += kernel.us if index not in self.path else 0.0
            if kernel.op is not None and self.main_kernel[kernel.op] == index:
                row["bytes"] += self.ops[kernel.op].bytes or 0
        for row in sums.values():
            moved = row.pop("bytes")
            row["megabytes"] = round(moved / 1e6, 3)
            row["share"] = self.share(moved, row["us"])
            row["us"], row["beside_us"] = round(row["us"], 2), round(row["beside_us"], 2)
        return sorted(sums.values(), key=lambda row: -row["us"])


def _same(names: Sequence[str], at: Sequence[int], back: int) -> bool:
    return names[at[0] - back] == names[at[1] - back]
