"""adapter_config.json of a PEFT LoRA adapter: each module's rank, scaling, and whether it counts.

Every key is classed: it has no effect on serving, it is read here, or it must be off because what
it turns on is more than `W + scaling · B A`. A key nobody knows must be off too. Knows nothing of
tensors. Meanings, defaults and the matching of patterns are those of PEFT 0.21.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import AdapterError
from engine.json_file import read_json
from engine.shown import shown

CONFIG_NAME = "adapter_config.json"
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
MAX_RANK = 2**31 - 1

READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "peft_version",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "use_rslora",
    }
)

# Provenance, training-only settings, and settings of an initialisation or a feature that is judged
# by another key. `fan_in_fan_out` tells how the base stores its weight; A and B do not change.
IGNORED = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)

MUST_BE_OFF = {
    "alora_invocation_tokens": "activated LoRA adapts a part of the tokens only",
    "arrow_config": "Arrow routes every token between adapters",
    "kasa_config": "KaSA changes the base weights and adds a diagonal",
    "layer_replication": "it changes the base model's layers",
    "lora_bias": "biases on lora_B are not served",
    "megatron_config": "Megatron's parallel layers are not served",
    "modules_to_save": "whole modules beside the LoRA factors are not served",
    "monteclora_config": "MonteCLoRA stores a sampler beside the LoRA factors",
    "trainable_token_indices": "embedding rows that replace the base's are not served",
    "use_bdlora": "block-diagonal factors are not served",
    "use_dora": "DoRA rescales the base weights",
    "use_qalora": "QA-LoRA pools the input",
    "velora_config": "VeLoRA stores a projection beside the LoRA factors",
}

# Initialisations that leave the base weights alone. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA replace
# them, so their adapters fit only the replaced base; once PEFT has converted one, it says `true`.
BASE_PRESERVING_INITS = ("gaussian", "eva", "orthogonal", "mica")

FIRST_UNSWAPPED = (0, 19, 1)
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})(?![0-9])")

Number = TypeVar("Number", int, float)


def is_off(value: Any) -> bool:
    """Whether a key with this value turns nothing on: null, false or empty."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


@dataclass(frozen=True)
class AdapterConfig:
    """What a config says about modules. `path` arguments are module paths as PEFT sees them:
    `model.layers.0.self_attn.q_proj`."""

    file: Path
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    target_modules: str | tuple[str, ...] | None
    exclude_modules: str | tuple[str, ...] | None
    layers_to_transform: frozenset[int] | None
    target_parameters: tuple[str, ...]
    peft_version: str | None

    @classmethod
    def read(cls, file: Path) -> "AdapterConfig":
        """Parse and check a config; AdapterError names the file and the key at fault."""
        return _ConfigReader(file).config()

    def rank_of(self, path: str) -> int:
        """The rank that a module was trained with."""
        return _first_match(self.rank_pattern, path, self.rank)

    def scaling_of(self, path: str) -> float:
        """`alpha / rank` of a module, or `alpha / sqrt(rank)` with rsLoRA."""
        rank = self.rank_of(path)
        alpha = _first_match(self.alpha_pattern, path, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, path: str, layer: int) -> bool:
        """Whether PEFT would put LoRA on this module (true where the config names no targets)."""
        if self.excludes(path):
            return False
        if self.target_modules is None or self.target_modules == "all-linear":
            return True
        if not _names(self.target_modules, path):
            return False
        return self.layers_to_transform is None or layer in self.layers_to_transform

    def excludes(self, path: str) -> bool:
        return _names(self.exclude_modules or (), path)

    def parameters_naming(self, path: str) -> list[str]:
        """By which of target_parameters PEFT would put LoRA on one; no key excludes parameters."""
        return [name for name in self.target_parameters if _names((name,), path)]

    def targets_parameter(self, path: str) -> bool:
        return bool(self.parameters_naming(path))

    @property
    def swaps_expert_features(self) -> bool | None:
        """Whether the PEFT that wrote this took `[E, out, in]` parameters for `[E, in, out]`, as
        all releases up to 0.19.0 did; None where no version tells."""
        match = _VERSION.match(self.peft_version or "")
        if match is None:
            return None
        version = tuple(int(part) for part in match.groups())
        if version == FIRST_UNSWAPPED and self.peft_version != match[0]:
            return None  # a development version of before or after the change
        return version < FIRST_UNSWAPPED


def _first_match(pattern: Mapping[str, Number], path: str, default: Number) -> Number:
    """The value of the first key that is a regular expression for the path or its last parts."""
    for key, value in pattern.items():
        if re.match(_ending_with(key), path):
            return value
    return default


def _ending_with(pattern: str) -> str:
    """The expression for a pattern or, from a dot on, for the last parts of a path."""
    return rf"(.*\.)?({pattern})$"


