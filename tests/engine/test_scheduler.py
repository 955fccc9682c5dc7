"""The scheduler: who runs, on which pages, who waits and who gives way. Plans only, no model."""

import random

import pytest

from engine.errors import CapacityError
from engine.scheduler import MAX_OVERTAKEN, RESERVE_TOKENS
from memory.page_pool import DUMMY_PAGE, page_key, root_key
from tests.engine.fake_engine import WORD, FakeEngine


def running(engine: FakeEngine) -> list[str]:
    return [sequence.request.request_id for sequence in engine.scheduler.running]


def test_first_come_first_served_up_to_the_batch():
    engine = FakeEngine(max_batch_size=3)
    for _ in range(5):
        engine.add(3, 4)
    assert len(engine.step().admitted) == 3
    assert running(engine) == ["0", "1", "2"]
    engine.run()
    assert engine.admissions == ["0", "1", "2", "3", "4"]


def test_a_prompt_decodes_in_the_step_after_its_last_chunk():
    engine = FakeEngine()
    request = engine.add(5, 3)
    plan = engine.step()
    assert [(c.start, c.count, c.draws) for c in plan.prefill] == [(0, 5, True)]
    assert plan.decode == []
    assert [engine.step().decode for _ in range(2)] == [request.sequences] * 2
    assert not engine.step().decode
    assert request.sequences[0].finish_reason == "length"
    assert len(request.sequences[0].output_ids) == 3


def test_sequences_of_one_request_run_side_by_side():
    engine = FakeEngine(max_batch_size=4)
    request = engine.add(6, 5, n=6)
    assert len(engine.step().admitted) == 4
    engine.run()
    assert [len(s.output_ids) for s in request.sequences] == [5] * 6


def test_long_prompts_run_in_chunks_that_share_a_step():
    engine = FakeEngine(prefill_chunk_tokens=16)
    engine.add(20, 2)
    engine.add(7, 2)
    engine.add(30, 2)
    chunks = [
        [(c.sequence.request.request_id, c.start, c.count, c.draws) for c in engine.step().prefill]
        for _ in range(4)
    ]
    assert chunks == [
        [("0", 0, 16, False)],
        [("0", 16, 4, True), ("1", 0, 7, True), ("2", 0, 5, False)],
        [("2", 5, 16, False)],
        [("2", 21, 9, True)],
    ]


def test_decode_goes_on_beside_prefill_chunks():
    engine = FakeEngine()
    first = engine.add(4, 20)
    engine.step()
    engine.add(50, 2)
    for _ in range(4):
        plan = engine.step()
        assert plan.prefill
        assert plan.decode == first.sequences


def test_pages_are_reserved_ahead_so_that_few_steps_write_them():
    engine = FakeEngine(num_pages=400, page_size=4)
    request = engine.add(8, 700)
    [sequence] = request.sequences
    engine.step()
    assert len(sequence.pages) == 2  # the prompt's
    engine.step()
    assert len(sequence.pages) == 2 + RESERVE_TOKENS // 4
    writes = [bool(engine.step().page_writes) for _ in range(RESERVE_TOKENS - 1)]
    assert not any(writes)
    assert engine.step().page_writes
    engine.run()
    assert sum(bool(summary[3]) for summary in engine.history) == 4  # 8, 256, 256, 188 tokens


def test_no_page_is_reserved_beyond_the_last_token_fed():
    engine = FakeEngine(page_size=4)
    [sequence] = engine.add(8, 9).sequences
    for _ in range(4):
        engine.step()
    assert len(sequence.pages) == 4  # 8 + 9 - 1 tokens


def test_reserved_pages_are_reclaimed_before_anyone_is_preempted():
    engine = FakeEngine(num_pages=12, page_size=4)
    [first] = engine.add(8, 33, stop_after=3).sequences  # would need 10 pages, ends early
    engine.step()
    engine.step()
    assert len(first.pages) == 10
    [second] = engine.add(8, 8).sequences
    plan = engine.step()
    assert second in plan.admitted
    assert len(first.pages) == 3
    taken_back = {at for at, page in plan.page_writes.items() if page == DUMMY_PAGE}
    assert taken_back == {(first.slot, index) for index in range(3, 10)}
    engine.run()
    assert engine.scheduler.preemptions == 0


