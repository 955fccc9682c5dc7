"""`profiles.step` without a GPU: the ops of a real step, with made-up records of its kernels."""

import importlib.util
import json

import pytest

from profiles import step
from profiles.device_trace import DeviceTrace, busy_us, replays_of
from profiles.kernel_match import Launch, launches, match, short_name, unmatched
from profiles.op_log import LoggedOp, log_ops, mark_ops, missing_counts
from profiles.timeline import Timeline, own_us
from tests.profiles.made_up_trace import (
    MAIN,
    SIDE,
    eager_events,
    kernel_names,
    replay_events,
    span,
)
from tests.profiles.tiny_shape import DENSE, MIXTURE, tiny_batch

BANDWIDTH = 1e12
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(scope="module", params=["mix8", "off", "mixture"])
def ops(request):
    config, case = (MIXTURE, "mix8") if request.param == "mixture" else (DENSE, request.param)
    with tiny_batch(config, case) as running:
        logged = log_ops(running.step_eagerly)
        assert mark_ops(running.step_eagerly) == len(logged)
    return logged


def timeline_of(ops, replay=None):
    eager = launches(DeviceTrace.from_events(eager_events(ops)))
    kernels = DeviceTrace.from_events(replay or replay_events(ops)).kernels
    return Timeline(match(kernels, eager), ops, BANDWIDTH)


def as_result(timeline):
    spans = [timeline.span_us / 1e3] * 3
    result = {
        "benchmark": "step",
        "hardware": "a made-up card",
        "model": "tiny",
        "batch": 4,
        "adapters": "mix8",
        "read_bandwidth_tb_per_s": BANDWIDTH / 1e12,
        "ms_per_replay": 0.4,
        "ms_per_profiled_replay": spans,
        **step.summary(timeline),
    }
    return json.loads(json.dumps(result))


def test_every_kernel_has_its_op(ops):
    timeline = timeline_of(ops)
    names = [name for op in ops for name in kernel_names(op)]
    assert len(timeline.kernels) == len(names)
    for kernel in timeline.kernels:
        assert kernel.name in kernel_names(ops[kernel.op])
        assert kernel.lane == (ops[kernel.op].name == "sgemm_a")
    assert {kernel.op for kernel in timeline.kernels} == set(range(len(ops)))
    assert unmatched(timeline.kernels) == []


def test_expert_adapters_in_groups_move_what_pairs_move(monkeypatch):
    moved = []
    monkeypatch.setattr("kernels.moe_gemm_shrink.MAX_SHARED_PAIRS", 0)
    for limit in (1024, 0):  # pairs up to which each is taken by itself
        monkeypatch.setattr("engine.expert_delta.MAX_PAIRWISE", limit)
        with tiny_batch(MIXTURE, graphs="off") as running:
            ops = log_ops(running.step_eagerly)
        shrinks = [op for op in ops if op.name.startswith("moe_lora_shrink")]
        assert {op.name.endswith("grouped") for op in shrinks} == {limit == 0}
        assert missing_counts(ops) == []
        moved.append([op.bytes for op in shrinks])
    assert moved[0] == moved[1]


def test_expert_adapters_beside_the_product_move_what_both_do_but_its_rows(monkeypatch):
    logs = []
    for limit in (256, 0):  # pairs up to which both share a launch
        monkeypatch.setattr("kernels.moe_gemm_shrink.MAX_SHARED_PAIRS", limit)
        with tiny_batch(MIXTURE, graphs="off") as running:
            logs.append(log_ops(running.step_eagerly))
        assert missing_counts(logs[-1]) == []
    together = [op for op in logs[0] if op.name == "moe_gemm_shrink"]
    products = [op for op in logs[1] if op.name == "moe_gemm"]
    shrinks = [op for op in logs[1] if op.name == "moe_lora_shrink"]
    assert len(together) == len(products) == len(shrinks) > 0
    assert not {"moe_gemm", "moe_lora_shrink"} & {op.name for op in logs[0]}
    for both, product, shrink in zip(together, products, shrinks, strict=True):
        assert product.bytes < both.bytes < product.bytes + shrink.bytes


