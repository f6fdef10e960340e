"""Training state on disk as JSON plus safetensors: exact, and without pickle, so that loading runs no code.

`<stem>.json` holds the structure, `<stem>.safetensors` the tensors it points to (absent when there are none).
What JSON cannot say is tagged: an object with the key `"$"` is `{"$": kind, ...}`, and a dict whose keys are
not all strings, or that has the key `"$"` itself, is written as a list of pairs.
"""

import json
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.files import read_json, write_text

SCHEMA = 1
TAG = "$"
ANOTHER = "resume from another checkpoint"
# Exact types only: a subclass (an enum, a named tuple) would come back as its base without notice.
MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
# Stored under their own dtype; every other strided dtype is stored as its bytes with the dtype beside them.
NATIVE = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


def save_state(stem: Path, state: object) -> None:
    """Write any nesting of containers, scalars, tensors and numpy values to `<stem>.json` and `.safetensors`.

    Tensors keep dtype, shape and bits (NaN payloads included); device, strides, `requires_grad` and sharing
    of storage are not kept. That both files are whole and belong together is what the manifest of a checkpoint
    vouches for. A value of another type is refused by its path inside `state`; keys are str or int.
    """
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, "state", tensors)
    document, tensor_file = _files(stem)
    if tensors:
        save_file(tensors, tensor_file)
    else:
        tensor_file.unlink(missing_ok=True)
    write_text(document, json.dumps({"schema": SCHEMA, "tensors": len(tensors), "state": tree}, allow_nan=False) + "\n")


def _files(stem: Path) -> tuple[Path, Path]:
    """A stem may have a dot in its name."""
    return stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.safetensors")


def load_state(stem: Path) -> Any:
    """Read what `save_state` wrote; tensors come back on the CPU, each with its own memory."""
    path, tensor_file = _files(stem)
    document = read_json(path)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path} is not a state file of schema {SCHEMA}",
            remedy="resume with the holdfast version that wrote it, or from another checkpoint",
        )
    expected = document.get("tensors")
    tensors = _read_tensors(tensor_file) if expected else {}
    if len(tensors) != expected:
        raise CheckpointError(f"{path} belongs to {expected} tensors, found {len(tensors)} beside it", remedy=ANOTHER)
    try:
        return _decode(document["state"], tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is malformed: {type(error).__name__}: {error}", remedy=ANOTHER) from error


def capture_rng() -> dict[str, Any]:
    """The global random generators: python, numpy, torch on the CPU and on every visible CUDA device."""
    version, internal, gauss = random.getstate()
    return {
        "python": {"version": version, "internal": np.array(internal, dtype=np.uint64), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put the global random generators where `capture_rng` found them."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(state["cuda"]) != devices:
        raise CheckpointError(
            f"the random state covers {len(state['cuda'])} CUDA devices, visible now: {devices}",
            remedy="resume with the same number of visible GPUs (CUDA_VISIBLE_DEVICES)",
        )
    python = state["python"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, generator in enumerate(state["cuda"]):
        torch.cuda.set_rng_state(generator, device)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            # A clone, because the tensor may map the file, which rotation deletes.
            return {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}", remedy=ANOTHER) from error


def _refuse(where: str, found: str) -> NoReturn:
    raise ConfigError(
        f"{where} cannot be stored: expected dict, list, tuple, str, int, float, bool, None, "
        f"a plain tensor or a numpy number, found {found}",
        remedy="convert it to one of these before it enters the training state",
    )


def _encode(value: Any, where: str, tensors: dict[str, Tensor]) -> object:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "value": str(value)}
    if kind in MAPPINGS.values():
        return _encode_mapping(value, where, tensors)
    if kind in (list, tuple):
        items = [_encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
        return items if kind is list else {TAG: "tuple", "items": items}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, tensors)
    if isinstance(value, np.ndarray | np.generic):
        return _encode_numpy(value, where, tensors)
    _refuse(where, f"{kind.__module__}.{kind.__qualname__}")


def _encode_mapping(value: dict[Any, Any], where: str, tensors: dict[str, Tensor]) -> dict[str, object]:
    for key in value:
        if type(key) not in (str, int):
            _refuse(where, f"a key of type {type(key).__qualname__}")
    pairs = [(key, _encode(item, f"{where}[{key!r}]", tensors)) for key, item in value.items()]
    if type(value) is dict and TAG not in value and all(type(key) is str for key in value):
        return dict(pairs)
    return {TAG: type(value).__name__, "items": pairs}


def _encode_tensor(value: Tensor, where: str, tensors: dict[str, Tensor]) -> dict[str, object]:
    plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    if not plain or value.is_quantized or value.is_meta:
        _refuse(where, f"{type(value).__qualname__} ({value.layout}, {value.dtype}, {value.device.type})")
    copy = value.detach().to("cpu", copy=True).contiguous()
    entry: dict[str, Any] = {TAG: "tensor", "name": f"t{len(tensors)}"}
    if copy.dtype not in NATIVE:
        entry |= {"dtype": str(copy.dtype).removeprefix("torch."), "shape": list(copy.shape)}
        copy = copy.reshape(-1).view(torch.uint8)
    tensors[entry["name"]] = copy
    return entry


def _encode_numpy(
    value: np.ndarray[Any, Any] | np.generic, where: str, tensors: dict[str, Tensor]
) -> dict[str, object]:
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        _refuse(where, type(value).__qualname__)
    if value.dtype.kind not in "biufc":
        _refuse(where, f"numpy dtype {value.dtype}")
    name, scalar = f"t{len(tensors)}", isinstance(value, np.generic)
    # Through bytes: numpy has dtypes and byte orders that torch has not.
    tensors[name] = torch.from_numpy(np.frombuffer(value.tobytes(), dtype=np.uint8).copy())
    return {TAG: "numpy", "name": name, "dtype": value.dtype.str, "shape": list(value.shape), "scalar": scalar}


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if TAG not in node:
        return {key: _decode(item, tensors) for key, item in node.items()}
    return _decode_tagged(node, tensors)


def _decode_tagged(node: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    kind = node[TAG]
    if kind == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[node["value"]]
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in node["items"])
    if kind in MAPPINGS:
        return MAPPINGS[kind]({key: _decode(item, tensors) for key, item in node["items"]})
    stored = tensors[node["name"]]
    if kind == "tensor":
        return stored.view(getattr(torch, node["dtype"])).reshape(node["shape"]) if "dtype" in node else stored
    if kind != "numpy":
        raise KeyError(kind)
    array = np.frombuffer(stored.numpy().tobytes(), dtype=np.dtype(node["dtype"])).reshape(node["shape"]).copy()
    return array[()] if node["scalar"] else array
