"""Uploads: values arrive at the start of their destination, buffers in turn, nothing else moves."""

import pytest
import torch

from memory.staging import StagingRing


def test_values_arrive_and_the_rest_is_untouched():
    ring = StagingRing(6, torch.device("cpu"))
    destination = torch.full((8,), -7, dtype=torch.int32)
    ring.upload([1, -2, 2**31 - 1], destination)
    assert destination.tolist() == [1, -2, 2**31 - 1, -7, -7, -7, -7, -7]
    ring.upload(torch.tensor([9, 8], dtype=torch.int32), destination)
    assert destination.tolist()[:4] == [9, 8, 2**31 - 1, -7]
    assert ring.copies == 2


def test_too_many_values_are_refused():
    ring = StagingRing(2, torch.device("cpu"))
    with pytest.raises(AssertionError):
        ring.upload([1, 2, 3], torch.zeros(8, dtype=torch.int32))
    assert ring.copies == 0


def test_what_does_not_fit_int32_is_refused():
    ring = StagingRing(2, torch.device("cpu"))
    with pytest.raises((RuntimeError, OverflowError)):
        ring.upload([2**31], torch.zeros(2, dtype=torch.int32))


@pytest.mark.gpu
def test_on_the_gpu_a_buffer_in_flight_is_not_overwritten():
    ring = StagingRing(1000, torch.device("cuda"))
    destinations = [torch.zeros(1000, dtype=torch.int32, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    for index, destination in enumerate(destinations):
        ring.upload([index] * 1000, destination)
    assert [d.unique().tolist() for d in destinations] == [[index] for index in range(8)]
