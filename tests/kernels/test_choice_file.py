"""The file of measured choices: what is read back, and what goes wrong without harm."""

import json
import logging
import multiprocessing
from dataclasses import replace

import pytest
import torch

from kernels.choice_file import ChoiceFile
from kernels.linear_choice import candidates
from kernels.linear_config import H200, Product

PRODUCT = Product(16, 4096, 4096, torch.bfloat16)
OTHER = replace(PRODUCT, rows=32)
ACCEPTED = {product: candidates(product, H200, True) for product in (PRODUCT, OTHER)}
QUICK, SLOW = ACCEPTED[PRODUCT][:2]


def open_file(directory, card="NVIDIA H200", **stamp: str) -> ChoiceFile:
    return ChoiceFile(directory, card, {"torch": "1", "triton": "2", "kernel": "ab"} | stamp)


def test_a_file_of_its_own_for_every_card(tmp_path):
    assert open_file(tmp_path).path == tmp_path / "linear-NVIDIA-H200.json"
    odd = open_file(tmp_path, "../a/b (c) 1.2")
    assert odd.path.parent == tmp_path
    odd.add(ACCEPTED, {PRODUCT: QUICK})
    assert odd.read(ACCEPTED) == {PRODUCT: QUICK}
    assert open_file(tmp_path).read(ACCEPTED) == {}


def test_what_was_added_is_read(tmp_path):
    directory = tmp_path / "not" / "there"
    assert open_file(directory).read(ACCEPTED) == {}
    assert open_file(directory).add(ACCEPTED, {PRODUCT: QUICK}) == {PRODUCT: QUICK}
    assert open_file(directory).add(ACCEPTED, {OTHER: None}) == {OTHER: None}
    assert open_file(directory).read(ACCEPTED) == {PRODUCT: QUICK, OTHER: None}
    assert open_file(directory).read({OTHER: ACCEPTED[OTHER]}) == {OTHER: None}
    assert open_file(directory).read({OTHER: []}) == {}, "an entry of its own without partials"
    others = [config for config in ACCEPTED[PRODUCT] if config != QUICK]
    assert open_file(directory).read({PRODUCT: others}) == {}
    names = {path.name for path in directory.iterdir()}
    assert names == {"linear-NVIDIA-H200.json", "linear-NVIDIA-H200.lock"}


@pytest.mark.parametrize("changed", ["torch", "triton", "kernel"])
def test_of_other_versions_nothing_is_read(tmp_path, changed):
    open_file(tmp_path).add(ACCEPTED, {PRODUCT: QUICK, OTHER: None})
    newer = open_file(tmp_path, **{changed: "new"})
    assert newer.read(ACCEPTED) == {}
    newer.add(ACCEPTED, {PRODUCT: SLOW})
    assert newer.read(ACCEPTED) == {PRODUCT: SLOW}
    assert open_file(tmp_path).read(ACCEPTED) == {}


