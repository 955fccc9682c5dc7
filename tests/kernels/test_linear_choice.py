"""The measured choice of the base product: what is tried, what is taken, and that it stays."""

import logging
from dataclasses import replace

import pytest
import torch

from kernels.choice_file import ChoiceFile
from kernels.linear import launch_linear
from kernels.linear_choice import (
    KERNEL_GAIN,
    READ_BANDWIDTH,
    ROUNDS,
    TILES_GAIN,
    ShapeWeights,
    best,
    candidates,
    ruled,
    settle,
)
from kernels.linear_config import (
    H200,
    HOPPER,
    LINEAR_TABLE,
    MAX_ROWS,
    LinearConfig,
    LinearTable,
    Product,
    linear_config,
    row_bucket,
    tiles_for,
)
from tests.kernels.cross_compile import compile_launches
from tests.kernels.made_up_timer import MadeUpTimer, shape_weights

BF16 = torch.bfloat16
CARD = replace(H200, name="A card")
STAMP = {"torch": "1"}
OUTPUT = Product(16, 4096, 4096, BF16)
NARROW = LinearConfig(16, 32, 128, 4, 6)
SHORT = replace(NARROW, num_stages=4)
SPLIT = replace(NARROW, splits=4)
SHAPES = {(6144, 4096): False, (4096, 4096): True, (28672, 4096): False, (4096, 14336): True}
"""Of an 8B model's layer, and whether partials are taken."""


def choice_file(directory, **stamp: str) -> ChoiceFile:
    return ChoiceFile(directory, CARD.name, STAMP | stamp)


def settled(file, timer, shapes=None, rows=(8,), table=None) -> LinearTable:
    table = table or LinearTable()
    settle(shapes or [shape_weights()], rows, CARD, file, timer, table)
    return table


def chosen(table: LinearTable, rows: int = 16, shape: ShapeWeights | None = None):
    return table.choice(CARD, (shape or shape_weights()).product(rows))


def fastest(config: LinearConfig | None):
    return lambda other: 1.0 if other == config else 2.0


def test_numbers_of_rows_share_choices():
    found = [row_bucket(count) for count in (1, 2, 16, 17, 32, 33, 64, 65, 128, 129)]
    assert found == [1, 16, 16, 32, 32, 64, 64, 128, 128, None]


def test_what_was_asked_for_never_changes():
    table, product = LinearTable(), OUTPUT
    assert table.choice(CARD, product) == tiles_for(16, 4096, 4096, CARD)
    table.settle(CARD, {product: NARROW})
    assert table.choice(CARD, product) == tiles_for(16, 4096, 4096, CARD)
    other = replace(CARD, name="Another card")
    table.settle(other, {product: NARROW})
    table.settle(other, {product: None})
    assert table.choice(other, product) == NARROW


def test_the_configuration_is_the_tables(monkeypatch):
    product = Product(16, 4096, 4096, BF16)
    monkeypatch.setattr(LINEAR_TABLE, "_choices", {(H200, product): NARROW})
    linear_config.cache_clear()
    device = torch.device("cpu")
    assert linear_config(5, 4096, 4096, BF16, device) == NARROW
    assert linear_config(17, 4096, 4096, BF16, device) == tiles_for(17, 4096, 4096, H200)
    assert linear_config(129, 4096, 4096, BF16, device) is None
    linear_config.cache_clear()


@pytest.mark.parametrize("takes_partials", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 64, 128])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (2048, 2048), (128256, 4096)])
def test_candidates_run_on_the_card(shape, rows, takes_partials):
    product = Product(rows, *shape, BF16)
    found = candidates(product, H200, takes_partials)
    assert len(found) == len(set(found))
    assert len(found) >= 2 or rows > MAX_ROWS
    for config in found:
        assert config.block_m == max(16, rows)
        assert config.shared_bytes <= H200.shared_bytes
        assert shape[1] % (config.splits * config.block_k) == 0
        assert takes_partials or config.splits == 1
    rule = ruled(product, H200, takes_partials)
    assert rule is None or found[0] == rule
    if rows > MAX_ROWS and shape == (4096, 14336):
        assert (rule is None) == (not takes_partials)


def test_there_are_no_candidates_where_the_kernel_does_not_run():
    assert not candidates(OUTPUT, replace(H200, capability=(8, 9)), True)
    assert not candidates(replace(OUTPUT, in_features=4092), H200, True)


