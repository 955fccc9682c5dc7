"""The sizes that warm-up runs cover every variant of a layer's kernels that prefill can need.

Launchers run on CPU tensors that say they are on a GPU, with Triton's launch intercepted: a
variant is what Triton would compile anew for.
"""

from dataclasses import replace
from importlib import import_module
from itertools import pairwise

import pytest
import torch
import triton

import engine.decode_step
import engine.expert_delta
import engine.mixture
import engine.prefill
from engine.attention import ExtendAttention
from engine.decode_step import lora_delta
from engine.decoder import StepTokens
from engine.decoder_weights import Projection
from engine.expert_delta import MAX_PAIRWISE
from engine.side_branch import SideBranch
from engine.warm_up_sizes import eager_batch_sizes, prefill_sizes, product_sizes
from kernels.linear_arrangement import parts_in_product, splits_in_launch
from kernels.linear_config import H200, linear_config
from kernels.linear_shrink import linear_shrink_triton
from kernels.linear_shrink_parts import linear_shrink_parts_triton
from kernels.logprobs import logprobs, logprobs_triton
from kernels.moe_gemm_config import moe_block_size_m
from kernels.moe_gemm_shrink import MAX_SHARED_PAIRS
from kernels.partials import splits_of
from tests.engine.adapted_model import AdaptedModel, greedy, prompt_of
from tests.engine.backends import TestedBackend as Backend
from tests.kernels.cross_compile import is_multiple
from tests.tiny_models import MIXTURES

MOST = 1400  # above every threshold in rows
OPS = {
    "moe_align": ("moe_align_block_size", "moe_lora_align_block_size"),
    **{
        name: (name,)
        for name in (
            "moe_combine",
            "moe_gemm",
            "moe_gemm_shrink",
            "moe_lora_down",
            "moe_lora_expand_grouped",
            "moe_lora_gate_up",
            "moe_lora_shrink",
            "moe_lora_shrink_grouped",
            "moe_route",
        )
    },
}


DENSE_OPS = {
    "engine.decoder": {
        "embedding": ("embed",),
        "norm": ("rms_norm", "add_rms_norm"),
        "rotary": ("rotary_kv_write",),
        "activation": ("gated_activation",),
        "add_expand": ("add_expand",),
    },
    "engine.lora_delta": {
        "lora_metadata": ("lora_metadata",),
        "linear": ("linear",),
        "linear_shrink": ("linear_shrink",),
        "linear_shrink_parts": ("linear_shrink_parts",),
        "sgemm": ("sgemm_a", "sgemm_b"),
    },
    "engine.attention": {"extend_attention": ("extend_attention",)},
}


class OnGPU(torch.Tensor):
    is_cuda = True


def variant_of(kernel, args, kwargs):
    """What Triton compiles a kernel anew for: constants, options, integers that are 1 or of 16,
    addresses of 16, absent arguments."""
    bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    key = []
    for parameter in kernel.params:
        value = bound.pop(parameter.name, None)
        if value is None or parameter.is_constexpr:
            key.append(value)
        elif isinstance(value, torch.Tensor):
            key.append((value.dtype, is_multiple(value, parameter)))
        elif parameter.do_not_specialize or not isinstance(value, int):
            key.append((type(value), *getattr(value, "block_shape", ())))
        else:
            key.append((type(value), value == 1, is_multiple(value, parameter)))
    return kernel.fn.__name__, *key, *sorted(bound.items(), key=str)


