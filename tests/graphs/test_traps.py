"""Known traps of captured graphs, one test each.

Raise at capture here (in plain CUDA-graph use: an unnamed CUDA error, or silence, as noted):

  host value        a value read on the host: item, bool, index, f-string
  host branch       a branch on what a tensor holds
  host read         tolist, numpy, cpu, print                     (numpy of CPU tensors: silent)
  other device      to("cpu") in any spelling, to another kind
  host wait         isin, histc, decompositions, packed and nested sequences
  not strided       sparse tensors, and mkldnn's
  unseen branch     torch.cond and its kin
  autograd          a step that leaves inference mode for it
  dynamic shape     nonzero, unique, masked select, boolean index, repeats from a tensor
  host data         torch.tensor, from_numpy, a list as index     (silent once on the device)
  random draws      any generator                                 (silent: draws depend on history)
  moved memory      set_, resize_, `.data =`, in-place transpose  (silent: happens at capture only)
  raw address       data_ptr handed to unseen code                (silent)
  own rebinding     the step rebinds its own buffer               (silent)
  swapped tensors   torch.utils.swap_tensors                      (silent)
  other thread      a thread writes to a static buffer            (silent: happens at capture only)

Neither raised nor tested: what `torch.utils.dlpack.to_dlpack` hands an address to, and what
another thread writes to anything but a static buffer.

Silent in plain CUDA-graph use, raised at replay by the guard:

  rebound buffer    new storage under an old name
  changed shape, changed strides, changed dtype
  missed by debug   the generation counter alone catches a bump, with debug off

Silent, and stay so; these tests pin down what happens:

  frozen number     a Python value is the one that capture saw
  frozen choice     so is a tensor that Python chose
  lost side effect  the step's Python does not run
  not staged        inputs keep what the last step left
  shared output     a replay overwrites what the last one returned
  input in place    each replay changes its input again
  stale scratch     memory the step reads before writing (the tape's poison shows it)
"""

from threading import Thread

import numpy as np
import pytest
import torch

from graphs.errors import CaptureError
from graphs.graph_capturer import GraphCapturer
from graphs.graph_key import GraphKey
from graphs.replay_guard import BufferGeneration, ReplayGuard
from graphs.tape_graph import TapeStepGraph
from tests.graphs.toy_step import CountingMasks, ToyBuffers, record


@pytest.fixture
def x(device):
    return torch.arange(6.0, device=device)


def _refuses(backend, fn, names):
    fn_ran = []

    def step():
        fn()
        fn_ran.append(True)

    with pytest.raises(CaptureError, match=names):
        record(backend, step)
    assert not fn_ran, "refused only after the operation"


# --- raise at capture ---


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: bool(x[0]),
        lambda x: range(x[1].int()),
        lambda x: f"{x[0]}",
        lambda x: x[x[1].long()],
        lambda x: x[: x[1].long()],
        lambda x: 3.0 in x,
        lambda x: torch.equal(x, x),
        lambda x: torch.full((2,), x[0]),
    ],
)
def test_host_value(backend, x, read):
    read(x)  # as a warm-up would: CUDA loads a kernel at its first use, which no capture may be
    _refuses(backend, lambda: read(x), r"_local_scalar_dense|equal|__format__")


def test_host_branch(backend, x):
    def branch():
        if x.sum() > 0:
            x.zero_()

    _refuses(backend, branch, r"_local_scalar_dense.*`if x.sum\(\) > 0:`")


@pytest.mark.parametrize(
    ("read", "names"),
    [
        (lambda x: x.tolist(), "Tensor.tolist"),
        (lambda x: x.cpu(), "Tensor.cpu"),
        (lambda x: x.numpy(), "Tensor.numpy"),
        (lambda x: np.asarray(x), "Tensor.__array__"),
        (lambda x: print(x), "Tensor.__repr__"),
        (lambda x: torch.from_dlpack(x), "Tensor.__dlpack__"),
    ],
)
def test_host_read(backend, x, read, names):
    _refuses(backend, lambda: read(x), names)


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.to("cpu"),
        lambda x: x.to(torch.device("cpu"), torch.float64),
        lambda x: x.to(device="cpu"),
        lambda x: x.to("meta"),
    ],
)
def test_other_device(backend, x, move):
    _refuses(backend, lambda: move(x), r"Tensor\.to|aten\._to_copy")


def test_a_dtype_or_its_own_device_is_no_other_device(backend, x):
    half = x.half()
    graph = record(backend, lambda: half.copy_(x.to(torch.float16).to(half)))
    x.fill_(7)
    graph.replay()
    assert half[0].item() == 7


