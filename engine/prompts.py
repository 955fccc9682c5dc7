"""The shapes in which users may hand over prompts and what goes with them."""

from collections.abc import Sequence as Items
from numbers import Integral
from typing import Any

from engine.errors import RequestError
from engine.shown import shown

Prompt = str | Items[int]


def as_token_ids(prompt: Items[int], label: str) -> list[int]:
    """A prompt of ids as a list, or RequestError; `label` is what messages call it."""
    prompt = _listed(prompt)
    if not isinstance(prompt, Items) or isinstance(prompt, bytes | bytearray):
        raise RequestError(f"{label}={shown(prompt)} is neither text nor a list of token ids")
    ids: list[int] = []
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(f"{label} holds {shown(token)}, which is not a token id")
        ids.append(int(token))
    return ids


def as_prompts(prompts: Prompt | Items[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    prompts = _listed(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Items) or isinstance(prompts, bytes | bytearray):
        raise RequestError(
            f"prompts={shown(prompts)} is no text, list of token ids, or list of those"
        )
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _listed(items: Any) -> Any:
    """A tensor or an array as the list that it is; what cannot be listed as it is."""
    try:
        return items.tolist() if hasattr(items, "tolist") else items
    except (TypeError, RuntimeError):  # a class, a tensor without elements in memory
        return items


def one_each(name: str, value: Any, kind: type, count: int) -> list[Any]:
    """One value for all prompts, or a list with one for each."""
    if value is None or isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Items) or isinstance(value, str):
        raise RequestError(f"{name}={shown(value)} is neither a {kind.__name__} nor a list")
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts")
    for item in value:
        if item is not None and not isinstance(item, kind):
            raise RequestError(f"{name} holds {shown(item)}, which is not a {kind.__name__}")
    return list(value)
