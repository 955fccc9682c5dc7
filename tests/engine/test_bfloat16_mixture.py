"""bfloat16 on a GPU for a mixture of experts, by the statistic of `test_bfloat16`.

Rounding may send a token to another expert than the float32 reference does, and then its logprobs
differ by more than rounding. So positions are compared whose tokens took the same experts in every
layer, and the share of the others is printed. Routes of the engine are read while it runs the same
steps without graphs, which must give the same bits.
"""

from pathlib import Path

import pytest
import torch
import transformers

from engine import Engine, SamplingParams
from engine.outputs import RequestOutput
from kernels.moe_gemm_shrink import MAX_SHARED_PAIRS
from kernels.moe_lora_shrink import moe_shrink_split_k
from profiles.route_log import RouteLog
from tests.engine.programme import as_bits
from tests.engine.test_bfloat16 import POSITIONS
from tests.oracle import Oracle
from tests.random_adapters import ALL, save_adapter

TOKENS, LAYERS, MOST_FLIPPED = 64, 4, 0.4


def prompts_of(rows: int) -> list[list[int]]:
    return [[3 + row, 50, 60 + row] for row in range(rows)]


def routes_of(log: RouteLog, prompts: list[list[int]]) -> torch.Tensor:
    """[rows, tokens, layers, k] of the steps that drew each token: one prefill, then decode."""
    calls = [call.topk_ids.sort(dim=1).values.cpu() for call in log.calls]
    steps = [calls[i : i + LAYERS] for i in range(0, len(calls), LAYERS)]
    assert len(steps) == TOKENS, "one chunk of prefill, and nothing else between"
    prefill, *decode = (torch.stack(step, dim=1) for step in steps)
    assert prefill.shape[0] == sum(map(len, prompts))
    ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    return torch.stack([prefill[ends], *decode], dim=1)


def reference_routes(oracle: Oracle, output: RequestOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, layers, k] of the reference, and the engine's errors there."""
    routes: list[torch.Tensor] = []
    model = oracle.models[output.adapter]
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out: routes.append(out[2]))
        for layer in model.model.layers
    ]
    errors = torch.tensor(oracle.errors(output))
    for hook in hooks:
        hook.remove()
    first = len(output.prompt_token_ids) - 1
    chosen = torch.stack([layer[first:] for layer in routes], dim=1)
    return chosen.sort(dim=2).values.cpu(), errors


def save_mixture(path: Path) -> torch.nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=6,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # A router that decides plainly, as trained ones do: fewer ties for rounding to break.
            torch.nn.init.normal_(parameter, std=0.3 if "mlp.gate" in name else 0.04)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(path)
    return model.float().cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [32, 64])
def test_mixture(tmp_path, rows):
    """Pair by pair in the experts' launch, and by its blocks of pairs."""
    model = save_mixture(tmp_path / "model")
    pairs, prompts = rows * model.config.num_experts_per_tok, prompts_of(rows)
    assert (pairs > MAX_SHARED_PAIRS) == (rows == 64)
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    adapters = {
        "all": save_adapter(model, tmp_path / "all", 16, ALL, seed=1),
        "wide": save_adapter(model, tmp_path / "wide", 64, attention, seed=2),
        "some": save_adapter(
            model,
            tmp_path / "some",
            5,
            ("gate_proj", "down_proj"),
            seed=3,
            strength=6.0,
            experts=range(0, 64, 2),
        ),
        "router": save_adapter(
            model, tmp_path / "router", 8, ("gate", "up_proj"), seed=4, strength=6.0
        ),
    }
    names = [None if index % 2 else [*adapters][index // 2 % 4] for index in range(rows)]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    logs, outputs, log = [], [], RouteLog()
    for graphs in ("cuda", "off"):
        with Engine(
            tmp_path / "model",
            adapters=adapters,
            graphs=graphs,
            graph_batch_sizes=[rows],
            max_batch_size=rows,
            max_seq_len=128,
            tokenizer=None,
        ) as engine:
            if graphs == "cuda":
                outputs = engine.generate(prompts, params, names)
                assert engine.stats().replays >= TOKENS - 1
                logs.append([as_bits(o)[1:] for o in outputs])
            else:
                with log:
                    logs.append([as_bits(o)[1:] for o in engine.generate(prompts, params, names)])
    assert logs[0] == logs[1]

    oracle = Oracle(model, adapters)
    errors: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    flipped: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for output, found in zip(outputs, routes_of(log, prompts), strict=True):
        expected, every = reference_routes(oracle, output)
        same = (found == expected).flatten(1).all(dim=1)
        kind = output.adapter is not None
        errors[kind].append(every[same])
        flipped[kind].append(~same)
    alike = {kind: torch.cat(values) for kind, values in errors.items()}
    for kind, values in alike.items():
        share = torch.cat(flipped[kind]).float().mean().item()
        print(
            f"adapters={kind}: {len(values)} positions, mean {values.mean():.5f}, "
            f"p95 {values.quantile(0.95):.5f}, flipped routes {share:.1%}"
        )
        assert len(values) >= POSITIONS, (kind, len(values))
        assert share < MOST_FLIPPED
    assert alike[True].mean() <= 3 * alike[False].mean()
    assert alike[True].quantile(0.95) <= 3 * alike[False].quantile(0.95)
    for output in outputs:  # the statistic must be able to tell adapters apart
        if output.adapter is not None:
            wrong = torch.tensor(oracle.errors(output, None))
            assert wrong.mean() > 10 * alike[True].mean(), output.adapter


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
def test_few_rows_whose_sums_are_made_of_parts(tmp_path, rows):
    """As above for steps of few rows: an expert's x A^T then is in parts, added by the last one."""
    model = save_mixture(tmp_path / "model")
    config = model.config
    pairs, prompts = rows * config.num_experts_per_tok, prompts_of(rows)
    assert moe_shrink_split_k(pairs, config.hidden_size) > 1
    assert moe_shrink_split_k(pairs, config.moe_intermediate_size) > 1
    adapters = {
        "all": save_adapter(model, tmp_path / "all", 16, ALL, seed=1),
        "some": save_adapter(
            model, tmp_path / "some", 5, ("gate_proj", "down_proj"), seed=3, strength=6.0
        ),
    }
    names = [("all", "some", None)[row % 3] for row in range(rows)]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    runs, log = [], RouteLog()
    for graphs in ("cuda", "off"):
        with Engine(
            tmp_path / "model",
            adapters=adapters,
            graphs=graphs,
            graph_batch_sizes=[rows],
            max_batch_size=rows,
            max_seq_len=128,
            tokenizer=None,
        ) as engine:
            if graphs == "cuda":
                runs.append(engine.generate(prompts, params, names))
                assert engine.stats().replays >= TOKENS - 1
            else:
                with log:
                    runs.append(engine.generate(prompts, params, names))
    assert [as_bits(o)[1:] for o in runs[0]] == [as_bits(o)[1:] for o in runs[1]]
    oracle = Oracle(model, adapters)
    for output, found in zip(runs[0], routes_of(log, prompts), strict=True):
        expected, errors = reference_routes(oracle, output)
        same = (found == expected).flatten(1).all(dim=1)
        assert same.any()
        assert errors[same].mean() < 0.05, output.adapter
        if output.adapter is not None:
            wrong = torch.tensor(oracle.errors(output, None))
            assert wrong.mean() > 5 * errors[same].mean(), output.adapter
