"""A small step with every kind of operation, over buffers of its own, for any backend."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from graphs.cuda_graph import CudaStepGraph
from graphs.tape_graph import TapeStepGraph
from kernels.op import define_op

WIDTH, VOCAB = 32, 40


@triton.jit
def _axpy_kernel(x, y, alpha, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    total = tl.load(y + offsets, inside) + alpha * tl.load(x + offsets, inside)
    tl.store(y + offsets, total, inside)


def toy_axpy_triton(x: torch.Tensor, y: torch.Tensor, alpha: float) -> None:
    _axpy_kernel[(triton.cdiv(x.numel(), 64),)](x, y, alpha, x.numel(), BLOCK=64)


def toy_axpy_torch(x: torch.Tensor, y: torch.Tensor, alpha: float) -> None:
    assert len(x.tolist()) == len(x)  # inside an op the host may read
    y += alpha * x


toy_axpy = define_op(toy_axpy_triton, toy_axpy_torch, mutates=("y",))


@dataclass
class ToyBuffers:
    """`ids` is staged; the step writes the rest."""

    ids: torch.Tensor  # int64 [B]
    state: torch.Tensor  # float32 [B, WIDTH], carried from step to step
    out: torch.Tensor  # float32 [B, VOCAB]
    best: torch.Tensor  # int64 [B]

    @classmethod
    def of(cls, batch_size: int, device: str = "cpu") -> "ToyBuffers":
        return cls(
            torch.zeros(batch_size, dtype=torch.int64, device=device),
            torch.zeros(batch_size, WIDTH, device=device),
            torch.zeros(batch_size, VOCAB, device=device),
            torch.zeros(batch_size, dtype=torch.int64, device=device),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        return vars(self)


class ToyModel:
    def __init__(self, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
        self.table, self.weight = draw(VOCAB, WIDTH), draw(3 * WIDTH, WIDTH)
        self.head = torch.nn.Parameter(draw(VOCAB, WIDTH).bfloat16())  # requires grad, as loaded

    def step(self, buffers: ToyBuffers) -> None:
        rows = len(buffers.ids)
        x = functional.layer_norm(
            functional.embedding(buffers.ids, self.table), (WIDTH,)
        )  # [B, WIDTH]
        q, k, v = functional.linear(x, self.weight).view(rows, 3, 4, 1, 8).unbind(1)  # views
        attended = functional.scaled_dot_product_attention(q, k, v).reshape(rows, WIDTH)
        scratch = torch.empty_like(attended)
        torch.add(attended, x, out=scratch)  # out=
        total = torch.zeros(rows, WIDTH, device=x.device)  # a factory, then written in place
        total[:, ::2] += scratch[:, 1::2]
        total[0] = 0.5  # a Python scalar
        toy_axpy(total, buffers.state, 0.5)  # a custom op
        logits = (buffers.state.bfloat16() @ self.head.T).float()  # [B, VOCAB]
        values, order = logits.sort(dim=-1, descending=True)  # two outputs
        kept = torch.where(values.softmax(-1).cumsum(-1) < 0.9, values, -1e30)
        buffers.out.fill_(-1e30).scatter_(1, order, kept)
        buffers.out[:, torch.arange(3, device=x.device)] *= 0.5  # integer index_put
        buffers.best.copy_(torch.cat([order[:, :1], order[:, 1:2]], 1).amin(1))
        buffers.ids.copy_(buffers.best)  # the step's own next input


class CountingMasks:
    """CaptureMasks that only notes what happened."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    @contextmanager
    def _noted(self, name: str):
        self.events.append(f"{name} on")
        try:
            yield
        finally:
            self.events.append(f"{name} off")

    def synthetic(self):
        return self._noted("synthetic")

    def zeroed(self):
        return self._noted("zeroed")


def record(backend: str, fn: Callable[[], None]) -> TapeStepGraph | CudaStepGraph:
    """`fn` captured by a graph of its own. On CUDA run `fn` once before, to warm up."""
    if backend == "tape":
        graph = TapeStepGraph()
    else:
        graph = CudaStepGraph(torch.cuda.graph_pool_handle(), torch.cuda.Stream())
    graph.capture(fn)
    return graph