@pytest.mark.parametrize("rows", [16, 128])
def test_candidates_compile(rows):
    for config in candidates(Product(rows, 2048, 2048, BF16), H200, True):
        x, weight = torch.empty(rows, 2048, dtype=BF16), torch.empty(2048, 2048, dtype=BF16)
        out = torch.empty(rows, 2048, dtype=BF16)
        if config.splits > 1:
            out = torch.empty(config.splits, rows, 2048)
        assert compile_launches(launch_linear, config, x, weight, None, out) == 1


@pytest.mark.parametrize(
    ("library", "own", "taken"),
    [
        (1.0, {NARROW: 1.0 * KERNEL_GAIN * 0.999}, NARROW),
        (1.0, {NARROW: 1.0 * KERNEL_GAIN * 1.001}, None),
        (1.0, {NARROW: 1.0, SHORT: 0.9}, SHORT),
        (1.0, {NARROW: TILES_GAIN * 0.999, SHORT: 1.0}, NARROW),
        (1.0, {NARROW: TILES_GAIN * 1.001, SHORT: 1.0}, SHORT),
        (0.8, {NARROW: 1.0, SHORT: 0.87}, SHORT),
        (1.0, {SHORT: 1.05}, SHORT),  # the rule's does not run
        (1.0, {}, None),
    ],
)
def test_what_is_not_the_rules_must_be_clearly_faster(library, own, taken):
    assert best(OUTPUT, {None: library, **own}, NARROW) == taken


def test_where_the_rule_is_the_library_the_own_kernel_must_be_clearly_faster():
    assert best(OUTPUT, {None: KERNEL_GAIN * 0.999, NARROW: 1.0}, None) is None
    assert best(OUTPUT, {None: KERNEL_GAIN * 1.001, NARROW: 1.0}, None) == NARROW
    assert best(OUTPUT, {None: 1.0}, None) is None


def test_partials_pay_for_being_read():
    read = 4 * 16 * 4096 * 4 / READ_BANDWIDTH
    for rule in (SHORT, NARROW):
        gain = TILES_GAIN if rule == NARROW else 1
        times = {None: 1.0, NARROW: 1e-5}
        assert best(OUTPUT, times | {SPLIT: 1e-5 / gain - 1.01 * read}, rule) == SPLIT
        assert best(OUTPUT, times | {SPLIT: 1e-5 / gain - 0.99 * read}, rule) == NARROW


@pytest.mark.parametrize("card", [CARD, replace(CARD, capability=(10, 0))])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128])
def test_equal_times_leave_the_rule_as_it_is(rows, shape, card):
    weights = torch.empty(8, *shape, dtype=BF16, device="meta")
    given = ShapeWeights(list(weights), takes_partials=SHAPES[shape])
    product = given.product(rows)
    times = dict.fromkeys([None, *candidates(product, card, SHAPES[shape])], 40e-6)
    rule = ruled(product, card, SHAPES[shape])
    assert best(product, times, rule) == rule
    is_librarys = rows > MAX_ROWS and shape != (28672, 4096) and card.capability != HOPPER
    assert (rule is None) == is_librarys
    assert best(product, times | {None: 37.5e-6}, rule) == rule
    assert best(product, times | {None: 43e-6}, rule) == rule


def test_a_first_start_compiles_a_bounded_number_of_kernels():
    found = {
        (shape, config)
        for shape, takes_partials in {**SHAPES, (128256, 4096): False}.items()
        for rows in (1, 16, 32, 64, 128)
        for config in candidates(Product(rows, *shape, BF16), CARD, takes_partials)
    }
    assert 60 <= len(found) <= 100


@pytest.mark.parametrize("takes_partials", [False, True])
def test_every_candidate_is_timed_on_weights_of_several_layers(tmp_path, takes_partials):
    timer, shape = MadeUpTimer(), shape_weights(layers=32, takes_partials=takes_partials)
    settled(choice_file(tmp_path), timer, [shape], rows=(8, 9))
    tried = [trials[0].config for trials in timer.timed]
    assert tried == [None, *candidates(shape.product(16), CARD, takes_partials)] * ROUNDS
    for trials in timer.timed:
        assert len({trial.weight.data_ptr() for trial in trials}) == len(trials)
        assert sum(trial.weight.nbytes for trial in trials) == 16 * timer.l2_bytes
        for trial in trials:
            splits = trial.config.splits if trial.config else 1
            assert trial.x.shape == (16, 1024)
            assert trial.out.shape == ((splits, 16, 2048) if splits > 1 else (16, 2048))
            assert trial.out.dtype == (torch.float32 if splits > 1 else BF16)
            assert not trial.x.isnan().any()


