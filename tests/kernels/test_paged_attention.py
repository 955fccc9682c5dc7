"""Decode attention: kernel against twin, twin against dense attention, tiles and splits."""

from dataclasses import replace

import pytest
import torch

import kernels.paged_attention
from kernels.attention_tiles import (
    MAX_SPLITS,
    AttentionTiles,
    attention_tiles,
    decode_splits,
    min_split_tokens,
)
from kernels.linear_config import H200
from kernels.paged_attention import (
    paged_attention,
    paged_attention_torch,
    paged_attention_triton,
)
from tests.kernels.cross_compile import compile_launches
from tests.kernels.paged_cache import (
    PagedCache,
    assert_attention_close,
    dense_attention,
    dot_dtype,
    make_paged_cache,
)

NAN = float("nan")
# Tokens on both sides of the borders of pages, of tiles and of splits, and no token at all.
LENGTHS = [129, 0, 1, 16, 17, 300, 64, 255]
CASES = [
    # Hq, Hkv, D, page_size, window, splits, dtype
    (2, 2, 64, 16, 0, 1, torch.float32),
    (9, 3, 64, 16, 0, 4, torch.float32),
    (8, 2, 80, 8, 0, 3, torch.float16),
    (7, 1, 96, 5, 50, 2, torch.bfloat16),
    (16, 2, 128, 16, 0, 8, torch.bfloat16),
    (2, 1, 256, 32, 130, 4, torch.float32),
    (20, 1, 64, 16, 33, 1, torch.bfloat16),
    (4, 2, 64, 16, 1, 2, torch.bfloat16),
]
TILES = [
    # heads, warps, keys, stages: those that attention_tiles gives, and others that it might
    AttentionTiles(2, 2, 16, 3),
    AttentionTiles(1, 1, 16, 4),
    AttentionTiles(4, 4, 32, 2),
    AttentionTiles(1, 4, 64, 3),
]


def use_tiles(monkeypatch, tiles: AttentionTiles) -> None:
    monkeypatch.setattr(kernels.paged_attention, "attention_tiles", lambda *_: tiles)