class DenseLaunches:
    """Runs a chunk through a dense model for its launches alone, and collects the variants."""

    def __init__(self, served, monkeypatch):
        self.served = served
        self.variants = set()
        self.adding: set[str] = set()  # kernels that were launched with deltas to add
        for user, files in DENSE_OPS.items():
            for file, ops in files.items():
                for op in ops:
                    launcher = getattr(import_module(f"kernels.{file}"), f"{op}_triton")
                    monkeypatch.setattr(import_module(user), op, launcher)

    def of(self, tokens):
        memory, side = self.served.memory, SideBranch(torch.device("cpu"))
        buffers = memory.prefill_buffers(tokens, 1, 1, 1)
        inputs = ("hidden", "attended", "activated")  # of products
        ws = buffers.workspace
        ws = replace(ws, **{name: getattr(ws, name).as_subclass(OnGPU) for name in inputs})
        self.variants = set()
        lora = lora_delta(memory, "sgemm", side, buffers.lora, buffers.adapter_enabled, ws)
        attention = ExtendAttention(
            memory.tables.block_tables,
            buffers.seq_request,
            buffers.q_indptr,
            buffers.seq_lens,
            tokens,
        )
        rows = StepTokens(buffers.token_ids, buffers.positions, buffers.kv_slots, row_mask=None)
        decoder = self.served.runner._step._decoder
        decoder.forward(rows, attention, lora, memory.kv_cache, ws)
        return self.variants

    def record(self, kernel, *args, grid, warmup, **kwargs):
        self.variants.add(variant_of(kernel, args, kwargs))
        if dict(zip(kernel.arg_names, args, strict=False)).get("scalings") is not None:
            self.adding.add(kernel.fn.__name__)


class Launches:
    """Runs a mixture's layer for its launches alone, and collects the variants."""

    def __init__(self, served):
        self.served = served
        self.variants = set()

    def of(self, tokens):
        memory, side = self.served.memory, SideBranch(torch.device("cpu"))
        buffers = memory.prefill_buffers(tokens, 1, 1, 1)
        ws, moe = buffers.workspace, buffers.workspace.moe
        lora = lora_delta(memory, "sgemm", side, buffers.lora, buffers.adapter_enabled, ws)
        moe = replace(moe, activated=moe.activated.as_subclass(OnGPU))
        ws = replace(ws, hidden=ws.hidden.as_subclass(OnGPU), moe=moe)
        decoder = self.served.runner._step._decoder
        layer = decoder.weights.layers[2].mlp
        self.variants = set()
        engine.mixture.run_mixture(2, layer, decoder.architecture, None, lora, ws)
        assert self.variants
        return self.variants

    def record(self, kernel, *args, grid, warmup, **kwargs):
        self.variants.add(variant_of(kernel, args, kwargs))


@pytest.fixture(params=MIXTURES)
def launches(request, tmp_path, monkeypatch):
    name = request.param
    model = AdaptedModel.make(name, tmp_path, {})
    options = {"prefill_chunk_tokens": MOST, "max_seq_len": MOST, "graph_batch_sizes": [1]}
    with model.engine(Backend("cpu", "tape", 0.0), dtype="bfloat16", **options) as served:
        recorder = Launches(served)
        for file, ops in OPS.items():
            for op in ops:
                launcher = getattr(import_module(f"kernels.{file}"), f"{op}_triton")
                for user in (engine.mixture, engine.expert_delta):
                    if hasattr(user, op):
                        monkeypatch.setattr(user, op, launcher)
        monkeypatch.setattr(engine.mixture, "_run_shared", lambda *args: None)
        monkeypatch.setattr(
            triton.runtime.jit.JITFunction,
            "run",
            lambda kernel, *args, **kwargs: recorder.record(kernel, *args, **kwargs),
        )
        yield recorder


@pytest.mark.parametrize(
    ("name", "rank", "adds"),
    [("qwen2", 32, "_add_expand_tile_kernel"), ("qwen3", 16, "_rms_norm_kernel")],
)
def test_every_length_of_a_dense_chunk(name, rank, adds, tmp_path, monkeypatch):
    most = 640
    model = AdaptedModel.make(name, tmp_path, {})
    options = {"prefill_chunk_tokens": most, "max_seq_len": most, "graph_batch_sizes": [1]}
    options["max_lora_rank"] = rank
    monkeypatch.setattr("kernels.hopper_linear.runs_on", lambda device: True)
    with model.engine(Backend("cpu", "tape", 0.0), dtype="bfloat16", **options) as served:
        launches = DenseLaunches(served, monkeypatch)
        monkeypatch.setattr(
            triton.runtime.jit.JITFunction,
            "run",
            lambda kernel, *args, **kwargs: launches.record(kernel, *args, **kwargs),
        )
        covered = set().union(*(launches.of(tokens) for tokens in prefill_sizes(None, most)))
        names = {variant[0] for variant in covered}
        assert {"_hopper_linear_kernel", "_sgemm_a_kernel"} <= names
        assert adds in launches.adding
        for tokens in range(1, most + 1):
            missing = launches.of(tokens) - covered
            assert not missing, f"{tokens} tokens: {missing}"