def broken_contents() -> dict[str, bytes]:
    entry = {"block_m": 16, "block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 9}
    stamp = {"card": "NVIDIA H200", "torch": "1", "triton": "2", "kernel": "ab"}
    key = "16 x 4096 x 4096 bfloat16 in partials"

    def of(choices: object) -> bytes:
        return json.dumps({"stamp": stamp, "choices": choices}).encode()

    return {
        "empty": b"",
        "cut": of({key: None})[:-9],
        "not text": b"\xff\xfe\x00",
        "deep": b"[" * 100_000,
        "list": b"[]",
        "no choices": json.dumps({"stamp": stamp}).encode(),
        "choices are a list": of([key]),
        "too many stages": of({key: entry}),
        "no configuration": of({key: "library"}),
        "number": of({key: 0}),
    }


@pytest.mark.parametrize("name", broken_contents())
def test_a_broken_file_is_ignored_and_rewritten(tmp_path, name, caplog):
    file = open_file(tmp_path)
    file.path.write_bytes(broken_contents()[name])
    assert file.read(ACCEPTED) == {}
    assert file.add(ACCEPTED, {PRODUCT: QUICK}) == {PRODUCT: QUICK}
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{file.path} is ignored: ")
    assert open_file(tmp_path).read(ACCEPTED) == {PRODUCT: QUICK}
    assert len(caplog.messages) == 1


def test_a_missing_file_is_nothing_to_warn_of(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    open_file(tmp_path / "new").add(ACCEPTED, {PRODUCT: QUICK})
    assert not caplog.messages


def test_a_file_of_another_card_or_version_is_said_in_the_log(tmp_path, caplog):
    open_file(tmp_path, "Card 1").add(ACCEPTED, {PRODUCT: QUICK})
    (tmp_path / "linear-Card-1.json").rename(tmp_path / "linear-Card-2.json")
    assert open_file(tmp_path, "Card 2").read(ACCEPTED) == {}
    assert "Card 1" in caplog.text
    open_file(tmp_path, "Card 2").add(ACCEPTED, {PRODUCT: SLOW})
    caplog.clear()
    assert open_file(tmp_path, "Card 2", torch="2.x").read(ACCEPTED) == {}
    assert "'torch': '1'" in caplog.text


def test_the_contents_of_a_broken_file_would_be_read_if_they_were_right(tmp_path):
    file = open_file(tmp_path)
    file.path.write_bytes(broken_contents()["number"].replace(b": 0}", b": null}"))
    assert file.read(ACCEPTED) == {PRODUCT: None}


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path, monkeypatch, caplog):
    choices = {PRODUCT: QUICK}
    assert open_file(None).add(ACCEPTED, choices) == choices
    assert open_file(None).read(ACCEPTED) == {}
    assert not caplog.messages
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        assert open_file(directory).add(ACCEPTED, choices) == choices
        assert open_file(directory).read(ACCEPTED) == {}
    assert [text.split(" cannot be written")[1] != "" for text in caplog.messages] == [True] * 2
    (tmp_path / "taken" / "linear-NVIDIA-H200.json").mkdir(parents=True)
    assert open_file(tmp_path / "taken").add(ACCEPTED, choices) == choices
    assert not list((tmp_path / "taken").glob("*.tmp"))

    def refuse(*arguments, **keywords):
        raise PermissionError("read-only")

    open_file(tmp_path).add(ACCEPTED, {PRODUCT: SLOW})
    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    assert open_file(tmp_path).add(ACCEPTED, {OTHER: None}) == {OTHER: None}
    assert open_file(tmp_path).read(ACCEPTED) == {PRODUCT: SLOW}


def test_the_first_of_two_that_measured_is_right(tmp_path):
    first, second = open_file(tmp_path), open_file(tmp_path)
    assert second.read(ACCEPTED) == {}
    first.add(ACCEPTED, {PRODUCT: QUICK})
    assert second.add(ACCEPTED, {PRODUCT: SLOW, OTHER: None}) == {PRODUCT: QUICK, OTHER: None}
    assert first.read(ACCEPTED) == {PRODUCT: QUICK, OTHER: None}


def _add_many(directory, index, barrier, found):
    barrier.wait()
    config = ACCEPTED[PRODUCT][index]
    for width in range(4096, 4096 + 10 * 64, 64):
        own = replace(PRODUCT, out_features=width, in_features=64 * (index + 1))
        open_file(directory).add({own: []}, {own: None})
    found.put(open_file(directory).add(ACCEPTED, {PRODUCT: config})[PRODUCT])


def test_processes_that_write_at_once_lose_nothing_and_agree(tmp_path):
    context, count = multiprocessing.get_context("fork"), 4
    barrier, found = context.Barrier(count), context.Queue()
    processes = [
        context.Process(target=_add_many, args=(tmp_path, index, barrier, found))
        for index in range(count)
    ]
    for process in processes:
        process.start()
    agreed = {found.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(agreed) == 1
    file = open_file(tmp_path)
    assert file.read(ACCEPTED) == {PRODUCT: agreed.pop()}
    assert len(json.loads(file.path.read_text())["choices"]) == 10 * count + 1
    assert not list(tmp_path.glob("*.tmp"))