@pytest.mark.parametrize(
    ("wait", "names"),
    [
        (lambda x, m: torch.isin(x, x), "isin"),
        (lambda x, m: torch.histc(x), "histc"),
        (lambda x, m: torch.linalg.matrix_rank(m), "_linalg_svd.*matrix_rank"),
        (lambda x, m: torch.linalg.pinv(m), "linalg_pinv"),
        (lambda x, m: torch.linalg.eigvals(m), "linalg_eig"),
        (lambda x, m: torch.linalg.eigvalsh(m), "_linalg_eigh"),
        (lambda x, m: torch.nested.as_nested_tensor([x, x]), "_nested_tensor_from_tensor_list"),
    ],
)
def test_host_wait(backend, x, wait, names):
    square = torch.eye(3, device=x.device)
    _refuses(backend, lambda: wait(x, square), names)


def test_host_wait_for_packed_lengths(backend, x):
    rows, lengths = x.view(2, 3, 1), torch.tensor([3, 2])
    pack = torch.nn.utils.rnn.pack_padded_sequence
    _refuses(backend, lambda: pack(rows, lengths, batch_first=True), "_pack_padded_sequence")


def test_not_strided(backend, x):
    index = x.long()[None]
    _refuses(backend, lambda: x.to_sparse(), "_to_sparse")
    _refuses(backend, lambda: torch.sparse_coo_tensor(index, x, (6,)), "_sparse_coo_tensor")


def test_unseen_branch(backend, x):
    above = x.sum() > 0
    _refuses(backend, lambda: torch.cond(above, torch.sin, torch.cos, (x,)), "cond")


def test_autograd(backend, x):
    def step():
        y = x * 2
        with torch.inference_mode(False):
            y.add_(1)

    with torch.inference_mode():  # as the capturer captures
        _refuses(backend, step, r"y\.add_\(1\).*outside InferenceMode")


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: torch.where(x > 2), "nonzero"),
        (lambda x: x.unique(), "unique"),
        (lambda x: x.masked_select(x > 2), "masked_select"),
        (lambda x: x.repeat_interleave(x.long()), "repeat_interleave"),
        (lambda x: x[x > 2], r"aten.index.Tensor.*boolean index"),
        (lambda x: x.__setitem__(x > 2, 0.0), r"aten.index_put_.*boolean index"),
        (lambda x: x.index_put_((x > 2,), x[:1]), r"aten.index_put_.*boolean index"),
        (lambda x: torch.bincount(x.long()), "bincount"),
    ],
)
def test_dynamic_shape(backend, x, shape, names):
    _refuses(backend, lambda: shape(x), names)


@pytest.mark.parametrize(
    ("take", "names"),
    [
        (lambda x: torch.tensor([1.0], device=x.device), "torch.tensor"),
        (lambda x: torch.tensor(1.0, device=x.device), "torch.tensor"),
        (lambda x: torch.as_tensor([1.0]), "torch.as_tensor"),
        (lambda x: torch.asarray([1.0]), "torch.asarray"),
        (lambda x: x.new_tensor([1.0]), "Tensor.new_tensor"),
        (lambda x: torch.from_numpy(np.ones(3)), "lift_fresh"),
        (lambda x: torch.FloatTensor([1.0]), "lift_fresh"),
        (lambda x: x[[0, 2]], "lift_fresh"),
    ],
)
def test_host_data(backend, x, take, names):
    _refuses(backend, lambda: take(x), names)


def test_random_draws(backend, x):
    generator = torch.Generator(x.device)
    _refuses(backend, lambda: torch.rand(2, device=x.device), "aten.rand")
    _refuses(backend, lambda: x.normal_(generator=generator), "aten.normal_")
    _refuses(backend, lambda: torch.dropout(x, 0.5, True), "aten.*(dropout|bernoulli)")
    _refuses(backend, lambda: torch.multinomial(x, 1), "aten.multinomial")


@pytest.mark.parametrize(
    ("move", "names"),
    [
        (lambda x: x.set_(x[2:]), "aten.set_"),
        (lambda x: x.resize_(9), "aten.resize_"),
        (lambda x: setattr(x, "data", x + 1), r"data.*__set__"),
        (lambda x: x.unsqueeze_(0), "aten.unsqueeze_"),
        (lambda x: x.pin_memory(), "Tensor.pin_memory"),
    ],
)
def test_moved_memory(backend, x, move, names):
    address, shape = x.data_ptr(), x.shape
    _refuses(backend, lambda: move(x), names)
    assert (x.data_ptr(), x.shape) == (address, shape)


def test_raw_address(backend, x):
    _refuses(backend, lambda: x.data_ptr(), "Tensor.data_ptr")
    _refuses(backend, lambda: x.untyped_storage(), "Tensor.untyped_storage")


def _buffers_on(device):
    return lambda size: ToyBuffers.of(size, device)


def test_own_rebinding(backend, device):
    def step(buffers, key):
        buffers.state = buffers.state + 1

    capturer = GraphCapturer(backend, step, _buffers_on(device), CountingMasks([]))
    with pytest.raises(CaptureError, match="state: address was"):
        capturer.capture([GraphKey(2)])