SHAPES = {  # stacked layers, out, in: q/k/v, attention's output, gate/up, down
    "8B": [(3, 6144, 4096), (1, 4096, 4096), (2, 28672, 4096), (1, 4096, 14336)],
    "1B": [(3, 3072, 2048), (1, 2048, 2048), (2, 16384, 2048), (1, 2048, 8192)],
    "tiny": [(3, 384, 192), (1, 192, 256), (2, 688, 192), (1, 192, 344)],
}


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_product(rows, shape, max_loras, max_rank, is_hopper):
    """A product of a shape and its x A^T, in each way that the engine may take, into partials
    where it is one of those that may be."""
    stack, out_features, in_features = shape
    config = linear_config(rows, out_features, in_features, torch.bfloat16, torch.device("cpu"))
    if config is None:
        return
    out = empty(rows, out_features)
    if stack == 1 and config.splits > 1:
        out = empty(config.splits, rows, out_features, dtype=torch.float32)
    ints, segments = {"dtype": torch.int32}, min(rows, max_loras)
    dims = (rows, out_features, in_features, splits_of(out), stack, max_loras, max_rank)
    arguments = (
        empty(rows, in_features),
        empty(out_features, in_features),
        None,
        out,
        empty(1),
        empty(stack, max_loras, dtype=torch.int64),
        empty(stack, max_loras, **ints),
        empty(segments + 1, **ints),
        empty(segments, **ints),
        empty(rows, **ints),
        empty(1, **ints),
        empty(rows, **ints),
        max_rank,
    )
    width = stack * max_rank
    splits = splits_in_launch(config, *dims, H200)
    if splits:
        shrunk = empty(splits, rows, width, dtype=torch.float32)
        linear_shrink_triton(*arguments, shrunk, empty(2**16, **ints))
    parts = parts_in_product(config, *dims[1:], H200)
    if parts and is_hopper:
        shrunk = empty(rows, parts, width, dtype=torch.float32)
        linear_shrink_parts_triton(*arguments, shrunk)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("max_rank", [16, 256])
@pytest.mark.parametrize("max_loras", [1, 2, 8, 64, 256])
@pytest.mark.parametrize("is_hopper", [False, True])
def test_products_of_any_shape_and_number_of_slots(
    name, max_rank, max_loras, is_hopper, monkeypatch
):
    """How many programs shrink decides how a launch is laid out, and so what is compiled."""
    variants = set()
    monkeypatch.setattr("kernels.hopper_linear.runs_on", lambda device: is_hopper)
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction,
        "run",
        lambda kernel, *args, grid, warmup, **kwargs: variants.add(
            variant_of(kernel, args, kwargs)
        ),
    )

    def of(rows):
        variants.clear()
        for shape in SHAPES[name]:
            launch_product(rows, shape, max_loras, max_rank, is_hopper)
        return set(variants)

    projections = [
        Projection(torch.empty(out, width, dtype=torch.bfloat16), None, [1] * stack)
        for stack, out, width in SHAPES[name]
    ]
    for most in (40, 2048):
        sizes = product_sizes(projections, max_loras, max_rank, most)
        assert len(sizes) < 20
        chunks, batches = prefill_sizes(None, most, sizes), eager_batch_sizes(None, 21, most, sizes)
        for first, run in ((1, chunks), (22, batches)):
            covered = set().union(*map(of, run))
            for rows in range(first, min(most, 130) + 1):
                assert of(rows) <= covered, f"{rows} rows"
            kernels = {variant[0] for variant in covered}
            if is_hopper:
                assert kernels - {"_hopper_ranks_kernel"} == {"_hopper_linear_kernel"}
                has_parts = most > 64 and max_rank * max_loras <= 128 and name != "tiny"
                assert not has_parts or "_hopper_ranks_kernel" in kernels
            else:
                assert kernels == {"_linear_shrink_kernel"}
    assert product_sizes(projections, 0, max_rank, most) == []


