"""The trained adapters that come with the demonstration, by name.

`ADAPTERS` are for SmolLM2-135M-Instruct, `MOE_ADAPTERS` for the mixture that upcycle.py makes
of it.
"""

from pathlib import Path

DIRECTORY = Path(__file__).parent / "adapters"
MOE = "moe-"  # starts the folder's name, not the adapter's
_FOLDERS = sorted(DIRECTORY.glob("*/"))
ADAPTERS = {path.name: path for path in _FOLDERS if not path.name.startswith(MOE)}
MOE_ADAPTERS = {p.name.removeprefix(MOE): p for p in _FOLDERS if p.name.startswith(MOE)}
