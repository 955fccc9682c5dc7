"""A small real model and adapters to try the engine with; not needed to serve other models."""
