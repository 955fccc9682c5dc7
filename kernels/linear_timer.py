"""Times products on a GPU, as they run in a step: in a CUDA graph, on weights that are cold."""

import inspect
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import pairwise

import torch
import triton
from triton.errors import TritonError

from kernels import (
    dependent_launch,
    hopper_linear,
    hopper_multiply,
    linear,
    linear_choice,
    linear_config,
)
from kernels.linear_choice import Trial

REPLAYS = 5
MAX_THREADS = 16


def measuring_stamp() -> dict[str, str]:
    """What times depend on beside card and shapes: versions, and a fingerprint of what is timed
    and how."""
    kernels = (linear, hopper_linear, hopper_multiply, dependent_launch)
    modules = (*kernels, linear_config, linear_choice, sys.modules[__name__])
    sources = [inspect.getsource(module) for module in modules]
    kernel = sha256("\n".join(sources).encode()).hexdigest()[:16]
    return {"torch": torch.__version__, "triton": triton.__version__, "kernel": kernel}


class GraphTimer:
    """A `Timer` on the current device and stream, which must not be the default one.

    Keeps nothing that it allocates, and writes nothing but the trials' own outputs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        properties = torch.cuda.get_device_properties(device)
        self.l2_bytes: int = getattr(properties, "L2_cache_size", 0) or 64 * 2**20

    def runs(self, trials: Sequence[Trial]) -> list[bool]:
        kernels = {_variant(trial): trial for trial in trials}
        torch.cuda.synchronize(self._device)  # the threads launch on another stream
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
            runs = dict(zip(kernels, pool.map(self._compiles, kernels.values()), strict=True))
        torch.cuda.synchronize(self._device)
        return [runs[_variant(trial)] for trial in trials]

    def seconds(self, trials: Sequence[Trial]) -> float:
        """The least of a few replays of a graph of all of them."""
        trials[0]()  # outside the graph, for the library makes its workspace
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for trial in trials:
                trial()
        finally:
            graph.capture_end()
        graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        marks[0].record()
        for mark in marks[1:]:  # queued at once: none waits for the host
            graph.replay()
            mark.record()
        marks[-1].synchronize()
        graph.reset()
        milliseconds: float = min(first.elapsed_time(second) for first, second in pairwise(marks))
        return milliseconds / 1e3 / len(trials)

    def _compiles(self, trial: Trial) -> bool:
        if trial.config is None:
            return True
        try:
            with torch.cuda.device(self._device):
                trial()
        except (TritonError, RuntimeError):  # too large for the card, or beyond the compiler
            return False
        return True


def _variant(trial: Trial) -> tuple[object, ...]:
    """Trials of which this is equal launch the same compiled kernel: it is compiled once."""
    has_bias = trial.bias is not None
    return trial.config, trial.weight.shape, trial.weight.stride(), has_bias, trial.x.dtype