def make_q(cache: PagedCache, num_heads: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of q, k and v together, as the projection leaves them: k and v columns are NaN."""
    num_kv_heads, head_dim = cache.k.shape[2:]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    q = torch.full((len(cache.seq_lens), width), NAN)
    q[:, : num_heads * head_dim] = torch.randn(
        len(cache.seq_lens), num_heads * head_dim, generator=generator
    )
    return q.to(cache.k.dtype)


def attend(op, q, cache: PagedCache, num_heads: int, window: int, num_splits: int):
    """Run `op` on poisoned buffers: its output and the workspaces, the output's margin and the
    counters checked."""
    batch_size, head_dim = len(q), cache.k.shape[3]
    padded_out = torch.full_like(q, NAN)
    out = padded_out[:, : num_heads * head_dim]
    partial_out = torch.full((batch_size, num_heads, num_splits, head_dim), NAN, device=q.device)
    partial_lse = torch.full((batch_size, num_heads, num_splits), NAN, device=q.device)
    arrivals = torch.zeros(batch_size * cache.k.shape[2], dtype=torch.int32, device=q.device)
    op(
        q,
        cache.k,
        cache.v,
        cache.block_tables,
        cache.requests,
        cache.seq_lens,
        head_dim**-0.5,
        window,
        partial_out,
        partial_lse,
        arrivals,
        out,
    )
    assert not arrivals.any()
    assert padded_out[:, out.shape[1] :].isnan().all()
    return out, partial_out, partial_lse


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size", "window", "splits", "dtype"), CASES
)
def test_kernel_matches_twin(
    kernel_device, num_heads, num_kv_heads, head_dim, page_size, window, splits, dtype
):
    dtype = dot_dtype(dtype, kernel_device)
    generator = torch.Generator().manual_seed(0)
    cache = make_paged_cache(LENGTHS, num_kv_heads, head_dim, page_size, dtype, generator)
    q = make_q(cache, num_heads, generator)
    expected, _, _ = attend(
        paged_attention_torch, q.float(), cache.float(), num_heads, window, splits
    )
    out, _, _ = attend(
        paged_attention_triton,
        q.to(kernel_device),
        cache.on(kernel_device),
        num_heads,
        window,
        splits,
    )
    assert_attention_close(out, expected)
    assert (out[LENGTHS.index(0)] == 0).all()


@pytest.mark.kernel
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_any_tiles_match_the_twin(kernel_device, monkeypatch, tiles):
    use_tiles(monkeypatch, tiles)
    dtype = dot_dtype(torch.bfloat16, kernel_device)
    generator = torch.Generator().manual_seed(6)
    cache = make_paged_cache(LENGTHS, 4, 64, 16, dtype, generator)
    q = make_q(cache, 12, generator)
    for window, splits in ((0, 1), (0, 4), (70, 2), (0, 3)):
        expected, _, _ = attend(paged_attention_torch, q.float(), cache.float(), 12, window, splits)
        args = (q.to(kernel_device), cache.on(kernel_device), 12, window, splits)
        first, second = (attend(paged_attention_triton, *args)[0] for _ in range(2))
        assert_attention_close(first, expected)
        assert torch.equal(first, second)


@pytest.mark.kernel
def test_splits_without_keys_are_neither_written_nor_read(kernel_device):
    generator = torch.Generator().manual_seed(1)
    cache = make_paged_cache([0, 64, 65, 600], 1, 64, 16, torch.float32, generator)
    q = make_q(cache, 2, generator).to(kernel_device)
    out, partial_out, partial_lse = attend(
        paged_attention_triton, q, cache.on(kernel_device), 2, 0, 4
    )
    filled = [0, 0, 2, 4]  # with keys in one alone a row needs no parts
    for row, count in enumerate(filled):
        assert not partial_lse[row, :, :count].isnan().any(), row
        assert not partial_out[row, :, :count].isnan().any(), row
        assert partial_lse[row, :, count:].isnan().all(), row
        assert partial_out[row, :, count:].isnan().all(), row
    assert not out.isnan().any()


@pytest.mark.kernel
@pytest.mark.parametrize("splits", [1, 4])
def test_a_row_has_the_same_bits_beside_any_others(kernel_device, splits):
    dtype = dot_dtype(torch.bfloat16, kernel_device)
    generator = torch.Generator().manual_seed(2)
    cache = make_paged_cache([140, 3, 300], 1, 64, 16, dtype, generator)
    q = make_q(cache, 4, generator).to(kernel_device)
    cache = cache.on(kernel_device)
    together, _, _ = attend(paged_attention_triton, q, cache, 4, 0, splits)
    for row in range(3):
        alone = cache.only(row)
        out, _, _ = attend(paged_attention_triton, q[row : row + 1], alone, 4, 0, splits)
        assert torch.equal(out[0], together[row])


@pytest.mark.kernel
def test_cache_may_pass_two_to_the_31_elements(kernel_device):
    page_stride = 2**30  # the third page starts at 2^31; on a CPU the rest is never touched
    storage = torch.empty(2**31 + 2 * 16 * 64, dtype=torch.float16, device=kernel_device)
    strides = (page_stride, 64, 64, 1)
    k = storage.as_strided((3, 16, 1, 64), strides)
    v = storage.as_strided((3, 16, 1, 64), strides, storage_offset=16 * 64)
    generator = torch.Generator().manual_seed(3)
    for cache in (k, v):
        cache[2] = torch.randn(16, 1, 64, generator=generator).to(storage)
    table = torch.tensor([[2]], dtype=torch.int32, device=kernel_device)
    requests = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    far = PagedCache(k, v, table, requests, requests + 16, [], [])
    near = PagedCache(
        k[2:].contiguous(), v[2:].contiguous(), table - 2, requests, requests + 16, [], []
    )
    q = torch.randn(1, 128, generator=generator).to(storage)
    expected, _, _ = attend(paged_attention_triton, q, near, 2, 0, 1)
    out, _, _ = attend(paged_attention_triton, q, far, 2, 0, 1)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size", "window"),
    [(9, 3, 64, 16, 0), (4, 4, 80, 5, 17), (7, 1, 256, 8, 1)],
)
def test_op_on_cpu_matches_dense_attention(num_heads, num_kv_heads, head_dim, page_size, window):
    generator = torch.Generator().manual_seed(4)
    cache = make_paged_cache(LENGTHS, num_kv_heads, head_dim, page_size, torch.float32, generator)
    q = make_q(cache, num_heads, generator)
    out, _, _ = attend(paged_attention, q, cache, num_heads, window, 2)
    for row, length in enumerate(LENGTHS):
        if length == 0:
            assert (out[row] == 0).all()
            continue
        heads = q[row : row + 1, : num_heads * head_dim].view(1, num_heads, head_dim)
        expected = dense_attention(
            heads, cache.dense_k[row], cache.dense_v[row], head_dim**-0.5, window
        )
        assert_attention_close(out[row], expected.flatten())


def launch_arguments(num_kv_heads, group, head_dim, splits, dtype):
    """What the launcher takes for a batch of two, to be compiled only."""
    batch_size, num_heads = 2, num_kv_heads * group
    cache = torch.zeros(3, 16, num_kv_heads, head_dim, dtype=dtype)
    index = torch.zeros(batch_size, dtype=torch.int32)
    return (
        torch.zeros(batch_size, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
        cache,
        cache.clone(),
        torch.zeros(3, 8, dtype=torch.int32),
        index,
        index,
        0.125,
        0,
        torch.zeros(batch_size, num_heads, splits, head_dim),
        torch.zeros(batch_size, num_heads, splits),
        index.repeat(num_kv_heads),
        torch.zeros(batch_size, num_heads * head_dim, dtype=dtype),
    )


@pytest.mark.parametrize(
    ("head_dim", "group", "splits", "dtype"),
    [
        (64, 3, 4, torch.bfloat16),
        (80, 1, 1, torch.bfloat16),
        (96, 4, 64, torch.bfloat16),
        (128, 7, 8, torch.bfloat16),
        (256, 8, 2, torch.bfloat16),
        (64, 3, 2, torch.float32),
    ],
)
def test_compiles(head_dim, group, splits, dtype):
    arguments = launch_arguments(2, group, head_dim, splits, dtype)
    assert compile_launches(paged_attention_triton, *arguments) == 1


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_any_tiles_compile(monkeypatch, tiles, splits):
    use_tiles(monkeypatch, tiles)
    arguments = launch_arguments(4, 3, 128, splits, torch.bfloat16)
    assert compile_launches(paged_attention_triton, *arguments) == 1


def test_tiles_fit_any_shape():
    bfloat16, cpu = torch.bfloat16, torch.device("cpu")
    assert attention_tiles(128, 32, 8, 128, bfloat16, cpu) == AttentionTiles(2, 2, 16)
    assert attention_tiles(128, 32, 4, 128, bfloat16, cpu) == AttentionTiles(2, 2, 16)
    assert attention_tiles(32, 32, 8, 128, bfloat16, cpu) == AttentionTiles(1, 4, 64)
    assert attention_tiles(256, 9, 3, 64, bfloat16, cpu) == AttentionTiles(1, 4, 128)
    for dtype in (bfloat16, torch.float32):
        for batch_size in (1, 30, 500):
            for num_kv_heads in (1, 2, 3, 8):
                for group in (1, 3, 8, 20):
                    for head_dim in (16, 64, 80, 128, 256, 512):
                        num_heads = num_kv_heads * group
                        shape = (num_heads, num_kv_heads, head_dim)
                        tiles = attention_tiles(batch_size, *shape, dtype, cpu)
                        assert num_kv_heads % tiles.heads == 0
                        assert tiles.heads in (1, tiles.num_warps)
                        assert tiles.block_n in (16, 32, 64, 128)
                        stages = tiles.num_stages * tiles.stage_bytes(head_dim, dtype)
                        assert stages <= H200.shared_bytes


def test_decode_splits_fill_the_card_without_short_splits():
    assert decode_splits(1, 8, 131072, 132) == 32
    assert decode_splits(1, 1, 131072, 132) == MAX_SPLITS
    assert decode_splits(1, 8, 416, 132) == 8
    assert decode_splits(8, 8, 131072, 132) == 4
    assert decode_splits(32, 8, 131072, 132) == 1
    assert decode_splits(1, 1, 16, 132) == 1
    for batch_size in (1, 3, 8, 50, 256):
        for num_kv_heads in (1, 3, 8):
            for max_seq_len in (1, 100, 1000, 5000, 131072):
                splits = decode_splits(batch_size, num_kv_heads, max_seq_len, 132)
                assert splits in {1, 2, 4, 8, 16, 32, MAX_SPLITS}
                shortest = min_split_tokens(batch_size, num_kv_heads)
                assert splits == 1 or max_seq_len > splits // 2 * shortest


def test_launcher_names_what_is_wrong():
    generator = torch.Generator().manual_seed(5)
    cache = make_paged_cache([3], 1, 64, 16, torch.float32, generator)
    q = make_q(cache, 2, generator)
    with pytest.raises(AssertionError, match="dtypes of q, k_cache, v_cache and out differ"):
        attend(paged_attention_triton, q.half(), cache, 2, 0, 1)
    with pytest.raises(AssertionError, match=r"v_cache: .* k_cache: "):
        attend(paged_attention_triton, q, replace(cache, k=cache.k[..., :32]), 2, 0, 1)