def _names(modules: str | tuple[str, ...], path: str) -> bool:
    """A string is an expression for the whole path; a list holds paths or their last parts."""
    if isinstance(modules, str):
        return re.fullmatch(modules, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in modules)


class _ConfigReader:
    """Takes the keys of one file, each with the check of its type and range."""

    def __init__(self, file: Path):
        self.file = file
        try:
            content = read_json(file)
        except FileNotFoundError:
            raise AdapterError(f"{file} does not exist; a PEFT adapter has one") from None
        except (OSError, ValueError) as error:
            raise AdapterError(f"{file} cannot be read as JSON: {error}") from error
        if not isinstance(content, dict):
            raise AdapterError(f"{file} holds a {type(content).__name__}; accepted: a JSON object")
        self.content = content

    def config(self) -> AdapterConfig:
        self._check_keys()
        return AdapterConfig(
            file=self.file,
            rank=self._rank("r", self.content.get("r", 8)),
            alpha=self._alpha("lora_alpha", self.content.get("lora_alpha", 8)),
            rank_pattern=self._pattern("rank_pattern", self._rank),
            alpha_pattern=self._pattern("alpha_pattern", self._alpha),
            use_rslora=self._use_rslora(),
            target_modules=self._modules("target_modules"),
            exclude_modules=self._modules("exclude_modules"),
            layers_to_transform=self._layers(),
            target_parameters=self._parameters(),
            peft_version=self._peft_version(),
        )

    def _refuse(self, key: str, value: Any, accepted: str) -> AdapterError:
        found = json.dumps(value) if value is None or isinstance(value, bool) else shown(value)
        return AdapterError(f"{self.file}: {key} is {found}; accepted: {accepted}")

    def _check_keys(self) -> None:
        kind = self.content.get("peft_type")
        if kind != "LORA":
            raise self._refuse("peft_type", kind, '"LORA"')
        for key, value in self.content.items():
            if key in READ or key in IGNORED or is_off(value):
                continue
            reason = MUST_BE_OFF.get(key, "this key is unknown and may change what is computed")
            raise self._refuse(key, value, f"null, false or empty ({reason})")
        bias = self.content.get("bias")
        if bias != "none" and not is_off(bias):
            raise self._refuse("bias", bias, '"none" (trained biases are not served)')
        init = self.content.get("init_lora_weights", True)
        known = isinstance(init, bool) or init is None or init in BASE_PRESERVING_INITS
        if not known:
            accepted = ", ".join(["true", "false", *map(json.dumps, BASE_PRESERVING_INITS)])
            reason = "others may change the base weights; convert the adapter to plain LoRA"
            raise self._refuse("init_lora_weights", init, f"{accepted} ({reason})")

    def _rank(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_RANK:
            raise self._refuse(key, value, f"an integer from 1 to {MAX_RANK}")
        return value

    def _alpha(self, key: str, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) <= FLOAT32_MAX:  # NaN compares false
            raise self._refuse(key, value, "a finite number of float32")
        return float(value)

    def _pattern(self, key: str, check: Callable[[str, Any], Number]) -> dict[str, Number]:
        patterns = self.content.get(key) or {}
        if not isinstance(patterns, dict):
            raise self._refuse(key, patterns, "an object of module patterns")
        for pattern in patterns:
            self._expression(key, pattern, _ending_with(pattern))
        return {
            pattern: check(f"{key}[{json.dumps(pattern)}]", value)
            for pattern, value in patterns.items()
        }

    def _expression(self, key: str, pattern: str, whole: str) -> None:
        """Refuse a pattern if `whole`, the expression made from it, is none."""
        try:
            re.compile(whole)
        except (re.error, OverflowError, RecursionError) as error:
            raise self._refuse(key, pattern, f"regular expressions ({error})") from error

    def _use_rslora(self) -> bool:
        value = self.content.get("use_rslora")
        if value is not None and not isinstance(value, bool):
            raise self._refuse("use_rslora", value, "true or false")
        return bool(value)

    def _modules(self, key: str) -> str | tuple[str, ...] | None:
        value = self.content.get(key)
        if isinstance(value, str):
            self._expression(key, value, value)
            return value
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._refuse(key, value, "a list of module names, one expression, or null")
        return tuple(value)

    def _parameters(self) -> tuple[str, ...]:
        value = self.content.get("target_parameters") or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._refuse("target_parameters", value, "a list of parameter names, or null")
        return tuple(value)

    def _peft_version(self) -> str | None:
        value = self.content.get("peft_version")
        return value if isinstance(value, str) else None

    def _layers(self) -> frozenset[int] | None:
        value = self.content.get("layers_to_transform")
        if value is None or value == []:
            return None
        layers = value if isinstance(value, list) else [value]
        if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
            raise self._refuse("layers_to_transform", value, "a layer, a list of layers, or null")
        return frozenset(layers)