def test_decode_reclaims_what_others_reserved():
    engine = FakeEngine(num_pages=12, page_size=4, max_batch_size=2)
    [first] = engine.add(4, 37, stop_after=15).sequences  # would need 10 pages, ends early
    [second] = engine.add(4, 9).sequences
    engine.step()
    engine.step()
    assert (len(first.pages), len(second.pages)) == (10, 2)  # the pool did not allow all ahead
    engine.run()
    assert engine.scheduler.preemptions == 0


def test_nothing_is_reserved_ahead_while_the_next_in_line_waits_for_pages():
    engine = FakeEngine(num_pages=12, page_size=4)
    [first] = engine.add(8, 33, stop_after=20).sequences
    engine.step()
    engine.step()
    assert len(first.pages) == 10
    [waits] = engine.add(36, 2).sequences
    engine.step()  # takes back
    while not first.finished:
        assert len(engine.step().page_writes) <= 1
        assert waits.slot is None
        assert len(first.pages) in (0, engine.pages.pages_for(first.next_position))
    engine.run()


def test_an_end_that_is_still_unread_spares_a_preemption():
    engine = FakeEngine(num_pages=4, page_size=4, max_batch_size=2)
    first, second = engine.add(4, 9), engine.add(4, 9, stop_after=5)
    for _ in range(5):
        engine.step()
    assert engine.pages.free_pages == 0
    assert not second.finished  # its last token is drawn, and not read
    assert engine.step().decode == first.sequences  # which needs a page now
    assert second.finished
    engine.run()
    assert engine.scheduler.preemptions == 0


def test_the_latest_gives_way_and_comes_back_first():
    engine = FakeEngine(num_pages=9, page_size=4, max_batch_size=3)
    requests = [engine.add(6, 15) for _ in range(3)]  # 2 pages each now, 5 at the end
    waiting = engine.add(3, 2)
    preempted = []
    for _ in range(100):
        before = running(engine)
        plan = engine.step()
        gone = [i for i in before if i not in running(engine)]
        unfinished = [i for i in gone if not engine.requests[int(i)].finished]
        if unfinished:
            assert unfinished == before[-len(unfinished) :], "not the latest"
            assert engine.scheduler.waiting[0].request.request_id == unfinished[0]
            assert not plan.admitted
            preempted += unfinished
    engine.run()
    assert preempted[0] == "2"
    assert "0" not in preempted  # the first is never passed over
    assert engine.scheduler.preemptions == len(preempted)
    assert [r.metrics.preemptions for r in requests] == [preempted.count(i) for i in "012"]
    assert all(len(r.sequences[0].output_ids) == 15 for r in requests)
    assert engine.admissions.index("3") > engine.admissions.index("2")
    assert waiting.finished


def test_what_was_preempted_is_prefilled_with_its_output():
    engine = FakeEngine(num_pages=6, page_size=4, max_batch_size=2)
    engine.add(6, 15)
    [second] = engine.add(6, 15).sequences
    while engine.scheduler.preemptions == 0:
        engine.step()
    known = len(second.output_ids)
    assert known > 1
    assert second.launched == known  # all was read before it gave way
    while second.slot is None:
        engine.step()
    assert second.prefill_tokens == 6 + known
    engine.run()
    assert len(second.output_ids) == 15


def test_the_device_is_read_only_where_someone_must_give_way():
    engine = FakeEngine(num_pages=64)
    engine.add(6, 30)
    while not engine.scheduler.idle:
        plan = engine.scheduler.plan(lambda: pytest.fail("nothing is short"))
        engine._launch(plan)
        engine._collect(len(engine._in_flight))


