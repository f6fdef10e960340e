"""The alignment shift V = W_aligned - W_unaligned of every adapted module: what alignment did to its weights.

The aligned model is the one being fine-tuned. What it was before is given in one of two ways:

* the alignment adapter that was merged into it: V = s B A, kept as its two factors. Exact, and never a dense matrix;
* a model (hub id, folder, `embedded` or the object): V is a difference in float32, module by module, when it is needed.
  Where the folder's tensors carry the modules' names, those alone are read, otherwise the model is loaded on the CPU.
  bfloat16 keeps 8 significant bits, so entries of V below about |W| / 512 are rounding, which the adapter has not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast.core.errors import CheckpointError, ConfigError, UnsupportedError
from holdfast.core.files import read_json
from holdfast.core.library_types import LanguageModel
from holdfast.models.adapter import adapter_folder, adapter_settings_of, base_of, not_plain_lora
from holdfast.models.embedded import embedded_model_dir
from holdfast.models.fingerprint import has_idle_adapter
from holdfast.models.handle import load_model
from holdfast.models.library_errors import one_line_errors
from holdfast.models.lora_layers import LoraLayer, lora_layers
from holdfast.models.model_files import ADAPTER_WEIGHTS, CONFIG, INDEX, WEIGHTS
from holdfast.models.source import EMBEDDED, Source, file_of, resolve

_EXACT = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


@dataclass(frozen=True)
class FactoredShift:
    """V = left right, of rank k at most; k = 0 where alignment did not touch the module."""

    left: Tensor  # d_out x k, LoRA's scaling included
    right: Tensor  # k x d_in


@dataclass(frozen=True)
class DenseShift:
    """V of one module as a difference of two weights, computed when asked for and not kept."""

    layer: LoraLayer  # the module, whose base weight is the aligned one
    unaligned: Callable[[], Tensor]  # reads the weight before alignment

    def matrix(self) -> Tensor:
        """V in float32 on the module's device, d_out x d_in."""
        aligned = self.layer.base_weight
        return aligned.float() - self.unaligned().to(aligned.device, torch.float32)


@dataclass(frozen=True)
class _Stored:
    """A tensor in a safetensors file, read when called."""

    path: Path
    name: str

    def header(self) -> tuple[tuple[int, ...], torch.dtype | None]:
        """Shape and dtype, without reading the numbers; None for dtypes that hold no plain weights."""
        with _opened(self.path) as file:
            part = file.get_slice(self.name)
            return tuple(part.get_shape()), _EXACT.get(part.get_dtype())

    def __call__(self) -> Tensor:
        with _opened(self.path) as file:
            return cast("Tensor", file.get_tensor(self.name))


Shift = FactoredShift | DenseShift


def alignment_shift(layers: Sequence[LoraLayer], unaligned: object) -> dict[str, Shift]:
    """V of each of these modules, by name."""
    if isinstance(unaligned, nn.Module):
        return _from_weights(layers, _weights_of(unaligned), type(unaligned).__name__)
    if not isinstance(unaligned, str | Path):
        what = f"unaligned is a {type(unaligned).__name__}"
        raise ConfigError(what, remedy="give a folder, a hub id, embedded, or a model object")
    source = resolve(unaligned, None, trust_remote_code=False)
    if (adapter := adapter_folder(source)) is not None:
        return _from_adapter(layers, adapter)
    config = file_of(source, CONFIG)
    if config is not None and read_json(config).get("quantization_config"):
        raise _packed(source.place)
    if (stored := _stored_weights(source, [f"{layer.name}.weight" for layer in layers])) is not None:
        return _from_weights(layers, stored, str(unaligned))
    loaded = _weights_of(load_model(unaligned))
    return _from_weights(layers, {x.name: loaded[x.name] for x in layers if x.name in loaded}, str(unaligned))


def require_merged(unaligned: str, model: str) -> None:
    """Refuse an alignment adapter whose own base is the model: it is not inside, and V is not what aligned it.

    Only for a model known by its reference: one merged by hand keeps the name of its base.
    """
    adapter = adapter_folder(resolve(unaligned, None, trust_remote_code=False))
    if adapter is not None and _place(base_of(adapter)[0]) == _place(model):
        what = f"the alignment adapter {unaligned} is not part of the model {model}, which is its base"
        remedy = "fine-tune the aligned model: name the adapter as `model` (it is merged), and leave out `unaligned`"
        raise ConfigError(what, remedy=remedy)


def _place(ref: str) -> str:
    """One text for one model; the base that an adapter names need not exist here."""
    folder = embedded_model_dir() if ref == EMBEDDED else Path(ref).expanduser()
    return str(folder.resolve()) if folder.is_dir() else ref


def starting_shift(
    model: LanguageModel, unaligned: object, *, defense: str
) -> tuple[list[LoraLayer], dict[str, Shift]]:
    """The adapted modules of a run about to begin, and their V."""
    layers = lora_layers(model, defense=defense)
    if not has_idle_adapter(model):
        what = f"defense {defense!r} on an adapter that is already trained: its B A is not this run's update alone"
        raise UnsupportedError(what, remedy="merge the adapter first and train a fresh one (adapter_policy: merge)")
    return layers, alignment_shift(layers, unaligned)


