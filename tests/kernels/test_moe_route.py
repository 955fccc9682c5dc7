"""moe_route: launcher against twin, both against float64 with merged router weights."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from kernels.moe_route import moe_route, moe_route_torch, moe_route_triton
from kernels.moe_route_parts import route_arrivals, scratch_shape
from tests.kernels.cross_compile import compile_each, compile_launches, product_layouts
from tests.kernels.packed_adapters import PackedAdapters, pack_adapters

NAN = float("nan")
INF = float("inf")
POISON = -77
OPS = {"triton": moe_route_triton, "torch": moe_route_torch}
BOTH = [pytest.param("triton", marks=pytest.mark.kernel), "torch"]


@dataclass
class Case:
    """A router, and the adapters of its rows: rows[t] is row t's slot, ranks[slot] its rank."""

    num_experts: int
    top_k: int
    in_features: int
    rows: list[int]
    ranks: list[int]
    renormalize: bool = True
    dtype: torch.dtype = torch.float32


MIXED = [8, 1, -1, 3, 2, 0, 7, 5, 4, 6]
RANKS = [1, 3, 5, 8, 12, 16, 0, 33, 64]
HALF = torch.float16
CASES = {
    "one_expert": Case(1, 1, 24, [0, -1, 0], [4]),
    "six_experts": Case(6, 6, 40, MIXED, RANKS, False),
    "six_experts_half": Case(6, 2, 72, MIXED, RANKS, True, HALF),
    "sixty_experts": Case(60, 4, 171, [2, 1, 2, -1, 0], [5, 0, 33], False),
    "ninety_six_experts": Case(96, 8, 300, [0], [16]),
    "one_base_row": Case(128, 8, 264, [-1], [16], False, HALF),
    "one_hundred_and_sixty": Case(160, 10, 96, [0, 1] * 8 + [1], [256, 131], True, HALF),
    "most_experts": Case(256, 10, 64, [1, -1, 1], [0, 7], False),
    "more_than_a_block_of_columns": Case(12, 2, 1100, [0, -1, 1], [4, 9]),
    "parts_beyond_k": Case(6, 2, 288, MIXED, RANKS),
    "parts_beyond_k_of_narrow_rows": Case(6, 2, 1152, MIXED, RANKS, True, HALF),
    "parts_beyond_k_of_many_experts": Case(256, 8, 1152, [0, -1, 0], [4], True, HALF),
    "few_columns_in_the_last_part": Case(60, 4, 1030, MIXED + MIXED[::-1], RANKS, True, HALF),
    "sixteen_rows_a_program": Case(8, 2, 36, [t % 4 - 1 for t in range(150)], [3, 16, 24]),
    "prefill": Case(60, 4, 40, [t // 400 - 1 for t in range(1100)], [5, 8], False, HALF),
    "bfloat16": Case(128, 8, 264, MIXED, RANKS, True, torch.bfloat16),
    "bfloat16_prefill": Case(60, 4, 40, [t // 90 % 10 - 1 for t in range(1100)], RANKS, True),
}
CASES["bfloat16_prefill"].dtype = torch.bfloat16
SWEPT = list(itertools.product((1, 6, 60, 96, 128, 160), (1, 2, 8, 10), (1, 4, 7)))
ROUTED = {
    f"{experts}x{top_k}x{slots}x{tokens}": Case(
        experts,
        min(top_k, experts),
        (96, 171, 512)[slots % 3],
        [(3 * t) % (slots + 1) - 1 for t in range(tokens)],
        [(1, 5, 16, 33, 64, 0, 24)[(slot + experts) % 7] for slot in range(slots)],
        (top_k + slots) % 2 == 0,
        (torch.float32, torch.bfloat16, torch.float16)[(experts + top_k + tokens) % 3],
    )
    for experts, top_k, slots in SWEPT
    for tokens in (1, 5, 17, 130, 1025)
}


def runs_here(case: Case, device: torch.device) -> None:
    if case.dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter's dot takes bfloat16 for integers")


def packed(case: Case, order: list[int] | None = None, dtype=None) -> PackedAdapters:
    """Adapters whose deltas are about as large as the logits: x A^T grows with H and rank."""
    adapters = pack_adapters(
        [case.ranks], case.in_features, [case.num_experts], dtype or case.dtype, order
    )
    adapters.scalings /= max(1, max(case.ranks)) ** 0.5 * case.in_features**0.5
    return adapters


def activations(case: Case, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """x and W as columns of wider buffers, whose margins are NaN."""
    generator = torch.Generator().manual_seed(len(case.rows) + case.num_experts)
    wide = []
    for rows, scale in ((len(case.rows), 1.0), (case.num_experts, case.in_features**-0.5)):
        buffer = torch.full((rows, case.in_features + 8), NAN, dtype=case.dtype)
        values = torch.randn(rows, case.in_features, generator=generator)
        buffer[:, : case.in_features] = values * scale
        wide.append(buffer.to(device)[:, : case.in_features])
    return wide[0], wide[1]


def ints(values: list[int], device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def route(
    op,
    case: Case,
    x: torch.Tensor,
    weight: torch.Tensor,
    adapters: PackedAdapters | None = None,
    enabled: list[int] | None = None,
    row_mask: list[int] | None = None,
    max_loras: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids on the CPU; what lies behind the rows must stay as it was.

    Of the tables the first `max_loras` entries are handed over; the others lie behind them.
    """
    device, num_rows = x.device, x.shape[0]
    lora: dict[str, torch.Tensor | None] = dict.fromkeys(
        ["row_adapter", "adapter_enabled", "arena", "a_ptrs", "b_ptrs", "lora_ranks", "scalings"]
    )
    if adapters is not None:
        adapters = adapters.to(device)
        lora = {
            "row_adapter": ints(case.rows, device),
            "adapter_enabled": ints(enabled or [1] * len(case.ranks), device)[:max_loras],
            "arena": adapters.arena,
            "a_ptrs": adapters.a_ptrs[0, :max_loras],
            "b_ptrs": adapters.b_ptrs[0, :max_loras],
            "lora_ranks": adapters.lora_ranks[0, :max_loras],
            "scalings": adapters.scalings[0, :max_loras],
        }
    weights = torch.full((num_rows + 2, case.top_k), NAN, device=device)
    ids = torch.full_like(weights, POISON, dtype=torch.int32)
    shape = scratch_shape(num_rows, *weight.shape[::-1], x.element_size())
    scratch = torch.full(shape, NAN, device=device)
    arrivals = torch.zeros(route_arrivals(num_rows), dtype=torch.int32, device=device)
    op(
        x,
        weight,
        None if row_mask is None else ints(row_mask, device),
        **lora,
        renormalize=case.renormalize,
        topk_weights=weights[:num_rows],
        topk_ids=ids[:num_rows],
        scratch=scratch,
        arrivals=arrivals,
    )
    assert not arrivals.any()
    assert weights[num_rows:].isnan().all()
    assert (ids[num_rows:] == POISON).all()
    return weights[:num_rows].cpu(), ids[:num_rows].cpu()


def reference(
    case: Case, x: torch.Tensor, weight: torch.Tensor, adapters: PackedAdapters | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, ids and all logits in float64: softmax, then top-k, then the division."""
    logits = x.double() @ weight.double().t()
    if adapters is not None:
        logits = adapters.reference(x, case.rows, logits)
    weights, ids = logits.softmax(dim=1).topk(case.top_k, dim=1)
    if case.renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights, ids.int(), logits


def check(op, case: Case, device, dtype=None) -> None:
    adapters = packed(case, dtype=dtype)
    x, weight = activations(case)
    there = [buffer._base.to(device)[:, : case.in_features] for buffer in (x, weight)]
    for tables in (adapters, None):
        expected, ids, logits = reference(case, x, weight, tables)
        found, found_ids = route(op, case, there[0], there[1], tables)
        # Logits of a few units: float32 sums, or bfloat16 pairs of them through B.
        tolerance = 2e-4 if torch.bfloat16 in (case.dtype, dtype) else 2e-5
        torch.testing.assert_close(found.double(), expected, rtol=tolerance * 5, atol=tolerance)
        swapped = logits.gather(1, ids.long()) - logits.gather(1, found_ids.long())
        assert swapped.abs().max() <= tolerance, "not the largest logits"
        assert (found_ids.sort(dim=1).values.diff(dim=1) > 0).all(), "an expert came twice"


@pytest.mark.parametrize("name", CASES)
def test_twin_equals_merged_weights(name):
    check(moe_route_torch, CASES[name], "cpu")


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_merged_weights(kernel_device, name):
    runs_here(CASES[name], kernel_device)
    check(moe_route_triton, CASES[name], kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTED)
def test_kernel_routes_every_combination(name):
    check(moe_route, ROUTED[name], "cuda")


@pytest.mark.kernel
@pytest.mark.parametrize("in_features", [40, 576])
def test_float32_adapters_serve_narrow_rows(kernel_device, in_features):
    dtype = torch.bfloat16 if kernel_device.type == "cuda" else HALF
    changed = {"dtype": dtype, "in_features": in_features}
    case = Case(**(vars(CASES["six_experts"]) | changed))
    check(moe_route_triton, case, kernel_device, torch.float32)
    check(moe_route_torch, case, "cpu", torch.float32)


@pytest.mark.parametrize("ops", BOTH)
def test_ties_go_to_the_lower_expert(kernel_device, ops):
    case = Case(40, 7, 16, [-1] * 4, [], False)
    x, weight = torch.zeros(4, 16), torch.zeros(40, 16)
    x[1:, 0] = torch.tensor([1.0, -1.0, 2.0])
    weight[:, 0] = torch.tensor([float(e % 3) for e in range(40)])
    weight[::2, 1] = -1.0  # row 0: zeros of either sign
    device = kernel_device if ops == "triton" else torch.device("cpu")
    weights, ids = route(OPS[ops], case, x.to(device), weight.to(device))
    assert ids[0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert ids[1].tolist() == ids[3].tolist() == [2, 5, 8, 11, 14, 17, 20]
    assert ids[2].tolist() == [0, 3, 6, 9, 12, 15, 18]
    torch.testing.assert_close(weights[0], torch.full((7,), 1 / 40))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("ops", BOTH)
def test_rows_without_finite_logits_still_name_experts(kernel_device, ops, renormalize):
    case = Case(6, 4, 16, [-1] * 5, [], renormalize)
    x, weight = torch.zeros(5, 16), torch.zeros(6, 16)
    x[:, 0], weight[:, 0] = torch.tensor([NAN, 1.0, INF, -INF, 1.0]), 1.0
    x[4, 2] = 1.0
    weight[2, 1] = NAN
    weight[:, 2] = torch.tensor([0.0, 3.0, 1.0, 2.0, 5.0, 4.0])
    device = kernel_device if ops == "triton" else torch.device("cpu")
    weights, ids = route(OPS[ops], case, x.to(device), weight.to(device))
    for row in ids.tolist():
        assert len(set(row)) == 4
        assert set(row) <= set(range(6))
    assert weights.isnan().all()  # 0 * NaN is in every row's logit of expert 2
    assert ids[0].tolist() == [0, 1, 2, 3]
    assert ids[1].tolist() == [0, 1, 3, 4]
    assert ids[4].tolist() == [4, 5, 1, 3]
    weight[2, 1] = 0.0
    weights, ids = route(OPS[ops], case, x.to(device), weight.to(device))
    assert weights[[0, 2, 3]].isnan().all()
    assert weights[[1, 4]].isfinite().all()


@pytest.mark.parametrize("ops", BOTH)
def test_logits_far_apart_keep_their_order(kernel_device, ops):
    """Probabilities underflow to 0 alike; the order is that of the logits."""
    case = Case(8, 8, 16, [-1], [], False)
    x, weight = torch.zeros(1, 16), torch.zeros(8, 16)
    x[0, 0], weight[:, 0] = 1.0, torch.tensor([-900.0, 0, -300, 50, -700, 90, -200, -400])
    device = kernel_device if ops == "triton" else torch.device("cpu")
    weights, ids = route(OPS[ops], case, x.to(device), weight.to(device))
    assert ids[0].tolist() == [5, 3, 1, 6, 2, 7, 4, 0]
    expected = torch.tensor([1, 2.718281828459045**-40, 0, 0, 0, 0, 0, 0])
    torch.testing.assert_close(weights[0], expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("masked_rows", [(1, 4, 5, 6, 7, 9), range(8)], ids=["some", "a_tile"])
@pytest.mark.parametrize("ops", BOTH)
def test_masked_rows_have_no_expert(kernel_device, ops, masked_rows):
    case = CASES["six_experts"]
    device = kernel_device if ops == "triton" else torch.device("cpu")
    x, weight = activations(case, device)
    row_mask = [0 if row in masked_rows else 1 for row in range(10)]
    expected, expected_ids = route(OPS[ops], case, x, weight, packed(case))
    masked = torch.tensor(row_mask) == 0
    x[masked.to(device)] = NAN
    weights, ids = route(OPS[ops], case, x, weight, packed(case), row_mask=row_mask)
    assert (ids[masked] == -1).all()
    assert (weights[masked] == 0).all()
    assert torch.equal(ids[~masked], expected_ids[~masked])
    assert torch.equal(weights[~masked], expected[~masked])


@pytest.mark.kernel
@pytest.mark.parametrize(
    "name",
    [
        "six_experts",
        "parts_beyond_k",
        "few_columns_in_the_last_part",
        "sixteen_rows_a_program",
        "bfloat16",
        "prefill",
    ],
)
def test_kernel_bits_survive_tables_slots_and_neighbours(kernel_device, name):
    case = CASES[name]
    runs_here(case, kernel_device)
    x, weight = activations(case, kernel_device)
    num_rows, num_slots = len(case.rows), len(case.ranks)
    base = route(moe_route_triton, case, x, weight)
    before = route(moe_route_triton, case, x, weight, packed(case))

    def same(found, expected, rows) -> bool:
        return all(torch.equal(f[rows], e[rows]) for f, e in zip(found, expected, strict=True))

    everywhere = list(range(num_rows))
    assert not same(before, base, everywhere)
    # Rows without an adapter, one of rank 0 or a disabled one: the bits of no tables.
    plain = [t for t in everywhere if case.rows[t] < 0 or case.ranks[case.rows[t]] == 0]
    assert plain
    assert same(before, base, plain)
    off = route(moe_route_triton, case, x, weight, packed(case), [0] * num_slots)
    assert same(off, base, everywhere)
    # Other slots.
    slot_of = [(slot + 1) % num_slots for slot in range(num_slots)]
    rows = [slot_of.index(slot) if slot >= 0 else slot for slot in case.rows]
    ranks = [case.ranks[slot] for slot in slot_of]
    moved = Case(**(vars(case) | {"rows": rows, "ranks": ranks}))
    after = route(moe_route_triton, moved, x, weight, packed(moved, slot_of))
    assert same(after, before, everywhere)
    # Neighbours of NaN, with their adapters and without.
    for kept in (0, num_rows - 1):
        poisoned = torch.full_like(x, NAN)
        poisoned[kept] = x[kept]
        lonely = Case(**(vars(case) | {"rows": [-1] * num_rows}))
        lonely.rows[kept] = case.rows[kept]
        for other in (case, lonely):
            after = route(moe_route_triton, other, poisoned, weight, packed(case))
            assert same(after, before, [kept])


@pytest.mark.parametrize("ops", BOTH)
def test_slots_out_of_range_are_none(kernel_device, ops):
    case = Case(6, 2, 40, [7, -3, 1, 0], [4] * 8)
    device = kernel_device if ops == "triton" else torch.device("cpu")
    x, weight = activations(case, device)
    base, found = (route(OPS[ops], case, x, weight, t, max_loras=2) for t in (None, packed(case)))
    assert torch.equal(base[0][:2], found[0][:2])
    assert not torch.equal(base[0][2:], found[0][2:])


@pytest.mark.parametrize("ops", BOTH)
def test_infinite_weights_reach_the_rows_of_their_adapter_alone(kernel_device, ops):
    case = Case(6, 2, 40, [1, 0, -1, 0], [4, 4])
    device = kernel_device if ops == "triton" else torch.device("cpu")
    x, weight = activations(case, device)
    adapters = packed(case)
    before = route(OPS[ops], case, x, weight, adapters)
    adapters.arena[adapters.b_offsets[0][0] :][:4] = INF
    after = route(OPS[ops], case, x, weight, adapters)
    assert after[0][[1, 3]].isnan().all()
    assert torch.equal(before[0][[0, 2]], after[0][[0, 2]])
    assert torch.equal(before[1][[0, 2]], after[1][[0, 2]])


def test_launcher_refuses_what_it_cannot_serve():
    case = CASES["six_experts"]
    x, weight = activations(case)
    with pytest.raises(AssertionError, match="weight is"):
        route(moe_route_triton, case, x, weight[:, :39])
    with pytest.raises(AssertionError, match="x is"):
        route(moe_route_triton, case, x, weight.half())
    with pytest.raises(AssertionError, match="top 7 of 6 experts"):
        route(moe_route_triton, Case(**(vars(case) | {"top_k": 7})), x, weight)
    outputs = (torch.zeros(10, 6), ints([0], "cpu").expand(10, 6).contiguous())
    outputs += (torch.zeros(10, 6), ints([0] * 10, "cpu"))
    tables = (ints(case.rows, "cpu"), *[None] * 6)
    with pytest.raises(AssertionError, match="all or none"):
        moe_route_triton(x, weight, None, *tables, True, *outputs)


@pytest.mark.parametrize(
    ("num_experts", "in_features", "num_rows", "dtype"),
    [
        (128, 256, 8, torch.bfloat16),
        (60, 72, 300, torch.float32),
        (60, 72, 300, HALF),
        (256, 128, 2000, torch.bfloat16),
        (256, 7168, 20, torch.bfloat16),
        (8, 576, 20, torch.float32),
    ],
)
def test_compiles_for_every_target(num_experts, in_features, num_rows, dtype):
    rows = [t % 3 - 1 for t in range(num_rows)]
    case = Case(num_experts, 8, in_features, rows, [16, 5], True, dtype)
    x, weight = activations(case)
    launched = 0

    def launcher(*args, **kwargs):
        nonlocal launched
        kwargs["topk_weights"].fill_(NAN)
        launched += compile_launches(moe_route_triton, *args, **kwargs)

    route(launcher, case, x, weight, packed(case), row_mask=[1] * num_rows)
    if num_rows == 8:
        route(launcher, case, x, weight)
    assert launched == (2 if num_rows == 8 else 1)


@pytest.mark.parametrize(("num_experts", "in_features"), [(128, 2048), (60, 2048), (8, 4096)])
@pytest.mark.parametrize("num_rows", [1, 128, 129, 2000])
def test_logits_are_summed_in_one_order_with_and_without_tables(num_experts, in_features, num_rows):
    """As compiled for Hopper: rows of the base model have the bits of an engine without LoRA."""
    case = Case(num_experts, 4, in_features, [0] * num_rows, [16, 5], True, torch.bfloat16)
    x, weight = activations(case)
    layouts = []

    def launcher(*args, **kwargs):
        kwargs["topk_weights"].fill_(NAN)
        ((_, kernel),) = compile_each(moe_route_triton, *args, targets=(90,), **kwargs)
        layouts.append(product_layouts(kernel))

    route(launcher, case, x, weight)
    route(launcher, case, x, weight, packed(case))
    assert layouts[0].total() == 1
    assert layouts[0] <= layouts[1]


@pytest.mark.parametrize("ops", BOTH)
def test_rows_do_not_see_who_shares_their_adapter(kernel_device, ops):
    """A product's bits may depend on its number of rows, which must not be that of an adapter."""
    device = kernel_device if ops == "triton" else torch.device("cpu")
    found = set()
    for rows in ([0] * 8, [0] + [1] * 7, [0, 0, 0, 1, 1, 1, 1, -1]):
        case = Case(60, 4, 192, rows, [7, 7], False, torch.float32)
        x, weight = activations(Case(60, 4, 192, [0] * 8, [7, 7], False, torch.float32), device)
        weights, ids = route(OPS[ops], case, x, weight, packed(case))
        found.add((tuple(weights[0].tolist()), tuple(ids[0].tolist())))
    assert len(found) == 1
