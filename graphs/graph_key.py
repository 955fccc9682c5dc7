"""What tells one captured graph from another. Knows nothing about what is in it."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class GraphKey:
    """One graph per key: everything else about a batch is data in buffers."""

    batch_size: int  # rows, padding included
    lora: bool = True  # the LoRA path is recorded; without, for batches in which no row has one