def test_a_step_is_traced_from_end_to_end(monkeypatch, tmp_path):
    """All but the profiler itself."""

    def trace_device(run, with_host_ops=False, keep=None):
        kept.append(keep)
        run()
        events = eager_events(ops) if with_host_ops else []
        for number in range(0 if with_host_ops else step.REPLAYS):
            events += replay_events(ops, correlation=number, start=1e4 * number)
        return DeviceTrace.from_events(events)

    kept = []
    monkeypatch.setattr(step, "trace_device", trace_device)
    with tiny_batch() as running:
        ops = log_ops(running.step_eagerly)
        replays = running.engine.stats().replays
        timeline, spans = step.trace_step(running, BANDWIDTH, tmp_path)
        assert running.engine.stats().replays == replays + step.REPLAYS
    assert len(timeline.kernels) == sum(len(kernel_names(op)) for op in ops)
    assert spans == [timeline.span_us] * 3
    assert kept == [tmp_path / "eager.json", tmp_path / "replays.json"]
    logged = json.loads((tmp_path / "ops.json").read_text())["ops"]
    assert [LoggedOp(**op) for op in logged] == timeline.ops


def test_all_ops_are_counted(ops):
    assert missing_counts(ops) == []
    assert all(op.bytes > 0 for op in ops)


def test_layers(ops):
    timeline = timeline_of(ops)
    names = [[ops[index].name for index in layer] for layer in timeline.layers]
    assert len(names) == DENSE["num_hidden_layers"]
    assert names[0] == names[1] == names[2]
    assert names[0].count("paged_attention") == 1
    after = [op.name for op in ops[timeline.layers[-1].stop :]]
    assert after == ["linear", "sample", "logprobs"]
    before = [op.name for op in ops[: timeline.layers[0].start]]
    assert before[0] == "gather_step_inputs"
    assert before[-1] == "rms_norm"
    labels = [timeline.labels[index] for index in timeline.layers[1]]
    products = [label.partition(", x Aᵀ")[0] for label in labels]
    assert "q, k, v: product" in products
    if sum(name.startswith("linear") for name in names[0]) == 4:
        assert "gate, up: product" in products
        assert "down: product" in products
    assert timeline.labels[timeline.layers[-1].stop] == "LM head"


def test_the_critical_path_leaves_branches_out_and_adds_up(ops):
    timeline = timeline_of(ops)
    branches = [i for i, k in enumerate(timeline.kernels) if ops[k.op].name == "sgemm_a"]
    assert timeline.path.keys() == set(range(len(timeline.kernels))) - set(branches)
    sums = timeline.path_sums()
    assert sums["gaps_us"] == len(timeline.path) - 1
    assert sums["kernels_us"] + sums["gaps_us"] - sums["overlaps_us"] == sums["span_us"]
    assert sums["beside_us"] == 2 * len(branches)


def test_sums_hold_all_time_and_all_bytes(ops):
    timeline = timeline_of(ops)
    for rows in (timeline.by_op(), timeline.by_kind()):
        assert sum(row["kernels"] for row in rows) == len(timeline.kernels)
        assert sum(row["us"] for row in rows) == pytest.approx(sum(k.us for k in timeline.kernels))
        moved = sum(op.bytes for op in ops) / 1e6
        assert sum(row["megabytes"] for row in rows) == pytest.approx(moved, abs=0.01)


def test_a_kernel_launched_ahead_has_less_time_of_its_own():
    """The product starts while the norm runs, which takes until 4: 9 of its 11 us are its own."""
    times = [("_rms_norm_kernel", 0, 4), ("nvjet_tst_64x8", 2, 11)]
    timeline = timeline_of(toy("rms_norm", "linear"), [span("kernel", *t) for t in times])
    assert timeline.path == {0: 0.0, 1: -2.0}
    assert {row["name"]: row["us"] for row in timeline.by_op()} == {"rms_norm": 4, "linear": 9}
    norm, product = timeline.rows(range(2))
    assert [own_us(norm), own_us(product)] == [4, 9]
    assert product["share"] == timeline.share(10**6, 9)


def toy(*names):
    return [LoggedOp(name, "LoRA", name, 10**6) for name in names]


def test_a_long_branch_is_on_the_path():
    ops = toy("rms_norm", "sgemm_a", "linear", "sgemm_b")
    times = [("_rms_norm_kernel", 0, 2), ("_sgemm_a_kernel", 2.5, 50.5), ("nvjet_tst_64x8", 3, 40)]
    times.append(("_sgemm_b_kernel", 54, 2))
    timeline = timeline_of(ops, [span("kernel", *time, correlation=1) for time in times])
    assert timeline.path == {0: 0.0, 1: 0.5, 3: 1.0}
    assert timeline.path_sums()["beside_us"] == 40
    row = timeline.rows(range(1, 2))[0]
    assert row["lane"] == 1
    assert row["share"] == pytest.approx(1e6 / 50.5e-6 / BANDWIDTH, abs=1e-3)


