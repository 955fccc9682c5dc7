"""Turns what a user handed over into a request that can be served, or says why not.

Knows nothing of adapters, pages or who else is running.
"""

import time
from collections.abc import Iterable

from engine.errors import RequestError
from engine.outputs import RequestMetrics
from engine.prompts import Prompt, as_token_ids
from engine.request import Request, as_int64
from engine.sampling_params import SamplingParams
from engine.shown import shown
from engine.tokenizer import Tokenizer


class RequestIntake:
    """Checks prompts and parameters against one model and its tokenizer, if it has one."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_seq_len: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_seq_len = max_seq_len
        eos_ids = {*eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())}
        # a tokenizer may end with a token that the model was never given a row for
        self._eos_ids = frozenset(token for token in eos_ids if 0 <= token < vocab_size)

    def request(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str, label: str = "prompt"
    ) -> Request:
        """A request of the base model, without sequences yet. Raises RequestError.

        `label` is what messages call the prompt.
        """
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id={shown(request_id)} is not a non-empty string")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params={shown(params)} is not a SamplingParams")
        params = params.copy()  # the caller's lists may change later
        params.check_vocabulary(self._vocab_size)
        if params.stop_strings and self._tokenizer is None:
            raise RequestError(
                f"stop={params.stop!r}: stop strings need a tokenizer, and the engine has none"
            )
        prompt_ids = self._encode(prompt, label)
        longest = len(prompt_ids) + params.max_tokens
        if longest > self._max_seq_len:
            raise RequestError(
                f"{label} has {len(prompt_ids)} tokens and max_tokens={params.max_tokens}: "
                f"{longest} together, and max_seq_len={self._max_seq_len} is accepted"
            )
        eos_ids = frozenset() if params.ignore_eos else self._eos_ids
        return Request(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=prompt_ids,
            params=params,
            adapter=None,
            seed=0 if params.seed is None else as_int64(params.seed),
            stop_ids=eos_ids | frozenset(params.stop_token_ids or ()),
            metrics=RequestMetrics(arrival_time=time.perf_counter()),
        )

    def _encode(self, prompt: Prompt, label: str) -> list[int]:
        if isinstance(prompt, str):
            ids = self._encode_text(prompt, label)
        else:
            ids = as_token_ids(prompt, label)
        if not ids:
            raise RequestError(f"{label}={shown(prompt)} is empty: at least one token is needed")
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"{label}: token id {shown(token)} is out of range; accepted: 0 to "
                    f"{self._vocab_size - 1}"
                )
        return ids

    def _encode_text(self, text: str, label: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError(f"{label} is text, which needs a tokenizer; the engine has none")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{label}={shown(text)} is not Unicode text ({error})") from None
        return self._tokenizer.encode(text)