def test_a_request_that_could_never_run_is_refused():
    engine = FakeEngine(num_pages=4, page_size=4)
    engine.add(10, 7)  # 16 tokens with KV
    with pytest.raises(CapacityError, match=r"request 1: .*need 5 KV pages and the cache has 4"):
        engine.add(10, 8)
    engine.run()


def test_all_adapters_get_their_turn_with_fewer_slots():
    names = [f"adapter-{i}" for i in range(5)]
    engine = FakeEngine(
        num_pages=400, max_batch_size=8, max_loras=2, adapters=dict.fromkeys(names, False)
    )
    rng = random.Random(3)
    for _ in range(200):
        engine.add(rng.randint(1, 9), rng.randint(1, 12), rng.choice([None, *names]))
    steps = engine.run()
    assert steps < 200 * 12
    assert all(request.sequences[0].finish_reason == "length" for request in engine.requests)


def test_overtaking_is_bounded():
    """A runs without end on the only slot; B waits behind A's first, before many more."""
    engine = FakeEngine(
        num_pages=400, max_batch_size=3, max_loras=1, adapters={"a": False, "b": False}
    )
    engine.add(2, 5, "a")
    engine.add(2, 5, "a")
    waits = engine.add(2, 5, "b")
    later = [engine.add(2, 2 + i % 7, "a") for i in range(3 * MAX_OVERTAKEN)]
    while waits.sequences[0].slot is None:
        engine.step()
        assert len(engine.history) < 4000, "b starves"
    passed = engine.admissions.index(waits.request_id) - 2
    assert passed == MAX_OVERTAKEN
    engine.run()
    assert all(request.finished for request in later)


def test_base_requests_pass_those_that_wait_for_a_slot():
    engine = FakeEngine(max_loras=1, adapters={"a": False, "b": False})
    engine.add(2, 30, "a")
    blocked = [engine.add(2, 3, "b") for _ in range(10)]
    base = engine.add(2, 3)
    assert [s.request for s in engine.step().admitted] == [engine.requests[0], base]
    for request in blocked:
        request.sequences[0].overtaken = MAX_OVERTAKEN  # even then
    another = engine.add(2, 3)
    assert [s.request for s in engine.step().admitted] == [another]
    engine.run()


def test_base_requests_pass_one_that_waits_for_a_slot_and_for_pages():
    engine = FakeEngine(num_pages=10, page_size=4, max_loras=1, adapters={"a": False, "b": False})
    engine.add(4, 20, "a")
    engine.step()
    large = engine.add(36, 2, "b")
    base = engine.add(2, 2)
    assert [s.request for s in engine.step().admitted] == [base]
    engine.run()
    assert large.finished


def test_a_request_that_waits_for_pages_holds_no_adapter():
    engine = FakeEngine(num_pages=10, page_size=4, adapters={"a": False})
    engine.add(20, 10)
    engine.step()
    engine.add(30, 2, "a")
    assert not engine.step().admitted
    assert engine.registry.find("a").running == 0
    engine.run()


def test_slots_that_pinned_adapters_keep_are_not_waited_for():
    """Base traffic never ends here, and must not keep the hopeless one in the queue."""
    engine = FakeEngine(max_loras=1, adapters={"pinned": True, "late": False})
    engine.add(2, 200)
    engine.step()
    hopeless, served = engine.add(2, 3, "late", n=2), engine.add(2, 3, "pinned")
    plan = engine.step()
    assert [s.request for s in plan.admitted] == [served]
    assert "'late' finds no room beside the pinned ones" in str(engine.errors["1"])
    assert isinstance(engine.errors["1"], CapacityError)
    assert hopeless.finished
    engine.end(engine.requests[0])
    engine.run()


def test_a_slot_that_a_draining_pinned_adapter_will_leave_is_waited_for():
    engine = FakeEngine(max_loras=1, adapters={"pinned": True, "late": False})
    engine.add(2, 10, "pinned")
    engine.step()
    engine.registry.unload("pinned")
    late = engine.add(2, 3, "late")
    engine.run()
    assert not engine.errors
    assert len(late.sequences[0].output_ids) == 3


