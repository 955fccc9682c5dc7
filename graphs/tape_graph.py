"""The CPU backend `"tape"`: what a CUDA graph is on a GPU, with its traps made visible.

Like a CUDA graph it replays recorded operations on fixed memory without running the step's
Python, and refuses what a CUDA graph could not hold. Unlike one it runs the step while it
records. It does not know what the buffers mean.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from graphs.capture_watch import CaptureWatch, line_of_step
from graphs.errors import CaptureError
from graphs.tape_recorder import Call, TapeRecorder


class TapeStepGraph:
    """Replay gives the same bits as the step run eagerly on the same buffers.

    `poison`: None leaves memory alone. A sequence, even an empty one, makes each replay first
    overwrite every intermediate of the tape and those scratch tensors with values that show
    (NaN, the largest integer, True), so that reading what an earlier step left behind is seen.
    """

    def __init__(self, poison: Sequence[Tensor] | None = None) -> None:
        self.bytes = 0
        self._scratch = poison
        self._poisoned: list[Tensor] = []
        self._calls: list[Call] | None = None

    def capture(self, fn: Callable[[], None], buffers: Mapping[str, Tensor] | None = None) -> None:
        """Run `fn` once and record it. CaptureError names what a graph cannot hold, or the line at
        which torch itself raised.
        """
        assert self._calls is None, "a graph is captured once"
        recorder = TapeRecorder()
        try:
            with torch.inference_mode(), CaptureWatch(recorder.run, buffers):
                fn()
            recorder.check_unmoved()
        except CaptureError:
            raise
        except RuntimeError as error:
            line = line_of_step(traceback.extract_tb(error.__traceback__))
            raise CaptureError(f"capture failed at {line}: {error}") from error
        self.bytes = sum(tensor.nbytes for tensor in recorder.made)
        self._poisoned = [] if self._scratch is None else recorder.made + list(self._scratch)
        self._calls = recorder.calls

    def replay(self) -> None:
        if self._calls is None:
            raise CaptureError("replay of a tape that holds no step")
        with torch.inference_mode():
            for tensor in self._poisoned:
                tensor.fill_(_poison_of(tensor.dtype))
            for call in self._calls:
                call()

    def close(self) -> None:
        self._calls, self._poisoned, self._scratch, self.bytes = None, [], None, 0


def _poison_of(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return True
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).max  # odd in every integer type
