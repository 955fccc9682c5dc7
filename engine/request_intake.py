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
        self._eos_ids = frozenset(eos_token_ids)
        if tokenizer is not None:
            self._eos_ids |= frozenset(tokenizer.eos_token_ids)

    def request(self, prompt: Prompt, params: SamplingParams | None, request_id: str) -> Request:
        """A request of the base model, without sequences yet. Raises RequestError."""
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r} is not a string")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params={params!r} is not a SamplingParams")
        params.check_vocabulary(self._vocab_size)
        if params.stop_strings and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and the engine has none")
        prompt_ids = self._encode(prompt)
        longest = len(prompt_ids) + params.max_tokens
        if longest > self._max_seq_len:
            raise RequestError(
                f"a prompt of {len(prompt_ids)} tokens and max_tokens={params.max_tokens} make "
                f"{longest}; max_seq_len is {self._max_seq_len}"
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

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError("a prompt of text needs a tokenizer, and the engine has none")
            ids = self._tokenizer.encode(prompt)
        else:
            ids = as_token_ids(prompt)
        if not ids:
            raise RequestError(f"prompt {prompt!r} is empty: at least one token is needed")
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"prompt: token id {token} is out of range; the model has {self._vocab_size}"
                )
        return ids
