"""A paged KV cache for attention tests, where every entry that may not be read is NaN.

Pages are dealt out in a random order, page 0 is the dummy page that unused table entries name,
and requests sit in the table in an order that is not the rows'.
"""

from dataclasses import dataclass, replace

import torch

# Bound on both the absolute and the relative error. float32: sums in another order and the
# device's exp2. Halves: softmax weights and outputs are each rounded to the dtype, half a unit
# in the last place (2^-11 and 2^-9) of values near 1, doubled.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-8}


@dataclass(frozen=True)
class PagedCache:
    """Caches [P, page_size, Hkv, D] of N sequences and the same keys and values laid out dense."""

    k: torch.Tensor
    v: torch.Tensor
    block_tables: torch.Tensor  # int32 [R, max_pages]
    requests: torch.Tensor  # int32 [N], the sequences' rows of block_tables
    seq_lens: torch.Tensor  # int32 [N]
    dense_k: list[torch.Tensor]  # per sequence float32 [seq_len, Hkv, D]
    dense_v: list[torch.Tensor]

    def on(self, device: torch.device) -> "PagedCache":
        """The same cache on `device`, for the kernel; dense copies stay where they are."""
        names = ("k", "v", "block_tables", "requests", "seq_lens")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def only(self, seq: int) -> "PagedCache":
        """The same pages with one sequence listed."""
        part = slice(seq, seq + 1)
        return replace(
            self,
            requests=self.requests[part],
            seq_lens=self.seq_lens[part],
            dense_k=self.dense_k[part],
            dense_v=self.dense_v[part],
        )

    def float(self) -> "PagedCache":
        return replace(self, k=self.k.float(), v=self.v.float())


def make_paged_cache(
    seq_lens: list[int],
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> PagedCache:
    """Random keys and values for sequences of `seq_lens` tokens, on the CPU."""
    pages_of = [-(-length // page_size) for length in seq_lens]
    num_pages = 1 + sum(pages_of)
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    k, v = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    order = (1 + torch.randperm(num_pages - 1, generator=generator)).tolist()
    num_requests = len(seq_lens) + 2
    requests = torch.randperm(num_requests - 1, generator=generator)[: len(seq_lens)]
    block_tables = torch.zeros(num_requests, max(pages_of) + 2, dtype=torch.int32)
    dense_k, dense_v = [], []
    for request, length, num_pages in zip(requests.tolist(), seq_lens, pages_of, strict=True):
        pages = [order.pop() for _ in range(num_pages)]
        block_tables[request, :num_pages] = torch.tensor(pages, dtype=torch.int32)
        for cache, dense in ((k, dense_k), (v, dense_v)):
            entries = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
            for position in range(length):
                cache[pages[position // page_size], position % page_size] = entries[position]
            dense.append(entries.float())
    return PagedCache(
        k=k,
        v=v,
        block_tables=block_tables,
        requests=requests.int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        dense_k=dense_k,
        dense_v=dense_v,
    )


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """Causal attention of the last len(q) positions, float64: q [n, Hq, D], k and v [m, Hkv, D]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    n, m = q.shape[1], k.shape[1]
    seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    if window > 0:
        seen &= torch.ones(n, m, dtype=torch.bool).triu(m - n - window + 1)
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale)
    return attended.transpose(0, 1)  # [n, Hq, D]


def dot_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """`dtype`, but float16 for bfloat16 on the CPU.

    Triton's interpreter keeps bfloat16 as its bits, and its matrix product multiplies those.
    """
    return torch.float16 if device.type == "cpu" and dtype == torch.bfloat16 else dtype


def assert_attention_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """`out` is what rounding to its dtype leaves of `expected`."""
    bound = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.cpu().double(), expected.double(), rtol=bound, atol=bound)
