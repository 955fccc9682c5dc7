"""The file that keeps, from one process to the next, what was chosen for products on a card.

It only saves time: a file that is missing, broken, of other versions or of another kernel is as
good as none, and where none can be written nothing is kept. Either is said in the log, as a
warning, unless there is no file yet.
"""

import fcntl
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from kernels.linear_config import LinearConfig, Product

logger = logging.getLogger(__name__)

Accepted = Mapping[Product, Sequence[LinearConfig]]
Choices = dict[Product, LinearConfig | None]


class ChoiceFile:
    """`linear-<card>.json` in `directory`; None: there is no such place.

    `stamp` is what the choices depend on beside the shapes. Of two processes that add the same
    product at once the first is right, and the second is told so. Products whose result may be
    left in partials have entries of their own: a model that takes them and one that does not may
    share the file.
    """

    def __init__(self, directory: Path | None, card_name: str, stamp: Mapping[str, str]) -> None:
        self._stamp = {"card": card_name, **stamp}
        name = re.sub(r"[^\w.]+", "-", card_name).strip("-")
        self.path = None if directory is None else directory / f"linear-{name}.json"
        self._warned = False

    def read(self, accepted: Accepted) -> Choices:
        """The choices that are there for the products in `accepted`: the library, or one of the
        configurations that are accepted for each."""
        entries, choices = self._entries(), {}
        for product, configs in accepted.items():
            key = _key(product, configs)
            if key not in entries:
                continue
            found = [config for config in (None, *configs) if _as_entry(config) == entries[key]]
            if found:
                choices[product] = found[0]
            else:
                self._warn("ignored: no such configuration for", key)
        return choices

    def add(self, accepted: Accepted, choices: Choices) -> Choices:
        """`choices`, or for a product that is there by now what the file says; the rest is added
        to the file if it can be written."""
        if self.path is None:
            return choices
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                choices = choices | {p: c for p, c in self.read(accepted).items() if p in choices}
                added = {
                    _key(product, accepted[product]): _as_entry(config)
                    for product, config in choices.items()
                }
                self._write(self._entries() | added)
        except OSError as error:  # no room, no right: what was measured serves this process
            logger.warning(
                "%s cannot be written, it is measured at every start: %s", self.path, error
            )
        return choices

    def _entries(self) -> dict[str, Any]:
        """Of this stamp."""
        if self.path is None:
            return {}
        try:
            content = json.loads(self.path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._warn("ignored:", error)
            return {}
        stamp = content.get("stamp") if isinstance(content, dict) else None
        if stamp != self._stamp:
            self._warn("ignored: it is of", stamp)
            return {}
        entries = content.get("choices")
        if not isinstance(entries, dict):
            self._warn("ignored: choices are", type(entries).__name__)
            return {}
        return entries

    def _warn(self, what: str, which: object) -> None:
        """Once, for it is read again before it is written."""
        if not self._warned:
            logger.warning("%s is %s %s", self.path, what, which)
        self._warned = True

    def _write(self, entries: Mapping[str, Any]) -> None:
        """Under another name first: who reads finds the old file or the new one."""
        assert self.path is not None
        content = {"stamp": self._stamp, "choices": dict(sorted(entries.items()))}
        temporary = self.path.with_suffix(f".{uuid4().hex}.tmp")
        try:
            temporary.write_text(json.dumps(content, indent=1) + "\n")
            temporary.replace(self.path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """While no other process is in here; not on file systems that have no locks."""
    with path.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(product: Product, configs: Sequence[LinearConfig]) -> str:
    dtype = str(product.dtype).removeprefix("torch.")
    partials = " in partials" if any(config.splits > 1 for config in configs) else ""
    return f"{product.rows} x {product.out_features} x {product.in_features} {dtype}{partials}"


def _as_entry(config: LinearConfig | None) -> dict[str, int] | None:
    return None if config is None else asdict(config)