def test_overlapping_kernels_give_overlaps_not_gaps():
    ops = toy("rms_norm", "linear")
    times = [("_rms_norm_kernel", 0, 4), ("nvjet_tst_64x8", 3, 40)]
    timeline = timeline_of(ops, [span("kernel", *time, correlation=1) for time in times])
    assert timeline.path == {0: 0.0, 1: -1.0}
    assert timeline.path_sums()["overlaps_us"] == 1


def test_kernels_that_eager_runs_lack_are_matched_by_order_or_named():
    ops = toy("rms_norm", "linear", "sgemm_b")
    replay = replay_events(ops)
    replay[1]["name"] = "another_gemm"
    assert timeline_of(ops, replay).kernels[1].op == 1
    replay.append(span("gpu_memset", "Memset (Device)", 5060, 0.2, correlation=5))
    timeline = timeline_of(ops, replay)
    assert [kernel.op for kernel in timeline.kernels] == [0, None, 2, None]
    assert unmatched(timeline.kernels) == ["Memset (Device)", "another_gemm"]
    assert [row["op"] for row in timeline.rows(range(3))] == ["rms_norm", "?", "sgemm_b", "?"]


def test_kernels_without_an_api_call_take_the_op_of_their_external_id():
    events = [
        span("user_annotation", "step op 0", 0, 10),
        span("user_annotation", "step op 1", 10, 10),
        span("cpu_op", "encore::linear", 11, 5, **{"External id": 9}),
        span("kernel", "gemm", 40, 5, correlation=3, stream=MAIN, **{"External id": 9}),
        span("kernel", "stray", 50, 5, correlation=4, stream=SIDE),
    ]
    found = launches(DeviceTrace.from_events(events))
    assert found == [Launch("gemm", 1, MAIN), Launch("stray", None, SIDE)]


def test_replays_are_told_apart():
    ops = toy("rms_norm", "linear")
    events = [
        event for n in range(4) for event in replay_events(ops, correlation=n, start=100.0 * n)
    ]
    kernels = DeviceTrace.from_events(events[1:]).kernels  # the first replay's start is lost
    assert [len(replay) for replay in replays_of(kernels, 4)] == [2, 2, 2]
    for number, event in enumerate(events):
        event["args"]["correlation"] = number
    kernels = DeviceTrace.from_events(events).kernels
    assert [len(replay) for replay in replays_of(kernels, 4)] == [2] * 4
    with pytest.raises(SystemExit, match="8 kernels are not those of 3"):
        replays_of(kernels, 3)
    assert busy_us(kernels) == 4 * (2 + 40)


def test_names_are_shortened():
    assert short_name("void cutlass::Kernel2<cutlass_80_wmma, 3>(Params)") == "cutlass::Kernel2"
    assert short_name("_sgemm_a_kernel") == "_sgemm_a_kernel"
    assert len(short_name("x" * 99)) == 48


def test_tables_and_a_result_read_back(ops, tmp_path, capsys):
    result = as_result(timeline_of(ops))
    log = tmp_path / "log"
    log.write_text("a table\n" + json.dumps(result) + "\n")
    assert step.read_result(log) == result
    step.print_tables(result)
    printed = capsys.readouterr().out
    assert f"layer 2 of {DENSE['num_hidden_layers']}" in printed
    assert "critical path" in printed
    log.write_text('{"benchmark": "decode"}')
    with pytest.raises(SystemExit, match="no result of"):
        step.read_result(log)


def test_a_picture_from_a_result(ops, tmp_path, monkeypatch, capsys):
    written, picture = tmp_path / "step.json", tmp_path / "step.png"
    written.write_text(json.dumps(as_result(timeline_of(ops)), indent=1))
    arguments = ["step", "--from", str(written), "--picture", str(picture)]
    monkeypatch.setattr("sys.argv", arguments)
    if not HAS_MATPLOTLIB:
        with pytest.raises(SystemExit, match="pip install matplotlib"):
            step.main()
        pytest.skip("no matplotlib")
    step.main()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["benchmark"] == "step"
    for wrong, said in ((picture.with_suffix(".foo"), "png"), (tmp_path / "no/a.png", "no such")):
        monkeypatch.setattr("sys.argv", ["step", "--picture", str(wrong)])
        with pytest.raises(SystemExit, match=said):  # before it asks for a GPU
            step.main()