def test_the_fastest_that_runs_is_taken(tmp_path):
    quick = candidates(shape_weights().product(16), CARD, False)[-1]
    assert chosen(settled(choice_file(tmp_path / "1"), MadeUpTimer(fastest(quick)))) == quick
    timer = MadeUpTimer(fastest(quick), refused=lambda config: config == quick)
    assert chosen(settled(choice_file(tmp_path / "2"), timer)) not in (quick, None)
    timer = MadeUpTimer(refused=lambda config: config is not None)
    assert chosen(settled(choice_file(tmp_path / "3"), timer)) is None


@pytest.mark.parametrize(
    "shape",
    [
        shape_weights(1024, 1024),  # 2 MB
        shape_weights(2048, 1024, layers=1),  # no more than a cache of 2 MiB holds thrice
        ShapeWeights([torch.empty(2048, 1024) for _ in range(8)]),
        shape_weights(2048, 2052),
    ],
    ids=["small", "few", "float32", "odd"],
)
def test_what_cannot_be_measured_is_left_to_the_rule(tmp_path, shape):
    timer = MadeUpTimer(l2_bytes=2**21)
    table = settled(choice_file(tmp_path), timer, [shape])
    assert not timer.timed
    assert not table.holds(CARD, shape.product(16))
    assert not list(tmp_path.iterdir())


def test_a_process_that_finds_the_file_measures_nothing(tmp_path):
    shapes = [shape_weights(takes_partials=True), shape_weights(4096, 1024)]
    quick = candidates(shapes[0].product(16), CARD, True)[-1]
    first = settled(choice_file(tmp_path), MadeUpTimer(fastest(quick)), shapes)
    again = MadeUpTimer(fastest(None))
    second = settled(choice_file(tmp_path), again, shapes)
    assert not again.timed
    for shape in shapes:
        assert chosen(first, shape=shape) == chosen(second, shape=shape)
    assert chosen(first, shape=shapes[0]) == quick
    more = settled(choice_file(tmp_path), again, shapes, rows=(1, 8))
    assert again.timed, "another number of rows is measured"
    assert chosen(more, 1, shapes[0]) is None
    assert chosen(more, 16, shapes[0]) == quick


def test_the_least_of_the_rounds_counts(tmp_path):
    """The clock rises while the first trials are timed, of which the library's is the first."""
    timer = MadeUpTimer()
    timer.times = lambda config: 3.0 if len(timer.timed) == 1 else 1.0 if config is None else 2.0
    assert chosen(settled(choice_file(tmp_path), timer)) is None


def test_models_that_take_partials_and_others_share_a_file(tmp_path):
    shapes = [shape_weights(takes_partials=takes) for takes in (True, False)]
    split = next(c for c in candidates(shapes[0].product(16), CARD, True) if c.splits == 2)
    timer = MadeUpTimer(fastest(split))
    for shape in shapes:
        settled(choice_file(tmp_path), timer, [shape])
    again = MadeUpTimer()
    choices = [chosen(settled(choice_file(tmp_path), again, [shape])) for shape in shapes]
    assert not again.timed
    assert choices == [split, ruled(shapes[1].product(16), CARD, False)]


def test_the_log_says_what_a_first_start_takes(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    settled(choice_file(tmp_path), MadeUpTimer())
    count = 1 + len(candidates(shape_weights().product(16), CARD, False))
    before, after = caplog.messages
    assert before == f"A card: timing {count} ways to compute 1 products"
    assert after.endswith(f" s, to be kept in {tmp_path / 'linear-A-card.json'}")
    caplog.clear()
    settled(choice_file(tmp_path), MadeUpTimer())
    assert not caplog.messages


def test_choices_are_those_that_were_asked_for(tmp_path):
    """Of two equal engines the second must not find what another one measured between them."""
    settled(choice_file(tmp_path), MadeUpTimer(fastest(None)), rows=(8, 40))
    table = settled(choice_file(tmp_path), MadeUpTimer(), rows=(8,))
    assert chosen(table, 64) == tiles_for(64, 2048, 1024, CARD)


def test_two_engines_of_a_process_agree_without_a_file():
    table = settled(choice_file(None), MadeUpTimer(fastest(None)))
    again = MadeUpTimer()
    settled(choice_file(None), again, table=table)
    assert not again.timed
    assert chosen(table) is None


def test_stale_choices_are_measured_again(tmp_path):
    settled(choice_file(tmp_path), MadeUpTimer(fastest(None)))
    timer = MadeUpTimer()
    assert chosen(settled(choice_file(tmp_path, torch="2"), timer)) is not None
    assert timer.timed
