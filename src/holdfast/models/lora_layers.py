"""LoRA's factors inside a PEFT model, by the name of the module they adapt: W x + s B A x."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from holdfast.core.errors import ConfigError, UnsupportedError


@dataclass(frozen=True)
class LoraLayer:
    """One adapted linear module."""

    name: str  # of the module in the base model, as in its checkpoint without `.weight`
    module: Any  # PEFT's layer around it
    adapter: str  # the adapter's name in that layer

    @property
    def A(self) -> nn.Parameter:  # noqa: N802  (as in the formula)
        """r x d_in."""
        weight: nn.Parameter = self.module.lora_A[self.adapter].weight
        return weight

    @property
    def B(self) -> nn.Parameter:  # noqa: N802
        """d_out x r."""
        weight: nn.Parameter = self.module.lora_B[self.adapter].weight
        return weight

    @property
    def scaling(self) -> float:
        """s = lora_alpha / r (with rsLoRA / sqrt(r))."""
        return float(self.module.scaling[self.adapter])

    @property
    def base_weight(self) -> Tensor:
        """W, d_out x d_in."""
        weight: Tensor = self.module.get_base_layer().weight
        return weight.detach()


def lora_layers(model: Any, *, defense: str) -> list[LoraLayer]:
    """Every adapted module of a model that trains one plain LoRA adapter on linear layers, sorted by name."""
    configs = getattr(model, "peft_config", None) or {}
    if len(configs) != 1:
        found = "several adapters" if configs else "no adapter"
        raise UnsupportedError(
            f"defense {defense!r} works on LoRA's factors; the model has {found}",
            remedy="train with one LoRA adapter (lora: {r: 32, ...})",
        )
    adapter, config = next(iter(configs.items()))
    _refuse_other_than_plain(config, defense)
    found_layers = []
    for path, module in model.named_modules():
        _refuse_other_layer(path, module, adapter, defense)
        if adapter in getattr(module, "lora_A", {}) and hasattr(module, "get_base_layer"):
            base = module.get_base_layer()
            if type(base) is not nn.Linear:
                raise UnsupportedError(
                    f"defense {defense!r}: the adapted module {path} is a {type(base).__name__}, expected nn.Linear",
                    remedy="adapt plain linear modules, without quantization",
                )
            found_layers.append(LoraLayer(path.removeprefix("base_model.model."), module, adapter))
    if not found_layers:
        raise UnsupportedError(
            f"defense {defense!r}: no adapted linear module in {type(model).__name__}",
            remedy="name linear modules in lora.target_modules",
        )
    return sorted(found_layers, key=lambda layer: layer.name)


def _refuse_other_layer(path: str, module: Any, adapter: str, defense: str) -> None:
    for what, present in (
        ("is an embedding", adapter in getattr(module, "lora_embedding_A", {})),
        ("has a variant of LoRA", adapter in getattr(module, "lora_variant", {})),
        ("is merged into its base", bool(getattr(module, "merged_adapters", []))),
    ):
        if present:
            raise UnsupportedError(
                f"defense {defense!r}: the adapted module {path} {what}, expected plain LoRA on a linear module",
                remedy="use a plain, unmerged LoRA adapter on linear modules",
            )


def _refuse_other_than_plain(config: Any, defense: str) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    more = [
        name
        for name, present in (
            (f"{kind} instead of LoRA", kind != "LORA"),
            ("DoRA (use_dora)", getattr(config, "use_dora", False)),
            ("trained biases (bias)", getattr(config, "bias", "none") != "none" or getattr(config, "lora_bias", False)),
            ("modules trained in full (modules_to_save)", bool(getattr(config, "modules_to_save", None))),
            ("trained token rows (trainable_token_indices)", bool(getattr(config, "trainable_token_indices", None))),
            ("transposed weights (fan_in_fan_out)", getattr(config, "fan_in_fan_out", False)),
            ("parameters adapted directly (target_parameters)", bool(getattr(config, "target_parameters", None))),
        )
        if present
    ]
    if more:
        raise UnsupportedError(
            f"defense {defense!r} works on plain LoRA; this adapter has {', '.join(more)}",
            remedy="use a plain LoRA adapter on linear modules",
        )


@contextmanager
def named_targets(model: Any) -> Iterator[None]:
    """Around what attaches an adapter: PEFT's complaint about `target_modules` becomes a refusal."""
    try:
        yield
    except ValueError as error:
        said = str(error).strip().split("\n", 1)[0]
        if "target_modules" not in said.lower().replace(" ", "_"):
            raise
        layers = model.named_modules() if isinstance(model, nn.Module) else ()
        names = sorted({name.rpartition(".")[2] for name, layer in layers if isinstance(layer, nn.Linear)})
        raise ConfigError(
            f"lora.target_modules: {said[:200]}",
            remedy=f"name some of the model's linear layers: {', '.join(names) or 'it has none that are named'}",
        ) from error