def test_swapped_tensors(backend, device):
    def step(buffers, key):
        torch.utils.swap_tensors(buffers.state, buffers.out)

    capturer = GraphCapturer(backend, step, _buffers_on(device), CountingMasks([]))
    with pytest.raises(CaptureError, match="state: address was"):
        capturer.capture([GraphKey(2)])


def test_swapped_tensors_of_no_buffer():
    x, y = torch.zeros(2), torch.ones(2)

    def step():
        torch.add(x, y, out=x)
        torch.utils.swap_tensors(x, y)

    with pytest.raises(CaptureError, match=r"shape \(2,\).*swap_tensors"):
        TapeStepGraph().capture(step)


def test_other_thread(backend, device):
    def step(buffers, key):
        buffers.state.add_(1)
        buffers.out[0].mul_(2)  # a view's writes count as seen
        thread = Thread(target=lambda: buffers.state.add_(1))
        thread.start()
        thread.join()

    buffers = ToyBuffers.of(2, device)  # outside inference mode: torch counts their writes
    capturer = GraphCapturer(backend, step, lambda _: buffers, CountingMasks([]))
    with pytest.raises(CaptureError, match=r"another thread.*: state$"):
        capturer.capture([GraphKey(2)])


# --- silent in plain use, raised at replay ---


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda t: t.clone(), "address"),
        (lambda t: t[:, :8], "shape"),
        (lambda t: t.T, "strides"),
        (lambda t: t.view(torch.int32), "dtype"),
    ],
)
def test_rebound_buffer_changed_shape_strides_dtype(device, change, names):
    buffers = ToyBuffers.of(32, device)
    guard = ReplayGuard(buffers.tensors, BufferGeneration())
    guard.check()
    buffers.state = change(buffers.state)
    with pytest.raises(CaptureError, match=f"state: .*{names} was"):
        guard.check()


@pytest.mark.parametrize("by_data", [False, True])
def test_rebinding_leaves_the_graph_on_the_old_memory(backend, device, by_data):
    """Without a guard: no error, and the new buffer never changes."""
    buffers = ToyBuffers.of(2, device)
    old = buffers.state.detach()
    graph = record(backend, lambda: buffers.state.add_(1))
    old.zero_()
    if by_data:
        buffers.state.data = torch.zeros_like(old)
    else:
        buffers.state = torch.zeros_like(old)
    graph.replay()
    assert buffers.state.sum().item() == 0
    assert old[0, 0].item() == 1


def test_missed_by_debug():
    buffers, generation = ToyBuffers.of(2), BufferGeneration()
    guard = ReplayGuard(buffers.tensors, generation)
    guard.check_generation()
    generation.bump()
    with pytest.raises(CaptureError, match="generation was 0, is 1"):
        guard.check_generation()
    buffers.out = buffers.out.clone()
    with pytest.raises(CaptureError, match="out: address was"):
        guard.check_generation()


# --- silent, and stay so ---


def test_frozen_number(backend, x):
    scale = 2.0
    graph = record(backend, lambda: x.fill_(scale))
    scale = 3.0
    graph.replay()
    assert x[0].item() == 2.0


def test_frozen_choice(backend, x):
    adapters, current = [x + 10, x + 20], 0
    graph = record(backend, lambda: x.copy_(adapters[current]))
    current = 1
    graph.replay()
    assert x[0].item() == 10.0


def test_lost_side_effect(backend, x):
    log = []
    graph = record(backend, lambda: (log.append(1), x.add_(1)))
    graph.replay()
    assert log == [1]


def test_not_staged(backend, x):
    out = torch.zeros_like(x)
    graph = record(backend, lambda: out.copy_(x * 2))
    graph.replay()
    _ = x + 100  # a new batch that nobody copied into x
    graph.replay()
    assert out[1].item() == 2.0


def test_shared_output(backend, x):
    out = torch.zeros_like(x)
    graph = record(backend, lambda: out.copy_(x * 2))
    graph.replay()
    first, kept = out, out.clone()
    x.add_(1)
    graph.replay()
    assert not torch.equal(first, kept)


def test_input_in_place(backend, x):
    graph = record(backend, lambda: x.mul_(2))
    x.fill_(1)
    for _ in range(3):
        graph.replay()
    assert x[0].item() == 8.0


def test_stale_scratch():
    out, scratch = torch.zeros(4), torch.zeros(4)

    def step():
        out.copy_(scratch)  # reads before it writes
        scratch.fill_(1)

    for poison, stale in ((None, True), ([scratch], False)):
        graph = TapeStepGraph(poison)
        graph.capture(step)
        graph.replay()
        assert bool((out == 1).all()) is stale
        assert bool(out.isnan().all()) is not stale