def test_every_length_of_a_chunk(launches):
    moe = launches.served.memory.dims.moe
    covered = set()
    for tokens in prefill_sizes(moe, MOST):
        covered |= launches.of(tokens)
    assert len(prefill_sizes(moe, MOST)) < 100
    names = {variant[0] for variant in covered}
    some = range(MAX_SHARED_PAIRS // moe.top_k + 1, MAX_PAIRWISE // moe.top_k + 1)  # rows
    blocks = {moe_block_size_m(rows * moe.top_k, moe.num_experts) for rows in some}
    assert "_moe_gemm_shrink_kernel" in names
    assert ("_moe_gemm_shrink_blocks_kernel" in names) == (16 in blocks)
    assert ("_moe_lora_shrink_kernel" in names) == bool(blocks - {16})
    for tokens in range(1, MOST + 1):
        missing = launches.of(tokens) - covered
        assert not missing, f"{tokens} tokens: {missing}"


def test_logprobs_of_tokens_and_of_prompts(tmp_path, monkeypatch):
    variants = set()

    def both(*args):
        logprobs_triton(*args)
        logprobs(*args)

    model = AdaptedModel.make("llama", tmp_path, {})
    backend = Backend("cpu", "tape", 0.0)
    with model.engine(backend, dtype="bfloat16") as served:
        monkeypatch.setattr(
            triton.runtime.jit.JITFunction,
            "run",
            lambda kernel, *args, grid, warmup, **kwargs: variants.add(
                variant_of(kernel, args, kwargs)
            ),
        )
        for module in (engine.prefill, engine.decode_step):
            monkeypatch.setattr(module, "logprobs", both)
        with torch.inference_mode():
            served.runner.prefill.warm_up(4)
        covered = set(variants)
        served.generate(prompt_of(20), greedy(3, prompt_logprobs=2))
        assert variants == covered
        assert len(variants) == 2


def test_sizes_are_in_range():
    assert prefill_sizes(None, 10) == [1, 4, 10]
    assert prefill_sizes(None, 2048) == [1, 4, 16, 32, 64, 128, 512, 513, 2048]
    assert eager_batch_sizes(None, 8, 8) == []
    assert eager_batch_sizes(None, 8, 40) == [9, 16, 32, 40]


def test_a_chunk_longer_than_any_sequence(tmp_path):
    """It packs several: what a warm-up of so many tokens has to do as well."""
    model = AdaptedModel.make("mixtral", tmp_path, {})
    backend = Backend("cpu", "tape", 1e-4)
    with model.engine(backend, max_seq_len=24, prefill_chunk_tokens=100) as served:
        lengths = []
        forward = served.runner.prefill._forward

        def record(buffers, max_q_len):
            bounds = buffers.q_indptr.tolist()
            assert [b - a for a, b in pairwise(bounds)] == buffers.seq_lens.tolist()
            lengths.append((buffers.seq_lens.tolist(), max_q_len))
            forward(buffers, max_q_len)
            assert not buffers.workspace.hidden.isnan().any()

        served.runner.prefill._forward = record
        with torch.inference_mode():
            for tokens in (1, 24, 25, 100):
                served.runner.prefill.warm_up(tokens)
        assert lengths == [([1], 1), ([24], 24), ([24, 1], 24), ([24, 24, 24, 24, 4], 24)]
        names = [None] * 6
        prompts = [prompt_of(18, row) for row in range(6)]
        model.check(served.generate(prompts, greedy(5, ignore_eos=True), names), backend)
