"""Encore: decode one base model with many LoRA adapters, every step a graph replay."""

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.engine import Engine
from engine.errors import (
    AdapterError,
    CapacityError,
    CaptureError,
    CheckpointError,
    EngineError,
    RequestError,
    UnknownAdapterError,
)
from engine.outputs import (
    AdapterInfo,
    CompletionOutput,
    EngineStats,
    RequestMetrics,
    RequestOutput,
)
from engine.sampling_params import SamplingParams

__all__ = [
    "AdapterError",
    "AdapterInfo",
    "CapacityError",
    "CaptureError",
    "Checkpoint",
    "CheckpointError",
    "CompletionOutput",
    "Engine",
    "EngineError",
    "EngineStats",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "UnknownAdapterError",
    "open_checkpoint",
]
