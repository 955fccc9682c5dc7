"""JSON files that others wrote."""

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> Any:
    """What a file holds. ValueError if that is not JSON, OSError if it cannot be read."""
    content = file.read_bytes()
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
