"""Device-to-host copies of what a step produced, read one step later."""

from dataclasses import dataclass

import torch

from memory.step_outputs import MAX_LOGPROBS, StepOutputs, chosen_line


@dataclass(frozen=True)
class StepResults:
    """A step's outputs on the host, one entry per row."""

    token_ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]  # empty unless asked for
    top_logprobs: list[list[float]]

    def top(self, row: int, count: int) -> dict[int, float]:
        """Logprobs of the `count` likeliest tokens of a row that asked for at least as many."""
        ids, values = self.top_ids[row][:count], self.top_logprobs[row][:count]
        return dict(zip(ids, values, strict=True))


class _Slot:
    @torch.inference_mode(False)  # written in any mode later, which inference tensors refuse
    def __init__(self, rows: int, pinned: bool) -> None:
        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)

        self.chosen = empty(torch.int32, 2 * chosen_line(rows))
        self.top_ids = empty(torch.int32, rows, MAX_LOGPROBS)
        self.top_values = empty(torch.float32, rows, MAX_LOGPROBS)
        self.event = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self.unread = False


class Readback:
    """One step's copy under way. `wait()` gives the results, once."""

    def __init__(self, slot: _Slot, rows: int, line: int, with_top: bool) -> None:
        self._slot, self._rows, self._line, self._with_top = slot, rows, line, with_top

    def wait(self) -> StepResults:
        """Block until the step is done and return what it produced."""
        slot, rows = self._slot, self._rows
        if slot.event is not None:
            slot.event.synchronize()
        assert slot.unread, "results are read once"
        top_ids, top_values = slot.top_ids[:rows], slot.top_values[:rows]
        results = StepResults(
            slot.chosen[:rows].tolist(),
            slot.chosen[self._line : self._line + rows].view(torch.float32).tolist(),
            top_ids.tolist() if self._with_top else [],
            top_values.tolist() if self._with_top else [],
        )
        slot.unread = False
        return results


class ReadbackRing:
    """Pinned buffers for copies under way. One that is still to be read is never written again:
    where all are, another joins the ring."""

    def __init__(self, rows: int, device: torch.device, depth: int = 4) -> None:
        self._rows, self._pinned = rows, device.type == "cuda"
        self._slots = [_Slot(rows, self._pinned) for _ in range(depth)]

    def start(self, outputs: StepOutputs, rows: int, with_top: bool) -> Readback:
        """Copy the first `rows` rows after what was launched so far, without waiting: one copy
        unless `with_top`."""
        slot = self._unused_slot()
        slot.chosen[: len(outputs.chosen)].copy_(outputs.chosen, non_blocking=True)
        if with_top:
            slot.top_ids[:rows].copy_(outputs.top_ids[:rows], non_blocking=True)
            slot.top_values[:rows].copy_(outputs.top_values[:rows], non_blocking=True)
        if slot.event is not None:
            slot.event.record()
        return Readback(slot, rows, chosen_line(len(outputs.normalizer)), with_top)

    def _unused_slot(self) -> _Slot:
        slot = next((slot for slot in self._slots if not slot.unread), None)
        if slot is None:
            slot = _Slot(self._rows, self._pinned)
            self._slots.append(slot)
        slot.unread = True
        return slot
