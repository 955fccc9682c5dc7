"""The trained adapters that come with the demonstration, by name."""

from pathlib import Path

DIRECTORY = Path(__file__).parent / "adapters"
ADAPTERS = {path.name: path for path in sorted(DIRECTORY.glob("*/"))}
