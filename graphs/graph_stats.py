"""Counts of what was captured, replayed, padded and missed."""

from dataclasses import dataclass, field

from graphs.graph_key import GraphKey


@dataclass
class GraphStats:
    """Written by the capturer (captures) and the runner (the rest)."""

    captured: list[GraphKey] = field(default_factory=list)  # in order of capture
    capture_seconds: float = 0.0  # warm-up included
    capture_bytes: int = 0
    replays: dict[GraphKey, int] = field(default_factory=dict)
    padded_rows: int = 0  # bucket less rows, over all replays
    eager_fallbacks: int = 0  # batches above the largest bucket

    @property
    def total_replays(self) -> int:
        return sum(self.replays.values())
