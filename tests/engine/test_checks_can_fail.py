"""The end-to-end check goes red for the faults it is there for: each is put in on purpose.

Without this, a check that passes might be one that always passes.
"""

import pytest

from engine.lora_delta import LoRADelta
from engine.model_runner import ModelRunner
from memory.adapter_tables import AdapterTables
from tests.engine.adapted_model import AdaptedModel, greedy, prompt_of
from tests.engine.backends import BACKENDS

ADAPTERS = {
    "a": {"rank": 8},
    "b": {"rank": 8, "targets": ("q_proj", "o_proj"), "strength": 4.0},
}
NAMES = ["a", None, "b", "a"]
OPTIONS = {"graph_batch_sizes": [4], "debug": False}  # what debug mode would catch is wanted


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return AdaptedModel.make("llama", tmp_path_factory.mktemp("llama"), ADAPTERS)


def serve(llama, backend, engine, names=NAMES, tokens=8):
    prompts = [prompt_of(4 + row, row) for row in range(len(names))]
    llama.check(engine.generate(prompts, greedy(tokens, ignore_eos=True), names), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_slots_swapped_in_the_tables(llama, backend):
    with llama.engine(backend, **OPTIONS) as engine:
        serve(llama, backend, engine)
        for table in engine.memory.adapters.tables.tensors().values():
            table[:, :, :2] = table[:, :, :2].flip(2).clone()
        with pytest.raises(AssertionError, match=r"row 0 \(a"):
            serve(llama, backend, engine)


@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata_that_the_graph_does_not_derive(llama, backend, monkeypatch):
    """Prefill still derives its own, so first tokens are right: the decode positions tell."""
    with monkeypatch.context() as patch:
        patch.setattr(LoRADelta, "derive_metadata", lambda delta: None)
        engine = llama.engine(backend, **OPTIONS)
    with engine, pytest.raises(AssertionError, match=r"off at [1-7]"):
        serve(llama, backend, engine)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_refresh_of_the_rows_skipped(llama, backend, monkeypatch):
    """The batch changes and the step after it runs with the rows and masks of the one before."""
    with llama.engine(backend, **OPTIONS) as engine:
        serve(llama, backend, engine, ["a", None, None, "a"])
        stage, skipped = ModelRunner._stage, []

        def skip_once(runner, buffers, sequences):
            if skipped:
                stage(runner, buffers, sequences)
            else:
                skipped.append(buffers)

        monkeypatch.setattr(ModelRunner, "_stage", skip_once)
        with pytest.raises(AssertionError, match="off at"):
            serve(llama, backend, engine, ["b", "a", None])


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_of_the_adapter_before(llama, backend, monkeypatch):
    """A slot's modules that the next adapter does not have keep rank and addresses."""
    write_slot = AdapterTables.write_slot

    def write_over(tables, slot, entries):
        before = {name: table.clone() for name, table in tables.tensors().items()}
        write_slot(tables, slot, entries)
        unused = tables.linear.lora_ranks[:, :, slot] == 0
        for name, table in tables.tensors().items():
            table[:, :, slot][unused] = before[name][:, :, slot][unused]

    monkeypatch.setattr(AdapterTables, "write_slot", write_over)
    with llama.engine(backend, max_loras=1, **OPTIONS) as engine:
        serve(llama, backend, engine, ["a", None])
        with pytest.raises(AssertionError, match=r"row 0 \(b"):
            serve(llama, backend, engine, ["b", None])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rank_mask(llama, backend):
    """Every module is taken to be of the largest rank: what lies behind it is read as weights."""
    with llama.engine(backend, **OPTIONS) as engine:
        serve(llama, backend, engine)
        ranks = engine.memory.adapters.tables.linear.lora_ranks
        ranks[ranks > 0] = engine.config.max_lora_rank
        with pytest.raises(AssertionError, match=r"row 0 \(a"):
            serve(llama, backend, engine)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_number_of_segments_frozen(llama, backend, monkeypatch):
    derive = LoRADelta.derive_metadata

    def derive_one_segment(delta):
        derive(delta)
        delta.info.num_segments.fill_(1)

    monkeypatch.setattr(LoRADelta, "derive_metadata", derive_one_segment)
    with llama.engine(backend, **OPTIONS) as engine:
        serve(llama, backend, engine, ["a", None, "a"])
        with pytest.raises(AssertionError, match=r"row 2 \(b"):
            serve(llama, backend, engine)


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_left_disabled(llama, backend):
    with llama.engine(backend, **OPTIONS) as engine:
        serve(llama, backend, engine)
        engine.memory.adapters.enabled[:] = [0] * len(engine.memory.adapters.enabled)
        with pytest.raises(AssertionError, match=r"row 0 \(a"):
            serve(llama, backend, engine)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_answer_for_another_adapter(llama, backend):
    """The oracle of each adapter refuses what belongs to any other, the base among them."""
    with llama.engine(backend, **OPTIONS) as engine:
        outputs = engine.generate([prompt_of(5)] * 3, greedy(6), ["a", "b", None])
    llama.check(outputs, backend)
    for judged in (["b", "b", None], ["a", None, None], ["a", "b", "a"]):
        with pytest.raises(AssertionError, match="off at"):
            llama.check(outputs, backend, judged)
