"""How long a launch takes within a CUDA graph."""

import time
from collections.abc import Callable

import torch


def launch_us(launch: Callable[[int], None], launches: int, device: torch.device) -> float:
    """Microseconds a call of `launch(i)`, i in 0 .. launches - 1, captured in one graph.

    The best of five replays, by device events; the caller lets `i` choose other memory, or the
    caches serve what a step would read. Without CUDA: wall time of plain calls, good for nothing
    but trying the benchmark out.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        for index in range(launches):
            launch(index)
        return (time.perf_counter() - start) / launches * 1e6
    launch(0)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            launch(index)
    graph.replay()
    best = float("inf")
    for _ in range(5):
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        graph.replay()
        end_event.record()
        end_event.synchronize()
        best = min(best, start_event.elapsed_time(end_event))
    return best / launches * 1e3
