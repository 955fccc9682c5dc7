"""The paged KV cache's tensors. Which page belongs to whom is `page_pool`'s business."""

import torch

from memory.model_dims import ModelDims


class KVCache:
    """`keys[layer]` and `values[layer]`: [num_pages, page_size, kv_heads, head_dim].

    Zeroed once, so that no row ever reads what was never written.
    """

    def __init__(
        self,
        dims: ModelDims,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (
            2,
            dims.num_layers,
            num_pages,
            page_size,
            dims.num_kv_heads,
            dims.head_dim,
        )
        self.page_size = page_size
        self._storage = torch.zeros(shape, dtype=dtype, device=device)
        self.keys = list(self._storage[0].unbind())
        self.values = list(self._storage[1].unbind())

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"kv_cache": self._storage}


def page_bytes(dims: ModelDims, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * dims.num_layers * page_size * dims.num_kv_heads * dims.head_dim * dtype.itemsize
