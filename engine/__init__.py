"""Encore: decode one base model with many LoRA adapters, every step a graph replay."""
