"""The GPU backend `"cuda"`: one torch.cuda.CUDAGraph. Knows pool and stream, not the step."""

import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from graphs.capture_watch import CaptureWatch, line_of_step
from graphs.errors import CaptureError

# Graphs whose capture CUDA itself broke off. Before torch 2.12 the allocator of pinned memory
# still looks at them: they must not be freed.
_broken: list[torch.cuda.CUDAGraph] = []


class CudaStepGraph:
    """Graphs that share `pool` share memory for their intermediates: never replay two at once.

    All graphs of a pool are captured on the same `stream`, the one that the step was warmed up
    on, so that libraries find the workspaces they made there. `bytes` is the fall in the
    device's free memory, so another process on the card blurs it.
    """

    def __init__(self, pool: "torch.cuda._POOL_HANDLE", stream: torch.cuda.Stream) -> None:
        self.bytes = 0
        self._pool = pool
        self._stream = stream
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, fn: Callable[[], None], buffers: Mapping[str, Tensor] | None = None) -> None:
        """Record `fn`. CaptureError names the line that CUDA, or the rules, refused.

        Afterwards the device and the stream are in working order, whatever happened. A pool in
        which CUDA broke off a capture is spent: before torch 2.12 it takes no other.
        """
        assert self._graph is None, "a graph is captured once"
        device = self._stream.device
        torch.cuda.synchronize(device)
        free_before, _ = torch.cuda.mem_get_info(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            failure = self._record(graph, fn, buffers)
        if failure is not None:
            graph.reset()
            if isinstance(failure, RuntimeError) and not isinstance(failure, CaptureError):
                line = line_of_step(traceback.extract_tb(failure.__traceback__))
                raise CaptureError(f"capture failed at {line}: {failure}") from failure
            raise failure
        torch.cuda.synchronize(device)
        self.bytes = max(0, free_before - torch.cuda.mem_get_info(device)[0])
        self._graph = graph

    def replay(self) -> None:
        """Launch on the caller's current stream."""
        if self._graph is None:
            raise CaptureError("replay of a CUDA graph that holds no step")
        self._graph.replay()

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
        self._graph, self.bytes = None, 0

    def _record(
        self,
        graph: torch.cuda.CUDAGraph,
        fn: Callable[[], None],
        buffers: Mapping[str, Tensor] | None,
    ) -> BaseException | None:
        """Capture on the current stream and end the capture on every path."""
        # "thread_local": what other threads do (a collective's watchdog, say) is not our error.
        failure: BaseException | None = None
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except RuntimeError as error:
            self._leave_pool()
            return error
        try:
            with CaptureWatch(buffers=buffers):
                fn()
        except BaseException as error:
            failure = error
        try:
            graph.capture_end()
        except RuntimeError as error:
            self._leave_pool()
            _broken.append(graph)
            failure = failure or error
        return failure

    def _leave_pool(self) -> None:
        """Before torch 2.12 a capture that CUDA invalidated stays open in the caching allocator,
        which then dies at its next clean-up. Where it is closed, closing again only raises.
        """
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
