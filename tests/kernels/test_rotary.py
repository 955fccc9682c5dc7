"""Rotation and KV writes: kernel against twin, twin against Hugging Face's Llama and Qwen3."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from kernels.lora_arguments import NO_LORA
from kernels.rotary import rotary_kv_write, rotary_kv_write_torch, rotary_kv_write_triton
from tests.kernels.cross_compile import compile_each, compile_launches, sum_layouts
from tests.kernels.expand_batch import ROWS, ExpandBatch, same_bits

MAX_POSITION, PAGES, PAGE_SIZE, EPS = 40, 4, 4, 1e-6
POSITIONS = [7, 0, 39, 12, 0, 99, -3]  # the last two lie outside the table
SLOTS = [5, 15, 8, -1, 0, 10, -7]  # 0: the dummy page; negative: not written


@dataclass(frozen=True)
class Case:
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    norms: str = ""  # which of "q" and "k" are normalised
    weight_offset: float = 0.0
    lora: ExpandBatch | None = None

    @property
    def slice_sizes(self) -> list[int]:
        heads = (self.num_q_heads, self.num_kv_heads, self.num_kv_heads)
        return [count * self.head_dim for count in heads]


LORA_NAMES = (
    "shrunk",
    "arena",
    "b_ptrs",
    "lora_ranks",
    "scalings",
    "row_slot",
    "row_order",
    "seg_indptr",
    "weight_indices",
    "num_segments",
    "max_rank",
)
CASES = [
    Case(9, 3, 64, torch.float32),
    Case(4, 1, 80, torch.bfloat16),
    Case(5, 2, 96, torch.float16, "qk"),
    Case(16, 8, 128, torch.bfloat16, "qk"),
    Case(3, 3, 256, torch.float32, "k", 1.0),
    Case(1, 1, 2, torch.float32, "q"),
]


def _table(head_dim: int) -> torch.Tensor:
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(MAX_POSITION)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)  # [max_pos, D]


def _arguments(case: Case, device: torch.device | str = "cpu") -> dict:
    """The op's arguments: qkv's rows apart, NaN between; caches of inf, pages of K beside V."""
    generator = torch.Generator().manual_seed(case.head_dim)
    width = sum(case.slice_sizes)
    tokens = len(case.lora.rows) if case.lora else len(POSITIONS)
    qkv = torch.full((tokens, width + 16), torch.nan, dtype=case.dtype)
    qkv[:, :width] = torch.randn(tokens, width, generator=generator)
    qkv[:, :width:5] = -0.0
    weights = {
        kind: torch.randn(case.head_dim, generator=generator).to(case.dtype, copy=True).to(device)
        for kind in case.norms
    }
    shape = (PAGES, 2, PAGE_SIZE, case.num_kv_heads, case.head_dim)
    positions, slots = POSITIONS, SLOTS
    if case.lora:  # every row with a place of its own, but the third
        shape = (-(-tokens // PAGE_SIZE), *shape[1:])
        positions = [(3 * row) % MAX_POSITION for row in range(tokens)]
        slots = [-1 if row == 2 else row for row in range(tokens)]
    cache = torch.full(shape, torch.inf, dtype=case.dtype, device=device)
    lora = case.lora.arguments(device) if case.lora else NO_LORA
    return {
        "qkv": qkv.to(device)[:, :width],
        **dict(zip(LORA_NAMES, lora, strict=True)),
        "q_norm_weight": weights.get("q"),
        "k_norm_weight": weights.get("k"),
        "norm_eps": EPS,
        "norm_weight_offset": case.weight_offset,
        "cos_sin": _table(case.head_dim).to(device),
        "positions": torch.tensor(positions, dtype=torch.int32, device=device),
        "kv_slots": torch.tensor(slots, dtype=torch.int32, device=device),
        "num_q_heads": case.num_q_heads,
        "num_kv_heads": case.num_kv_heads,
        "k_cache": cache[:, 0],
        "v_cache": cache[:, 1],
    }


@pytest.mark.kernel
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_matches_twin(kernel_device, case):
    expected, actual = _arguments(case), _arguments(case, kernel_device)
    given = expected["qkv"].clone()
    rotary_kv_write_torch(**expected)
    rotary_kv_write_triton(**actual)
    # float32 sums in another order, then one rounding; atol for what cancels in the rotation.
    rtol = 4e-6 if case.dtype == torch.float32 else torch.finfo(case.dtype).eps
    for name in ("qkv", "k_cache"):
        assert_close(actual[name].cpu(), expected[name], rtol=rtol, atol=4e-6, equal_nan=True)
    assert_close(actual["v_cache"].cpu(), expected["v_cache"], rtol=0, atol=0, equal_nan=True)
    q_width = case.num_q_heads * case.head_dim
    assert torch.equal(actual["qkv"][:, q_width:].cpu(), given[:, q_width:]), "k, v only read"
    assert not torch.equal(actual["qkv"][:, :q_width].cpu(), given[:, :q_width])


@pytest.mark.kernel
def test_a_token_does_not_depend_on_its_neighbours(kernel_device):
    case = Case(4, 2, 80, torch.float32, "qk")
    together, poisoned = _arguments(case, kernel_device), _arguments(case, kernel_device)
    poisoned["qkv"][[0, 1, 3, 4, 5, 6]] = torch.nan
    rotary_kv_write_triton(**together)
    rotary_kv_write_triton(**poisoned)
    q_width = 4 * 80
    assert torch.equal(together["qkv"][2, :q_width], poisoned["qkv"][2, :q_width])
    page, entry = divmod(SLOTS[2], PAGE_SIZE)
    assert torch.equal(together["k_cache"][page, entry], poisoned["k_cache"][page, entry])


@pytest.mark.parametrize("case", [replace(case, dtype=torch.float32) for case in CASES], ids=str)
@torch.no_grad()
def test_op_matches_hugging_face(case):
    arguments = _arguments(case)
    heads = arguments["qkv"].clone().unflatten(1, (-1, case.head_dim))  # [T, heads, D]
    q, k, v = heads.split((case.num_q_heads, case.num_kv_heads, case.num_kv_heads), dim=1)
    norm = Qwen3RMSNorm(case.head_dim, eps=EPS)
    if "q" in case.norms:
        norm.weight.copy_(arguments["q_norm_weight"] + case.weight_offset)
        q = norm(q)
    if "k" in case.norms:
        norm.weight.copy_(arguments["k_norm_weight"] + case.weight_offset)
        k = norm(k)
    clamped = torch.tensor(POSITIONS).clamp(0, MAX_POSITION - 1)
    cos, sin = _table(case.head_dim)[clamped].chunk(2, dim=1)
    q, k = apply_rotary_pos_emb(q, k, torch.cat((cos, cos), dim=1), torch.cat((sin, sin), dim=1))

    rotary_kv_write(*arguments.values())
    rotated = arguments["qkv"][:, : case.num_q_heads * case.head_dim]
    assert_close(rotated, q.flatten(1), rtol=2e-6, atol=2e-6)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            page, entry = divmod(slot, PAGE_SIZE)
            assert_close(arguments["k_cache"][page, entry], k[token], rtol=2e-6, atol=2e-6)
            assert torch.equal(arguments["v_cache"][page, entry], v[token])
    for cache in (arguments["k_cache"], arguments["v_cache"]):
        unwritten = [slot for slot in range(PAGES * PAGE_SIZE) if slot not in SLOTS]
        assert (cache.flatten(0, 1)[unwritten] == torch.inf).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_q_heads": 8}, "qkv is"),
        ({"cos_sin": torch.zeros(4, 32)}, "cos_sin is"),
        ({"kv_slots": torch.zeros(7, dtype=torch.int64)}, "int32"),
        ({"v_cache": torch.zeros(PAGES, PAGE_SIZE, 3, 64)}, "strides"),
        ({"q_norm_weight": torch.zeros(32)}, "norm weights"),
    ],
)
def test_launcher_refuses_what_the_kernel_does_not_read(change, message):
    with pytest.raises(AssertionError, match=message):
        rotary_kv_write_triton(**(_arguments(CASES[0]) | change))


@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_compiles(case):
    assert compile_launches(rotary_kv_write_triton, **_arguments(case)) == 1


def _with_lora(case: Case, rows: list[int], **lora) -> Case:
    return replace(case, lora=ExpandBatch(rows, case.slice_sizes, **lora))


BF16 = torch.bfloat16
LORA_CASES = {
    "one_row": _with_lora(Case(9, 3, 64, torch.float32), ROWS[1]),
    "gqa": _with_lora(Case(4, 1, 80, torch.float32), ROWS[8]),
    "bf16": _with_lora(Case(4, 2, 128, BF16), ROWS[8], dtype=BF16),
    "norms": _with_lora(Case(5, 2, 96, torch.float32, "qk", 1.0), ROWS[8]),
    "norms_bf16": _with_lora(Case(4, 2, 128, BF16, "qk"), ROWS[3], dtype=BF16),
    "one_norm": _with_lora(Case(3, 3, 256, torch.float32, "k"), ROWS[3]),
    "odd_ranks": _with_lora(
        Case(2, 1, 16, torch.float32),
        ROWS[8],
        ranks=[[1, 2, 3, 0, 5], [0, 0, 4, 0, 0], [3, 1, 0, 0, 2]],
        max_rank=5,
    ),
    "disabled": _with_lora(
        Case(2, 1, 16, torch.float16), ROWS[8], disabled=frozenset({0, 4}), dtype=torch.float16
    ),
    "many_rows": _with_lora(Case(6, 2, 32, torch.float32), ROWS[40]),
    "parts": _with_lora(Case(5, 2, 64, torch.float32), ROWS[8], parts=4),
    "parts_norms": _with_lora(
        Case(4, 2, 128, BF16, "qk"), ROWS[40], ranks=[[16, 8, 5, 1, 16]] * 3, max_rank=16, parts=8
    ),
    "many_rows_mixed": _with_lora(Case(2, 2, 64, BF16, "q"), ROWS[17]),
}


@pytest.mark.parametrize("name", LORA_CASES)
def test_op_adds_deltas_before_norm_and_rotation(name):
    case = LORA_CASES[name]
    arguments = _arguments(case)
    plain = _arguments(replace(case, dtype=torch.float32))  # the same op on q, k and v with deltas
    plain |= dict(zip(LORA_NAMES, NO_LORA, strict=True))
    plain["qkv"].copy_((arguments["qkv"].double() + case.lora.delta()).float())
    for kind in ("q_norm_weight", "k_norm_weight"):
        if plain[kind] is not None:
            plain[kind] = arguments[kind].float()
    rotary_kv_write(*arguments.values())
    rotary_kv_write(*plain.values())
    rtol, atol = (
        (2e-5, 2e-5) if case.dtype == torch.float32 else (torch.finfo(case.dtype).eps, 2e-3)
    )
    q_width = case.slice_sizes[0]
    pairs = [(arguments["qkv"][:, :q_width], plain["qkv"][:, :q_width])]
    pairs += [(arguments[name], plain[name]) for name in ("k_cache", "v_cache")]
    for actual, expected in pairs:
        assert_close(actual.float(), expected, rtol=rtol, atol=atol)


@pytest.mark.kernel
@pytest.mark.parametrize("name", LORA_CASES)
def test_kernel_with_deltas_matches_twin(kernel_device, name):
    case = LORA_CASES[name]
    expected, actual = _arguments(case), _arguments(case, kernel_device)
    plain = _arguments(case, kernel_device) | dict(zip(LORA_NAMES, NO_LORA, strict=True))
    given = expected["qkv"].clone()
    rotary_kv_write_torch(**expected)
    rotary_kv_write_triton(**actual)
    rotary_kv_write_triton(**plain)
    # float32 sums in another order, then one rounding; atol for what cancels.
    rtol, atol = (
        (1e-5, 5e-5) if case.dtype == torch.float32 else (torch.finfo(case.dtype).eps, 4e-3)
    )
    for name in ("qkv", "k_cache", "v_cache"):
        assert_close(actual[name].cpu(), expected[name], rtol=rtol, atol=atol)
    q_width = case.slice_sizes[0]
    assert torch.equal(actual["qkv"][:, q_width:].cpu(), given[:, q_width:]), "k, v only read"
    base = case.lora.base_rows
    assert same_bits(actual["qkv"][base], plain["qkv"][base]), "rows without a delta"
    places = [row for row in base if row != 2]
    for name in ("k_cache", "v_cache"):
        found, without = (arguments[name].flatten(0, 1) for arguments in (actual, plain))
        assert same_bits(found[places], without[places]), "rows without a delta"
        assert (found[2] == torch.inf).all(), "a negative slot"


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["norms", "many_rows", "parts"])
def test_a_token_with_a_delta_does_not_depend_on_its_neighbours(kernel_device, name):
    case = LORA_CASES[name]
    together, poisoned = _arguments(case, kernel_device), _arguments(case, kernel_device)
    kept = 3
    assert kept not in case.lora.base_rows
    others = [row for row in range(len(case.lora.rows)) if row != kept]
    poisoned["qkv"][others] = torch.nan
    poisoned["shrunk"][others] = torch.nan
    rotary_kv_write_triton(**together)
    rotary_kv_write_triton(**poisoned)
    q_width = case.slice_sizes[0]
    assert torch.equal(together["qkv"][kept, :q_width], poisoned["qkv"][kept, :q_width])
    page, entry = divmod(kept, PAGE_SIZE)
    for cache in ("k_cache", "v_cache"):
        assert torch.equal(together[cache][page, entry], poisoned[cache][page, entry])


@pytest.mark.parametrize("name", ["norms", "norms_bf16", "one_norm", "parts_norms"])
def test_heads_are_normed_in_one_order_with_and_without_deltas(name):
    """Rows of the base model have the bits of an engine without LoRA."""
    case, layouts = LORA_CASES[name], []
    for lora in (None, case.lora):
        arguments = _arguments(replace(case, lora=lora))
        ((_, kernel),) = compile_each(rotary_kv_write_triton, targets=(90,), **arguments)
        layouts.append(sum_layouts(kernel))
    assert layouts[0]
    assert layouts[0] <= layouts[1]


@pytest.mark.parametrize("name", ["bf16", "norms_bf16", "many_rows_mixed", "parts_norms"])
def test_compiles_with_deltas(name):
    assert compile_launches(rotary_kv_write_triton, **_arguments(LORA_CASES[name])) == 1
