"""LoRA's factors inside a PEFT model, by the name of the module they adapt: W x + s B A x."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.library_types import LanguageModel, LoraConfig


@dataclass(frozen=True)
class LoraLayer:
    """One adapted linear module."""

    name: str  # of the module in the base model, as in its checkpoint without `.weight`
    module: Any  # PEFT's layer around it
    adapter: str  # the adapter's name in that layer

    @property
    def A(self) -> nn.Parameter:  # noqa: N802  (as in the formula)
        """r x d_in."""
        return cast("nn.Parameter", self.module.lora_A[self.adapter].weight)

    @property
    def B(self) -> nn.Parameter:  # noqa: N802
        """d_out x r."""
        return cast("nn.Parameter", self.module.lora_B[self.adapter].weight)

    @property
    def scaling(self) -> float:
        """s = lora_alpha / r (with rsLoRA / sqrt(r))."""
        return float(self.module.scaling[self.adapter])

    @property
    def base_weight(self) -> Tensor:
        """W, d_out x d_in."""
        return cast("Tensor", self.module.get_base_layer().weight.detach())


def lora_layers(model: LanguageModel, *, defense: str) -> list[LoraLayer]:
    """Every adapted module of a model that trains one plain LoRA adapter on linear layers, sorted by name."""

    def refused(what: str, remedy: str) -> UnsupportedError:
        return UnsupportedError(f"defense {defense!r} works on plain LoRA; {what}", remedy=remedy)

    configs = getattr(model, "peft_config", None) or {}
    if len(configs) != 1:
        found = "several adapters" if configs else "no adapter"
        raise refused(f"the model has {found}", "train with one LoRA adapter (lora: {r: 32, ...})")
    adapter, config = next(iter(configs.items()))
    if more := _besides_plain(config):
        raise refused(f"this adapter has {', '.join(more)}", "use a plain LoRA adapter on linear modules")
    layers = []
    for path, module in model.named_modules():
        if other := next((name for name, there in _forms(module, adapter).items() if there), None):
            raise refused(f"the adapted module {path} {other}", "use a plain, unmerged LoRA adapter on linear modules")
        if adapter in getattr(module, "lora_A", {}) and hasattr(module, "get_base_layer"):
            kind = type(module.get_base_layer())
            if kind is not nn.Linear:
                what = f"the adapted module {path} is a {kind.__name__}, expected nn.Linear"
                raise refused(what, "adapt plain linear modules, without quantization")
            layers.append(LoraLayer(path.removeprefix("base_model.model."), module, adapter))
    if not layers:
        what = f"no adapted linear module in {type(model).__name__}"
        raise refused(what, "name linear modules in lora.target_modules")
    return sorted(layers, key=lambda layer: layer.name)


def _forms(module: nn.Module, adapter: str) -> dict[str, object]:
    return {
        "is an embedding": adapter in getattr(module, "lora_embedding_A", {}),
        "has a variant of LoRA": adapter in getattr(module, "lora_variant", {}),
        "is merged into its base": getattr(module, "merged_adapters", []),
    }


def _besides_plain(config: LoraConfig) -> list[str]:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    bias = getattr(config, "bias", "none") != "none" or getattr(config, "lora_bias", False)
    present = {
        f"{kind} instead of LoRA": kind != "LORA",
        "DoRA (use_dora)": getattr(config, "use_dora", False),
        "trained biases (bias)": bias,
        "modules trained in full (modules_to_save)": getattr(config, "modules_to_save", None),
        "trained token rows (trainable_token_indices)": getattr(config, "trainable_token_indices", None),
        "transposed weights (fan_in_fan_out)": getattr(config, "fan_in_fan_out", False),
        "parameters adapted directly (target_parameters)": getattr(config, "target_parameters", None),
    }
    return [name for name, there in present.items() if there]


@contextmanager
def named_targets(model: LanguageModel) -> Iterator[None]:
    """Around what attaches an adapter: PEFT's complaint about `target_modules` becomes a refusal."""
    try:
        yield
    except ValueError as error:
        said = str(error).strip().split("\n", 1)[0]
        if "target_modules" not in said.lower().replace(" ", "_"):
            raise
        layers = model.named_modules() if isinstance(model, nn.Module) else ()
        names = sorted({name.rpartition(".")[2] for name, layer in layers if isinstance(layer, nn.Linear)})
        remedy = f"name some of the model's linear layers: {', '.join(names) or 'it has none that are named'}"
        raise ConfigError(f"lora.target_modules: {said[:200]}", remedy=remedy) from error
