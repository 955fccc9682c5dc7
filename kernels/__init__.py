"""GPU operations: each file holds a Triton kernel, its launcher and a plain-torch twin."""