def _from_adapter(layers: Sequence[LoraLayer], folder: Path) -> dict[str, Shift]:
    if (reason := not_plain_lora(folder)) is not None:
        what = f"alignment adapter {folder}: {reason}, so the shift is not s B A"
        raise UnsupportedError(what, remedy="give the model before alignment instead of the adapter")
    settings = adapter_settings_of(folder)
    shifts: dict[str, Shift] = {}
    with _opened(folder / ADAPTER_WEIGHTS) as file:
        present = set(file.keys())
        for layer in layers:
            names = [f"base_model.model.{layer.name}.lora_{factor}.weight" for factor in "BA"]
            device = layer.B.device
            if not present & set(names):
                d_out, d_in = layer.base_weight.shape
                left, right = torch.zeros(d_out, 0, device=device), torch.zeros(0, d_in, device=device)
                shifts[layer.name] = FactoredShift(left, right)
                continue
            if not present >= set(names):
                what = f"alignment adapter {folder} has one of LoRA's two factors for {layer.name}"
                raise CheckpointError(what, remedy="restore the file from the run that saved the adapter")
            left, right = (file.get_tensor(name).float() for name in names)
            _require_shape(layer, (left.shape[0], right.shape[1]), str(folder))
            scaling = _stored_scaling(settings, layer.name, rank=right.shape[0])
            shifts[layer.name] = FactoredShift(scaling * left.to(device), right.to(device))
    return shifts


def _stored_scaling(settings: Mapping[str, Any], name: str, rank: int) -> float:
    """PEFT's s of one module: alpha / r, or alpha / sqrt(r) for rsLoRA, with patterns of module names."""
    from peft.utils.other import get_pattern_key

    alphas = settings.get("alpha_pattern") or {}
    alpha = float(alphas.get(get_pattern_key(list(alphas), name), settings["lora_alpha"]))
    return alpha / (rank**0.5 if settings.get("use_rslora") else rank)


def _from_weights(
    layers: Sequence[LoraLayer], weights: Mapping[str, Tensor] | Mapping[str, _Stored], where: str
) -> dict[str, Shift]:
    """Differences to these weights; shapes and dtypes are checked now, numbers are read later."""
    if missing := [layer.name for layer in layers if layer.name not in weights]:
        what = f"the model before alignment ({where}) lacks {len(missing)} of {len(layers)} modules, first {missing[0]}"
        raise ConfigError(what, remedy="give the model that was aligned, of the same architecture and class")
    shifts: dict[str, Shift] = {}
    for layer in layers:
        weight = weights[layer.name]
        shape, dtype = (tuple(weight.shape), weight.dtype) if isinstance(weight, Tensor) else weight.header()
        if dtype not in _EXACT.values():
            raise _packed(where)
        _require_shape(layer, shape, where)
        shifts[layer.name] = DenseShift(layer, weight.detach if isinstance(weight, Tensor) else weight)
    return shifts


def _weights_of(model: nn.Module) -> dict[str, Tensor]:
    if getattr(model, "peft_config", None):
        what = "the model before alignment has an adapter, so that its weights are not the module's weight alone"
        raise UnsupportedError(what, remedy="merge the adapter, or give the base model")
    return {name.removesuffix(".weight"): p for name, p in model.named_parameters() if name.endswith(".weight")}


def _stored_weights(source: Source, names: Sequence[str]) -> dict[str, _Stored] | None:
    if (index := file_of(source, INDEX)) is not None:
        files = read_json(index).get("weight_map", {})
    else:
        if (single := file_of(source, WEIGHTS)) is None:
            return None
        with _opened(single) as file:
            files = dict.fromkeys(file.keys(), WEIGHTS)
    if not set(names) <= set(files):
        return None
    paths: dict[str, Path] = {}
    for file in sorted({files[name] for name in names}):
        if (path := file_of(source, file)) is None:
            raise CheckpointError(f"model {source.place!r} lacks its file {file}", remedy="restore the missing file")
        paths[file] = path
    return {name.removesuffix(".weight"): _Stored(paths[files[name]], name) for name in names}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import safe_open

    with one_line_errors(path, "weights"), safe_open(path, framework="pt") as file:
        yield file


def _packed(where: str) -> UnsupportedError:
    what = f"the model before alignment ({where}) is quantised: its rounding exceeds the alignment shift"
    return UnsupportedError(what, remedy="give it in bfloat16 or float32, or give the alignment adapter")


def _require_shape(layer: LoraLayer, shape: tuple[int, ...], where: str) -> None:
    expected = tuple(layer.base_weight.shape)
    if shape != expected:
        what = f"{layer.name}: the aligned weight is {expected}, before alignment ({where}) {shape}"
        raise ConfigError(what, remedy="give the model, or the alignment adapter, that this model was made from")
