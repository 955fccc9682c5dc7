"""Thousands of decode steps while adapters join and leave: the same bits twice, on a used engine
and on a fresh one."""

import random
from dataclasses import dataclass, field

import pytest

from engine import Engine, SamplingParams
from tests.engine.backends import BACKENDS
from tests.engine.programme import VOCAB, as_bits
from tests.random_adapters import save_adapter
from tests.tiny_models import build_model, save_model

STEPS = {"cpu": 200, "cuda": 2000}
MAX_BATCH, MAX_LORAS = 6, 2
ADAPTERS = {
    "full": {"rank": 8},
    "partial": {"rank": 5, "targets": ("q_proj", "down_proj")},
    "wide": {"rank": 33, "targets": ("v_proj", "up_proj")},
    "mixed": {"rank": 16, "rank_pattern": {"k_proj": 3}},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    model = build_model("llama")
    adapters = {
        name: save_adapter(model, directory / name, seed=seed, **keywords)
        for seed, (name, keywords) in enumerate(ADAPTERS.items(), start=1)
    }
    return save_model("llama", directory), adapters


def build(checkpoint, backend):
    return Engine(
        checkpoint[0],
        device=backend.device,
        graphs=backend.graphs,
        max_batch_size=MAX_BATCH,
        graph_batch_sizes=[1, 2, 4, 6],
        max_seq_len=192,
        max_loras=MAX_LORAS,
        kv_cache_tokens=640,
        prefill_chunk_tokens=32,
        tokenizer=None,
    )


@dataclass
class Script:
    """What happens at each step, drawn from a seed. Leaves the engine without adapters."""

    engine: Engine
    adapters: dict
    steps: int
    seed: int
    loaded: list = field(default_factory=list)
    log: list = field(default_factory=list)

    def run(self):
        """Every output in the order it came."""
        draw, added = random.Random(self.seed), 0
        for step in range(self.steps):
            if draw.random() < 0.15:
                self.swap(draw)
            if draw.random() < 0.25:
                self.add(draw, f"request{added}")
                added += 1
            self.log += [(step, as_bits(output)) for output in self.engine.step()]
        while self.engine.has_unfinished():
            self.log += [as_bits(output) for output in self.engine.step()]
        for name in self.loaded:
            self.engine.unload_adapter(name)
        return self.log

    def add(self, draw, request_id):
        params = SamplingParams(
            max_tokens=draw.randint(1, 40),
            temperature=draw.choice((0.0, 0.9)),
            top_p=draw.choice((1.0, 0.9)),
            ignore_eos=True,
            logprobs=draw.choice((None, 2)),
        )
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 40))]
        self.engine.add_request(prompt, params, draw.choice([None, *self.loaded]), request_id)

    def swap(self, draw):
        """An adapter joins or leaves; there are more than the device has slots for."""
        absent = [name for name in ADAPTERS if name not in self.loaded]
        if absent and (not self.loaded or draw.random() < 0.6):
            name = draw.choice(absent)
            self.engine.load_adapter(name, self.adapters[name])
            self.loaded.append(name)
        else:
            self.loaded.remove(name := draw.choice(self.loaded))
            self.engine.unload_adapter(name)
            while name in {info.name for info in self.engine.adapters()}:  # it may drain
                self.log += [as_bits(output) for output in self.engine.step()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_run_gives_the_same_bits_on_a_used_and_on_a_fresh_engine(checkpoint, backend):
    steps = STEPS[backend.device]

    def run(engine, seed):
        log = Script(engine, checkpoint[1], steps, seed).run()
        assert engine.stats().kv_pages_used == 0
        assert engine.adapters() == []
        return log

    with build(checkpoint, backend) as engine:
        first = run(engine, 1)
        stats = engine.stats()
        assert stats.replays >= 0.7 * steps, "most steps decode"
        assert stats.adapter_evictions > 0
        assert stats.eager_fallbacks == 0
        assert run(engine, 2) != first
        used = run(engine, 1)
    assert used == first
    with build(checkpoint, backend) as engine:
        assert run(engine, 1) == first
