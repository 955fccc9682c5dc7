"""The bytes that ops must move, against counts by hand."""

import torch

from kernels.sampling_tables import FLAGS, NUM_COLUMNS, USES_LOGIT_BIAS, USES_TOKEN_STATE
from profiles import expert_op_bytes, op_bytes
from profiles.op_table import OPS, bytes_of

BF16 = torch.bfloat16


def bf16(*shape):
    return torch.zeros(shape, dtype=BF16)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_every_op_of_encore_is_in_the_table():
    import engine  # noqa: F401  registers the ops

    names = {
        name.removeprefix("encore::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("encore::") and not name.startswith("encore::toy_")
    }
    assert {"linear", "sgemm_a", "moe_gemm", "sample"} <= names
    assert names == OPS.keys(), "profiles/op_table.py has a row for every op"


def test_products_and_pointwise_ops():
    x, wide = bf16(4, 8), bf16(4, 32)[:, :24]
    assert op_bytes.linear(x, bf16(24, 8), None, wide) == 2 * (4 * 8 + 24 * 8 + 4 * 24)
    assert op_bytes.linear(x, bf16(24, 8), bf16(24), wide) == 2 * (4 * 8 + 24 * 8 + 4 * 24 + 24)
    assert op_bytes.rms_norm(x, bf16(8), bf16(4, 8)) == 2 * (2 * 32 + 8)
    assert op_bytes.add_rms_norm(x, bf16(4, 8), bf16(8), bf16(4, 8), arena=None) == 2 * (4 * 32 + 8)
    assert op_bytes.gated_activation(bf16(4, 32), bf16(4, 16)) == 2 * (4 * 32 + 4 * 16)
    assert op_bytes.embed(ints(1, 2, 3, 4), x) == 4 * 4 + 2 * 2 * 32


def test_rotary_and_attention():
    cache = bf16(9, 16, 2, 8)  # pages of 16 tokens, two heads of 8
    rotary = {
        "qkv": bf16(3, (4 + 2 * 2) * 8),
        "q_norm_weight": None,
        "k_norm_weight": bf16(8),
        "cos_sin": torch.zeros(99, 8),
        "positions": ints(1, 2, 3),
        "kv_slots": ints(5, -1, 7),
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "k_cache": cache,
    }
    moved = op_bytes.rotary_kv_write(**rotary)
    q, kv = 3 * 4 * 8 * 2, 3 * 2 * 2 * 8 * 2
    assert moved == 8 * 2 + 2 * 3 * 4 + 3 * 8 * 4 + 2 * q + kv + kv * 2 // 3
    one_slot = {
        "shrunk": torch.zeros(3, 15),
        "arena": bf16(1),
        "lora_ranks": torch.tensor([[5], [0], [3]], dtype=torch.int32),
        "seg_indptr": ints(0, 2),
        "weight_indices": ints(0),
        "num_segments": ints(1),
    }
    deltas = (5 * 32 + 3 * 16) * 2 + 2 * (5 + 3) * 4
    assert op_bytes.rotary_kv_write(**rotary, **one_slot) == moved + deltas
    lens, requests, out = ints(20, 0, 3), ints(0, 2, 1), bf16(3, 32)
    keys = (20 + 3) * 2 * 2 * 8 * 2
    fixed = 2 * 3 * 32 * 2 + 2 * 3 * 4
    assert op_bytes.paged_attention(cache, requests, lens, 0, out) == fixed + keys + (2 + 1) * 4
    keys = (4 + 3) * 2 * 2 * 8 * 2
    assert op_bytes.paged_attention(cache, requests, lens, 4, out) == fixed + keys + (1 + 1) * 4
    moved = op_bytes.extend_attention(cache, ints(0, 1), ints(0, 2, 3), ints(20, 3), 4, out)
    assert moved == 2 * 3 * 32 * 2 + 4 * 7 + (5 + 3) * 2 * 2 * 8 * 2 + (1 + 1) * 4


def test_lora_counts_the_true_ranks_of_the_adapters_in_use():
    arena, ranks = bf16(1), torch.tensor([[4, 9, 2], [0, 9, 6]], dtype=torch.int32)
    segments = {
        "lora_ranks": ranks,
        "seg_indptr": ints(0, 2, 3, 3, 3),  # rows 0 and 1 of slot 0, row 2 of slot 2
        "weight_indices": ints(0, 2, -1, -1),
        "num_segments": ints(2),
    }
    shrunk = (2 * 4 + 1 * (2 + 6)) * 4
    moved = op_bytes.sgemm_a(x=bf16(4, 8), arena=arena, **segments)
    assert moved == (4 + 2 + 6) * 8 * 2 + 3 * 8 * 2 + shrunk
    beside = op_bytes.linear_shrink(
        x=bf16(4, 8),
        weight=bf16(15, 8),
        bias=None,
        out=torch.zeros(2, 4, 15),
        arena=arena,
        **segments,
    )
    assert beside == moved - 3 * 8 * 2 + 4 * 8 * 2 + 15 * 8 * 2 + 2 * 4 * 15 * 4
    moved = op_bytes.sgemm_b(arena=arena, slice_sizes=[10, 5], y=bf16(4, 15), **segments)
    assert moved == (4 * 10 + 2 * 10 + 6 * 5) * 2 + shrunk + 2 * 2 * (2 * 10 + 10 + 5)
    in_parts = op_bytes.linear_shrink_parts(
        x=bf16(4, 8),
        weight=bf16(15, 8),
        bias=None,
        out=torch.zeros(2, 4, 15),
        arena=arena,
        shrunk=torch.zeros(4, 6, 18),
        **segments,
    )
    assert in_parts == beside + 5 * shrunk
    segments["shrunk"] = torch.zeros(4, 18)
    moved = op_bytes.gated_activation(bf16(4, 24), bf16(4, 12), arena=arena, **segments)
    assert moved == 2 * (4 * 24 + 4 * 12) + (4 + 2 + 6) * 12 * 2 + shrunk
    several = segments | {"shrunk": torch.zeros(4, 3, 18)}
    of_parts = op_bytes.gated_activation(bf16(4, 24), bf16(4, 12), arena=arena, **several)
    assert of_parts == moved + 2 * shrunk
    one = segments | {"lora_ranks": ranks[:1]}
    moved = op_bytes.add_expand(torch.zeros(2, 4, 10), bf16(4, 10), arena=arena, **one)
    assert moved == 2 * 4 * 10 * 4 + 2 * 4 * 10 * 2 + (4 + 2) * 10 * 2 + (2 * 4 + 2) * 4
    assert op_bytes.add_expand(bf16(4, 10), bf16(4, 10), arena=None) == 3 * 4 * 10 * 2


def test_sampling_reads_large_tables_of_requests_that_use_them():
    sampling_ints = torch.zeros(3, NUM_COLUMNS, dtype=torch.int32)
    sampling_ints[1, FLAGS] = USES_TOKEN_STATE | USES_LOGIT_BIAS
    state, bias = torch.zeros(3, 50, dtype=torch.int32), torch.zeros(3, 50)
    tables = (sampling_ints, state, bias, ints(0, 0), torch.zeros(2, 2))
    assert op_bytes.sample(bf16(2, 50), ints(0, 2), *tables) == 200 + 8 + 8 + 16
    assert op_bytes.sample(bf16(2, 50), ints(0, 1), *tables) == 200 + 32 + 2 * 200


def test_logprobs_read_whole_rows_only_where_asked():
    normalizer, outputs = (
        torch.zeros(2, 2),
        (torch.zeros(2), torch.zeros(2, 20), torch.zeros(2, 20)),
    )
    written = 2 * 4 + 2 * 2 * 20 * 4
    rows, asked = (bf16(2, 50), ints(3, 4)), ints(-1, 5)
    assert op_bytes.logprobs(*rows, asked, None, *outputs) == 200 + 16 + written
    assert op_bytes.logprobs(*rows, asked, normalizer, *outputs) == 102 + 16 + 16 + written
    assert op_bytes.logprobs(*rows, ints(-1, 0), normalizer, *outputs) == 4 + 16 + 16 + written


def test_experts_count_where_some_row_chose_them():
    ids = ints([0, 3], [3, -1], [-1, -1])  # type: ignore[arg-type]
    weight, x, out = bf16(5, 12, 8), bf16(3, 8), bf16(6, 12)
    moved = expert_op_bytes.moe_gemm(x, weight, ids, 2, out)
    assert moved == 6 * 4 + 2 * 8 * 2 + 2 * 12 * 8 * 2 + 3 * 12 * 2
    weights, moved_out = torch.zeros(3, 2), bf16(3, 12)
    moved = expert_op_bytes.moe_combine(out, ids, weights, None, None, moved_out)
    assert moved == 24 + 24 + 3 * 12 * 2 + 3 * 12 * 2


def test_expert_lora_counts_pairs_of_slot_and_expert_once():
    ids, arena = ints([0, 3], [3, 0], [1, 2]), bf16(1)  # type: ignore[arg-type]
    ranks = torch.full((1, 2, 5), 4, dtype=torch.int32)
    rows = {"row_adapter": ints(1, 1, -1), "adapter_enabled": ints(1, 1), "topk_ids": ids}
    shrink = {"x": bf16(3, 8), "arena": arena, "lora_ranks": ranks, **rows}
    moved = expert_op_bytes.moe_lora_shrink(outer_ranks=None, pairs_per_row=2, **shrink)
    assert moved == 2 * 4 * 8 * 2 + 4 * 4 * 4 + 2 * 8 * 2
    product = {"weight": bf16(5, 12, 8), "out": bf16(6, 12)}
    beside = expert_op_bytes.moe_gemm_shrink(outer_ranks=None, pairs_per_row=2, **shrink, **product)
    alone = expert_op_bytes.moe_gemm(shrink["x"], topk_ids=ids, pairs_per_row=2, **product)
    assert beside == alone + moved - 2 * 8 * 2  # rows of x count once
    outer = torch.tensor([[0, 4]], dtype=torch.int32)  # slot 1 shares its A over the experts
    moved = expert_op_bytes.moe_lora_shrink(outer_ranks=outer, pairs_per_row=2, **shrink)
    assert moved == 4 * 8 * 2 + 2 * 4 * 4 + 2 * 8 * 2
    down = {"down": bf16(6, 12), "arena": arena, "lora_ranks": ranks, **rows}
    down |= {"topk_weights": torch.zeros(3, 2), "shared": None, "shared_gate": None}
    combine = 24 + 24 + 6 * 12 * 2 + 3 * 12 * 2
    moved = expert_op_bytes.moe_lora_down(outer_ranks=None, out=bf16(3, 12), **down)
    assert moved == combine + 4 * 4 * 4 + 2 * 4 * 12 * 2
    moved = expert_op_bytes.moe_lora_down(outer_ranks=outer, out=bf16(3, 12), **down)
    assert moved == combine + 4 * 4 * 4 + 4 * 12 * 2


def test_ops_of_others():
    assert bytes_of("aten", "clamp", {"self": bf16(4), "min": 1, "out": bf16(4)}) == 16
    assert bytes_of("encore", "an_op_of_tomorrow", {"x": bf16(4)}) is None