@pytest.mark.parametrize("stage", ["waiting", "prefilling", "decoding"])
def test_ended_requests_leave_nothing(stage):
    engine = FakeEngine(max_batch_size=1, prefill_chunk_tokens=4, adapters={"a": False})
    if stage == "waiting":
        engine.add(3, 5)
    request = engine.add(10, 20, "a", n=1)
    for _ in range({"waiting": 1, "prefilling": 2, "decoding": 6}[stage]):
        engine.step()
    engine.end(request)
    assert request.sequences[0] not in engine.scheduler.waiting
    assert request.adapter.requests == request.adapter.running == 0
    engine.add(3, 2, "a")
    engine.run()


def test_full_pages_are_keyed_by_adapter_version_and_tokens():
    engine = FakeEngine(prefill_chunk_tokens=32, adapters={"a": False})
    base, tuned = engine.add(9, 20), engine.add(9, 20, "a")
    for _ in range(8):  # 16 tokens are known, and the newest has no KV
        engine.step()
    for request, version in ((base, 0), (tuned, tuned.adapter.version)):
        [sequence] = request.sequences
        written = 9 + len(sequence.output_ids) - 1
        key, expected = root_key(version), []
        for _ in range(written // 4):
            key = page_key(key, [WORD] * 4)
            expected.append(key)
        assert (written, len(expected)) == (15, 3)
        assert [engine.pages.key(page) for page in sequence.pages[:3]] == expected
        assert engine.pages.key(sequence.pages[3]) is None
    engine.run()


def programme(seed: int, steps: int = 250) -> FakeEngine:
    """A random life: requests come, stop unforeseen, are aborted; adapters come and go."""
    rng = random.Random(seed)
    names = [f"adapter-{i}" for i in range(rng.choice([1, 3, 8]))]
    engine = FakeEngine(
        num_pages=rng.choice([12, 20, 60]),
        page_size=rng.choice([1, 4, 16]),
        max_batch_size=rng.choice([1, 3, 8]),
        prefill_chunk_tokens=rng.choice([1, 5, 16]),
        max_loras=rng.choice([1, 2, 3]),
        adapters=dict.fromkeys(names, False),
    )
    longest = min(60, (engine.pages.num_pages - 1) * engine.pages.page_size)
    for _ in range(steps):
        while rng.random() < 0.35:
            prompt = rng.randint(1, longest)
            max_tokens = rng.randint(1, longest - prompt + 1)
            loaded = [None, *engine.registry._by_name]
            stop = rng.choice([None, rng.randint(1, max_tokens)])
            engine.add(prompt, max_tokens, rng.choice(loaded), rng.choice([1, 1, 3]), stop)
        if rng.random() < 0.1 and engine.requests:
            engine.end(rng.choice(engine.requests))
        if rng.random() < 0.03:
            name = rng.choice(names)
            old = engine.registry.find(name).packed
            engine.registry.unload(name)
            engine.registry.register(name, old, False)
        engine.step()
    engine.run(most_steps=20_000)
    for request in engine.requests:
        for sequence in request.sequences:
            wanted = min(request.params.max_tokens, engine._stops[request.request_id])
            if sequence.finish_reason != "abort":
                assert len(sequence.output_ids) == wanted
    assert not engine.errors
    return engine


@pytest.mark.parametrize("seed", range(24))
def test_random_lives_keep_every_invariant(seed):
    programme(seed)


@pytest.mark.parametrize("seed", [0, 5, 11])
def test_equal_histories_give_equal_plans(seed):
    assert programme(seed, 120).history == programme(seed, 120).history


def test_random_lives_do_preempt_evict_and_reclaim():
    """Or the invariants above were never at risk."""
    engines = [programme(seed, 120) for seed in range(6)]
    assert sum(engine.scheduler.preemptions for engine in engines) > 20
    assert sum(engine.registry.evictions for engine in engines) > 20
    writes = [at_page for e in engines for summary in e.history for at_page in summary[3]]
    assert sum(page == DUMMY_PAGE for _, page in writes) > 20
