"""A tiny checkpoint with adapters and the oracle of both: what an end-to-end test serves.

Every output is judged by the oracle, never by another run of the engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine import Engine, RequestOutput, SamplingParams
from tests.engine.backends import TestedBackend
from tests.oracle import Oracle
from tests.random_adapters import save_adapter
from tests.tiny_models import build_model, save_model

TOP = 5
FARTHEST_OWN_SHARE = 0.05  # of the distance to the nearest other oracle: "by a wide margin"
NEAREST_OTHER = 0.02  # nats, at every decode position
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_batch_size": 8,
    "graph_batch_sizes": [1, 2, 4, 8],
    "max_seq_len": 128,
    "max_loras": 4,
    "max_lora_rank": 16,
    "prefill_chunk_tokens": 64,
    "tokenizer": None,
    "enable_prefix_caching": False,
    "debug": True,
}


def greedy(max_tokens: int, **others: Any) -> SamplingParams:
    """Greedy, with the logprobs that the oracle is compared at."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=TOP, **others)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, 515, (length,), generator=generator).tolist()


def run_to_the_end(engine: Engine) -> dict[str, RequestOutput]:
    """Step until nothing is left; the last output of every request, by id."""
    outputs = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


@dataclass(frozen=True)
class AdaptedModel:
    """`path` is the base checkpoint, `adapters` are PEFT directories by name."""

    path: Path
    adapters: dict[str, Path]
    oracle: Oracle

    @classmethod
    def make(
        cls, name: str, directory: Path, adapters: Mapping[str, Mapping[str, Any]]
    ) -> "AdaptedModel":
        """The model `name` of `tests.tiny_models`; `adapters` are keywords of `save_adapter`,
        which get seeds of their own."""
        model = build_model(name)
        paths = {
            adapter: save_adapter(model, directory / adapter, **{"seed": seed, **keywords})
            for seed, (adapter, keywords) in enumerate(adapters.items(), start=1)
        }
        return cls(save_model(name, directory), paths, Oracle(model, paths))

    def engine(
        self, backend: TestedBackend, load: Sequence[str] | None = None, **keywords: Any
    ) -> Engine:
        """An engine with the adapters named in `load`, or all, registered."""
        names = self.adapters if load is None else load
        return Engine(
            self.path,
            device=backend.device,
            graphs=backend.graphs,
            adapters={name: self.adapters[name] for name in names},
            **DEFAULTS | keywords,
        )

    def check(
        self,
        outputs: Sequence[RequestOutput],
        backend: TestedBackend,
        adapters: Sequence[str | None] | None = None,
        is_greedy: bool = True,
    ) -> None:
        """REF and ID for every completion: at each position within the backend's tolerance of
        the oracle of its adapter; at each decode position no other oracle is anywhere near.

        `adapters` are the oracles' names where they are not the outputs'. Greedy tokens must be
        the oracle's own choice, or tie with it.
        """
        names = [output.adapter for output in outputs] if adapters is None else adapters
        rows = [
            (name, output, completion)
            for name, output in zip(names, outputs, strict=True)
            for completion in output.outputs
        ]
        tolerance = backend.tolerance
        references = self._references(
            [output.prompt_token_ids + completion.token_ids for _, output, completion in rows]
        )
        for row, (name, output, completion) in enumerate(rows):
            assert output.error is None, output.error
            first, count = len(output.prompt_token_ids) - 1, len(completion.token_ids)
            mine = {
                key: logprobs[row, first : first + count] for key, logprobs in references.items()
            }
            distances = {key: _distances(ref, completion.logprobs) for key, ref in mine.items()}
            own = distances[name]  # [count]
            where = f"row {row} ({name}, {output.request_id})"
            assert own.max() <= tolerance, f"{where}: {own.max():.2g} off at {int(own.argmax())}"
            for key, other in distances.items():
                if key != name and count > 1:
                    nearest = other[1:].min()
                    assert nearest > NEAREST_OTHER, f"{where}: {nearest:.2g} from {key}"
                    assert own.max() < FARTHEST_OWN_SHARE * nearest, f"{where}: as near to {key}"
            if is_greedy:
                chosen = mine[name].gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
                behind = (mine[name].amax(-1) - chosen).max()
                assert behind <= 2 * tolerance, f"{where}: {behind:.2g} below the best token"

    @torch.no_grad()
    def _references(self, sequences: list[list[int]]) -> dict[str | None, torch.Tensor]:
        """float32 [rows, longest, V] by adapter. Padding comes last, where nothing before it
        attends to it."""
        longest = max(map(len, sequences))
        ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in sequences])
        models = self.oracle.models
        return {name: model(ids).logits.log_softmax(-1) for name, model in models.items()}


def _distances(reference: torch.Tensor, reported: list[dict[int, float]] | None) -> torch.Tensor:
    """[count]: the largest |Δlogprob| of the tokens reported at each position."""
    assert reported is not None, "ask for logprobs"
    assert len(reported) == len(reference) > 0, (len(reported), len(reference))
    flat = [(i, token, value) for i, row in enumerate(reported) for token, value in row.items()]
    positions, tokens, values = zip(*flat, strict=True)
    at = torch.tensor(positions)
    gaps = (reference[at, torch.tensor(tokens)] - torch.tensor(values)).abs()
    gaps = gaps.nan_to_num(float("inf"))
    return torch.zeros(len(reference)).scatter_reduce(0, at, gaps, "amax")
