"""How a request wants its tokens drawn: checked when built, so that no bad value gets further."""

import inspect
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

from engine.errors import RequestError
from engine.shown import shown
from memory.step_outputs import MAX_LOGPROBS

INT32_MAX = 2**31 - 1
LARGEST_BIAS = 1e30  # far from where float32 sums overflow


@dataclass(frozen=True)
class SamplingParams:
    """Names and defaults follow vLLM's.

    `temperature=0` is greedy. `top_k=0` (or -1) and `top_p=1` are off. `logprobs=k`: the k most
    likely tokens and the chosen one, of the model's distribution before penalties and
    temperature. `stop` strings end a request and are left out of its text; `stop_token_ids` end
    it and stay in its ids. `min_tokens` are generated before any stop token may be, and stop
    strings among them do not count. `ignore_eos` leaves out the model's end tokens, not the
    stops given here. `logit_bias` maps token ids to what is added to their logits. Raises
    RequestError naming the parameter.
    """

    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | Set[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None

    def __new__(cls, *args: Any, **keywords: Any) -> "SamplingParams":
        known = [field.name for field in fields(cls)]
        if len(args) > len(known):
            raise RequestError(
                f"SamplingParams was given {len(args)} values; it takes {', '.join(known)}"
            )
        for name in keywords:
            if name not in known:
                raise RequestError(f"SamplingParams has no {name!r}; it takes {', '.join(known)}")
            if name in known[: len(args)]:
                raise RequestError(f"SamplingParams was given {name!r} twice")
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        cls.__signature__ = None  # type: ignore[attr-defined]

    def __post_init__(self) -> None:
        self._whole("n", 1, 1024)
        self._whole("max_tokens", 1, INT32_MAX)
        self._number("temperature", 0.0, 1e6)
        self._number("top_p", 0.0, 1.0, above=True)
        self._whole("top_k", -1, INT32_MAX)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 1e-6, 1e6)
        self._number("presence_penalty", -1e6, 1e6)
        self._number("frequency_penalty", -1e6, 1e6)
        if self.seed is not None:
            self._whole("seed", -(2**63), 2**64 - 1)
        self._whole("min_tokens", 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._whole(name, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={shown(self.ignore_eos)} is not True or False")
        self._check_stops()
        self._check_logit_bias()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever way it was given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def needs_token_state(self) -> bool:
        """Whether drawing depends on which tokens were seen, or on how many were generated."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or self.min_tokens > 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError where a token id is not one of the model's."""
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise RequestError(
                        f"{name}: token id {shown(token)} is out of range; "
                        f"accepted: 0 to {vocab_size - 1}"
                    )

    def copy(self) -> "SamplingParams":
        """Equal parameters that share no list or mapping with these."""
        return replace(
            self,
            stop=self.stop_strings,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=dict(self.logit_bias or {}),
        )

    def _check_stops(self) -> None:
        accepted = "accepted: a non-empty string or a list of them"
        if self.stop is not None and not isinstance(self.stop, str | Sequence):
            raise RequestError(f"stop={shown(self.stop)}; {accepted}")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop={shown(self.stop)}; {accepted}")
        ids = self.stop_token_ids
        if ids is not None and not isinstance(ids, Sequence | Set):
            raise RequestError(f"stop_token_ids={shown(ids)}; accepted: a list of token ids")
        for token in ids or ():
            self._token("stop_token_ids", token)

    def _check_logit_bias(self) -> None:
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias={shown(self.logit_bias)}; accepted: a mapping of token ids to numbers"
            )
        for token, bias in (self.logit_bias or {}).items():
            self._token("logit_bias", token)
            number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not number or not (bias == -math.inf or abs(bias) <= LARGEST_BIAS):
                raise RequestError(
                    f"logit_bias[{shown(token)}]={shown(bias)} is not a number from "
                    f"{-LARGEST_BIAS:g} to {LARGEST_BIAS:g}, or minus infinity"
                )

    def _whole(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(f"{name}={shown(value)} is not a whole number from {low} to {high}")

    def _number(self, name: str, low: float, high: float, above: bool = False) -> None:
        value = getattr(self, name)
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or not (low < value if above else low <= value) or value > high:
            bounds = f"above {low:g}" if above else f"from {low:g}"
            raise RequestError(f"{name}={shown(value)} is not a number {bounds} to {high:g}")

    def _token(self, name: str, token: object) -> None:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise RequestError(f"{name}: {shown(token)} is not a token id")


def _signature() -> inspect.Signature:
    """The fields, which `__new__` would hide from help()."""
    signature = inspect.signature(SamplingParams.__init__)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


SamplingParams.__signature__ = _signature()  # type: ignore[attr-defined]
