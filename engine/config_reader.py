"""Typed reading of a model's config that remembers which keys were understood.

Knows nothing about any model. Whatever is left unread at the end and says something (is not null,
false or empty) is refused: a key that nobody understood may change the mathematics.
"""

import sys
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from engine.errors import CheckpointError
from engine.shown import shown

_REQUIRED: Any = object()
_INT32_MAX = 2**31 - 1


class ConfigReader:
    """Reads `values`, parsed from `where`; every error names `where`, the key and what it holds.

    A key that is absent takes the default given, or is required if none is given. `null` is a
    value of its own, accepted only by the `optional_` readers.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values = values
        self._read: set[str] = set()
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def refuse(self, key: str, accepted: str) -> NoReturn:
        """Raise CheckpointError about the value of `key`."""
        found = shown(self._values.get(key))
        raise CheckpointError(f"{self.where}: {key} is {found}; accepted: {accepted}")

    def value(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self._values.get(key, default)

    def integer(
        self, key: str, default: int = _REQUIRED, minimum: int = 1, maximum: int = _INT32_MAX
    ) -> int:
        value = self._require(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.refuse(key, f"an integer from {minimum} to {maximum}")
        return value

    def optional_integer(
        self, key: str, default: int | None = None, minimum: int = 1
    ) -> int | None:
        if self.value(key, default) is None:
            return None
        return self.integer(key, _REQUIRED if default is None else default, minimum)

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A finite number above zero."""
        value = self._require(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            self.refuse(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key, default)
        if value is None:
            return False
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def text(self, key: str, default: str = _REQUIRED) -> str:
        value = self._require(key, default)
        if not isinstance(value, str):
            self.refuse(key, "a string")
        return value

    def section(self, key: str) -> "ConfigReader | None":
        """A reader of the object under `key`; None if it is absent, null or empty."""
        value = self.value(key)
        if not value:
            return None
        if not isinstance(value, dict):
            self.refuse(key, "an object or null")
        return ConfigReader(value, f"{self.where}: {key}")

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Refuse keys that were neither read nor are `ignored` and that say something."""
        for key, value in self._values.items():
            if key in self._read or key in ignored or value in (None, False, "", [], {}):
                continue
            raise CheckpointError(
                f"{self.where}: {key} is {shown(value)}, which this engine does not understand and "
                f"so cannot apply; accepted: null, or no such key if it has no effect on the model"
            )

    def _require(self, key: str, default: Any) -> Any:
        value = self.value(key, default)
        if value is _REQUIRED:
            raise CheckpointError(f"{self.where}: {key} is missing, which the model needs")
        return value
