"""Programmatic dependent launch: a kernel's programs come up while the kernel before it ends.

Of two kernels in one stream the second then costs its own work, not also the time to start it
(Hopper and later; elsewhere launches follow one another as ever). What a kernel must keep to:

- every program calls `wait_for_inputs` once, before any early return, and reads nothing that a
  kernel of the step writes until then. A program that ends without waiting would let the kernel
  after the next start on memory that is still being written.
- before the wait it may read what nothing in a step writes (weights, tables of angles), and what
  was written two or more launches earlier in the same stream: each kernel lets the next one
  start only after its own wait, when all before it is complete.
- it writes nothing before the wait.

The launcher passes `**dependent_launch(device)`: the kernel's constexpr PDL and the launch
attribute. Method: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(PDL: tl.constexpr, HOLD: tl.constexpr = False):
    """Until the kernels before this one are complete; then the next one may come up.

    HOLD: only when this kernel's programs end. Where they fill the card, those of the next one
    would land wherever room appears first, several on one multiprocessor and none on another.
    """
    if PDL:
        gdc_wait()
        if not HOLD:
            gdc_launch_dependents()


@lru_cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch on `device`: `PDL`, and `launch_pdl` where the card knows it."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
