"""Adapters on some of a mixture's experts, in the slot that one on all of them has just left.

An expert that an adapter does not have adds nothing, whatever the slot held for it before.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from profiles.route_log import RouteLog
from tests.engine.adapted_model import AdaptedModel, greedy, prompt_of
from tests.engine.backends import BACKENDS
from tests.engine.programme import as_bits

MLP = ("gate_proj", "up_proj", "down_proj")
PRESENT = (0, 2, 5)
# The fewer of the experts an adapter has, the more each must do to be seen.
STRENGTH = {"mixtral": 3.0, "qwen2_moe": 12.0, "qwen3_moe": 20.0, "olmoe": 12.0}
STYLES = [
    pytest.param(("mixtral", "block_sparse_moe.experts.4.w1"), id="mixtral"),
    pytest.param(("mixtral", "mlp.experts.4.w1"), id="mixtral-5"),
    pytest.param(("qwen2_moe", "mlp.experts.4.gate_proj"), id="qwen2_moe"),
    pytest.param(("qwen3_moe", "mlp.experts.4.gate_proj"), id="qwen3_moe"),
    pytest.param(("olmoe", "mlp.experts.4.gate_proj"), id="olmoe"),
]
NAMES_OF_TURNS = [["full", None, "full"], ["few", None, "few"], ["full", None, "full"]]


def routes_of(engine, output):
    """int32 [layers, tokens, k]: the engine's routes for a finished request's tokens, all of
    which it takes as a prompt."""
    token_ids = output.prompt_token_ids + output.outputs[0].token_ids
    with RouteLog() as log:  # of what runs from Python, which prefill does
        engine.generate(token_ids, greedy(1), output.adapter)
    return torch.stack([call.topk_ids for call in log.calls]).cpu()


def rename(path, old, new):
    file = path / "adapter_model.safetensors"
    save_file({key.replace(old, new): t for key, t in load_file(file).items()}, file)


@pytest.fixture(params=STYLES)
def mixture(request, tmp_path):
    name, key = request.param
    strength = STRENGTH[name]
    adapters = {
        "full": {"rank": 8, "targets": MLP, "strength": strength},
        "few": {"rank": 5, "targets": MLP, "strength": 2 * strength, "experts": PRESENT},
    }
    model = AdaptedModel.make(name, tmp_path, adapters)
    for path in model.adapters.values():
        rename(path, "mlp.experts" if "block" in key else "block_sparse_moe", key.split(".")[0])
    keys = load_file(model.adapters["full"] / "adapter_model.safetensors")
    assert any(f"layers.2.{key}.lora_A" in name for name in keys), "the family's own names"
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_absent_experts_add_nothing_after_an_adapter_that_had_them(mixture, backend):
    """Also once the pairs of a prompt are grouped, and where all of them are of absent experts."""
    prompts = [prompt_of(9 + row, row) for row in range(3)]
    options = {"max_loras": 1, "graph_batch_sizes": [1, 3], "prefill_chunk_tokens": 128}
    turns = []
    with mixture.engine(backend, **options) as engine:
        for names in NAMES_OF_TURNS:
            outputs = engine.generate(prompts, greedy(20, ignore_eos=True), names)
            for output in outputs:
                mixture.oracle.check(output, backend.tolerance)
            turns.append([as_bits(output)[1:] for output in outputs])
            if "few" in names:
                routes = routes_of(engine, outputs[0])
        assert engine.stats().adapter_evictions == len(NAMES_OF_TURNS) - 1
    assert turns[0] == turns[2]
    assert turns[0][1] == turns[1][1], "the base row does not see which adapter has the slot"
    is_present = torch.isin(routes, torch.tensor(PRESENT))  # [layers, tokens, k]
    decoded = is_present[:, len(prompts[0]) :]
    assert (~decoded).any((0, 2)).all(), "every decoded token took an expert that is absent"
    assert decoded.any(), "and some took one that is there"
