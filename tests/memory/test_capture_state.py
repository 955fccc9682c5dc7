"""What padding rows and adapter masks are while graphs are captured, and after."""

import pytest

from memory.capture_state import CaptureState
from tests.memory.test_manager import make_manager


@pytest.fixture
def manager():
    return make_manager()


def test_warm_up_runs_an_adapter_on_every_padding_row(manager):
    state, buffers = CaptureState(manager.tables, manager.adapters), manager.step_buffers(4)
    with state.synthetic():
        state.stage(buffers)
        assert buffers.adapter_enabled.tolist() == [1, 1]
        assert buffers.row_request.tolist() == [4] * 4
        assert manager.tables.adapter_slots.tolist() == [-1, -1, -1, -1, 0]
        assert manager.adapters.tables.linear.lora_ranks.any()
    assert manager.tables.adapter_slots.tolist() == [-1] * 5
    assert not manager.adapters.tables.linear.lora_ranks.any()
    state.stage(buffers)
    assert buffers.adapter_enabled.tolist() == [0, 0]


def test_recording_sees_every_mask_zeroed(manager):
    state, buffers = CaptureState(manager.tables, manager.adapters), manager.step_buffers(2)
    manager.step_buffers(4).inputs.fill_(77)
    with state.zeroed():
        state.stage(buffers)
        assert buffers.adapter_enabled.tolist() == [0, 0]
        assert buffers.row_request.tolist() == [4, 4]
        assert not manager.adapters.tables.linear.lora_ranks.any()


def test_a_failed_warm_up_leaves_no_adapter_on_the_dummy(manager):
    state = CaptureState(manager.tables, manager.adapters)
    with pytest.raises(RuntimeError, match="kernel"), state.synthetic():
        raise RuntimeError("kernel")
    assert manager.tables.adapter_slots.tolist() == [-1] * 5
    assert not manager.adapters.tables.linear.lora_ranks.any()


def test_without_slots_padding_rows_stay_base():
    manager = make_manager(max_loras=0)
    state, buffers = CaptureState(manager.tables, manager.adapters), manager.step_buffers(2)
    with state.synthetic():
        state.stage(buffers)
        assert manager.tables.adapter_slots.tolist() == [-1] * 5
