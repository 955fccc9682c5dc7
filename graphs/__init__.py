"""Capture and replay of decode steps. Knows buffers and callables; knows nothing of models."""
