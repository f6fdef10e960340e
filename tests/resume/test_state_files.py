"""State files: whatever goes in comes out, bit for bit, and no pickle is involved."""

import json
import math
import random
from collections import Counter, OrderedDict, namedtuple
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.optim import lr_scheduler

from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.training.state_files import capture_rng, load_state, restore_rng, save_state


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(a, b, where="state"):
    """Exact equality of type, order, dtype, shape and bits."""
    assert type(b) is (torch.Tensor if isinstance(a, torch.nn.Parameter) else type(a)), where
    if isinstance(a, dict):
        assert list(a) == list(b), where
        assert [type(key) for key in a] == [type(key) for key in b], where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert bits(a) == bits(b), where
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert a.tobytes() == b.tobytes(), where
    elif isinstance(a, float) and math.isnan(a):
        assert math.isnan(b), where
    else:
        assert a == b, where
        assert math.copysign(1, a) == math.copysign(1, b) if isinstance(a, float) else True, where


def round_trip(tmp_path: Path, state):
    save_state(tmp_path / "state", state)
    return load_state(tmp_path / "state")


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))  # surrogates included
    | st.sampled_from(["$", "tuple", "inf"])
)
KEYS = st.text(max_size=4) | st.integers() | st.just("$")
STATES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(state=STATES)
def test_any_nesting_of_plain_values_survives(tmp_path_factory, state):
    assert_same(state, round_trip(tmp_path_factory.mktemp("state"), state))


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (2, 3, 4)], ids=str)
def test_tensors_keep_dtype_shape_and_bits(tmp_path, dtype, shape):
    size = math.prod(shape) * dtype.itemsize
    limit = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, limit, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    tensor = raw.view(dtype).reshape(shape)
    assert_same(tensor, round_trip(tmp_path, tensor))


def test_views_and_shared_storage_come_back_as_independent_tensors(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "t": base.t(),
        "row": base[1],
        "every": base[:, ::2],
        "wide": torch.ones(1).expand(5),
        "base": base,
    }
    state["tied"] = state["base"]
    state["conj"] = torch.complex(base, base + 1).conj()
    loaded = round_trip(tmp_path, state)
    for key, tensor in state.items():
        assert torch.equal(tensor, loaded[key]), key
        assert loaded[key].is_contiguous()
    loaded["base"].zero_()
    assert loaded["tied"].sum() == base.sum()


def test_a_leaf_parameter_is_stored_without_its_graph(tmp_path):
    parameter = torch.nn.Parameter(torch.randn(3))
    loaded = round_trip(tmp_path, {"w": parameter, "y": parameter * 2})
    assert_same({"w": parameter, "y": (parameter * 2).detach()}, loaded)
    assert not loaded["w"].requires_grad


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.arange(4, dtype=">i8"),
        np.array(2.5),
        np.empty((0, 2), dtype=np.float16),
        np.arange(12.0).reshape(3, 4).T,
        np.float64(math.nan),
        np.float32(-0.0),
        np.int64(2**62),
        np.bool_(True),
        np.complex128(1 - 2j),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.dtype}-{value.shape}",
)
def test_numpy_values_survive(tmp_path, value):
    loaded = round_trip(tmp_path, [value])[0]
    assert type(loaded) is type(value)
    assert loaded.dtype == value.dtype
    assert loaded.shape == value.shape
    assert loaded.tobytes() == value.tobytes()


def test_only_json_and_safetensors_are_written_and_the_json_is_strict(tmp_path):
    save_state(tmp_path / "state", {"x": torch.ones(2), "inf": math.inf, "nan": [math.nan]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json", "state.safetensors"]

    def refuse(literal):
        raise AssertionError(literal)

    json.loads((tmp_path / "state.json").read_text(), parse_constant=refuse)
    assert len(load_file(tmp_path / "state.safetensors")) == 1


def test_a_state_without_tensors_leaves_no_tensor_file_behind(tmp_path):
    save_state(tmp_path / "state", [torch.ones(1)])
    save_state(tmp_path / "state", {"step": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    assert load_state(tmp_path / "state") == {"step": 3}


def test_a_stem_with_a_dot_keeps_its_name(tmp_path):
    save_state(tmp_path / "rng.rank0", {"a": torch.ones(1)})
    save_state(tmp_path / "rng.rank1", {"a": torch.zeros(1)})
    assert load_state(tmp_path / "rng.rank0")["a"].item() == 1


class Level(IntEnum):
    HIGH = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        object(), len, lambda: None, {1, 2}, b"x", 1j, Level.HIGH, Pair(1, 2), Path("x"), torch.float32,
        np.array(["a"]), np.array([None]), np.ma.masked_array([1.0], [True]), torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"), {1.5: 0}, {True: 0}, {(1,): 0},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_other_types_are_refused_with_their_path(tmp_path, value):
    with pytest.raises(ConfigError) as caught:
        save_state(tmp_path / "state", {"groups": [{"ok": 1}, {7: value}]})
    assert "state['groups'][1][7]" in caught.value.what
    assert not list(tmp_path.iterdir())


def test_a_refusal_does_not_quote_the_value(tmp_path):
    with pytest.raises(ConfigError) as caught:
        save_state(tmp_path / "state", {"row": b"private text"})
    assert "private" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"schema": 99, "tensors": 0, "state": 1}', '{"schema": 1}',
        '{"schema": 1, "tensors": 0}', '{"schema": 1, "tensors": 1, "state": 1}',
        '{"schema": 1, "tensors": 0, "state": {"$": "object"}}',
        '{"schema": 1, "tensors": 0, "state": {"$": "tensor", "name": "t9"}}',
        '{"schema": 1, "tensors": 0, "state": {"$": "tuple"}}',
        '{"schema": 1, "tensors": 0, "state": {"$": ["unhashable"]}}',
    ],
)  # fmt: skip
def test_a_malformed_state_file_is_a_checkpoint_error(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        load_state(tmp_path / "state")
    assert "state" in caught.value.what


def test_a_damaged_or_foreign_tensor_file_is_a_checkpoint_error(tmp_path):
    save_state(tmp_path / "state", {"a": torch.ones(4), "b": torch.ones(4)})
    tensor_file = tmp_path / "state.safetensors"
    whole = tensor_file.read_bytes()
    tensor_file.write_bytes(whole[:-3])
    with pytest.raises(CheckpointError, match=r"state\.safetensors"):
        load_state(tmp_path / "state")
    save_file({"t0": torch.ones(1)}, tensor_file)
    with pytest.raises(CheckpointError, match="2 tensors, found 1"):
        load_state(tmp_path / "state")


# Optimizers and schedulers


def trained(make_optimizer, make_scheduler, steps):
    """A small model after `steps` steps on fixed data, with its optimizer and scheduler."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer = make_optimizer([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}])
    scheduler = make_scheduler(optimizer)
    advance(model, optimizer, scheduler, range(steps))
    return model, optimizer, scheduler


def advance(model, optimizer, scheduler, steps):
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adamw-amsgrad": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), amsgrad=True),
    "sgd-momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True, momentum=0.5),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
}
SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 2, 5]),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "warm-restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "linear": lr_scheduler.LinearLR,
}


@pytest.mark.parametrize(
    ("optimizer_name", "scheduler_name"),
    [*((name, "lambda") for name in OPTIMIZERS), *(("adamw", name) for name in SCHEDULERS)],
)
def test_optimizer_and_scheduler_continue_bit_for_bit(tmp_path, optimizer_name, scheduler_name):
    make = OPTIMIZERS[optimizer_name], SCHEDULERS[scheduler_name]
    model, optimizer, scheduler = trained(*make, steps=3)
    state = {"o": optimizer.state_dict(), "s": scheduler.state_dict(), "m": dict(model.state_dict())}
    save_state(tmp_path / "state", state)
    assert_same(state, load_state(tmp_path / "state"))
    advance(model, optimizer, scheduler, range(3, 7))

    resumed, fresh_optimizer, fresh_scheduler = trained(*make, steps=0)
    loaded = load_state(tmp_path / "state")
    resumed.load_state_dict(loaded["m"])
    fresh_optimizer.load_state_dict(loaded["o"])
    fresh_scheduler.load_state_dict(loaded["s"])
    advance(resumed, fresh_optimizer, fresh_scheduler, range(3, 7))
    assert_same(dict(model.state_dict()), dict(resumed.state_dict()))
    assert scheduler.get_last_lr() == fresh_scheduler.get_last_lr()


def test_transformers_schedulers_round_trip(tmp_path):
    from transformers import get_scheduler

    for name in ("constant", "linear", "cosine", "polynomial", "constant_with_warmup"):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
        scheduler = get_scheduler(name, optimizer, num_warmup_steps=2, num_training_steps=9)
        assert_same(scheduler.state_dict(), round_trip(tmp_path, scheduler.state_dict()))


def test_a_scheduler_function_is_left_to_the_program_as_in_torch(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    assert round_trip(tmp_path, scheduler.state_dict())["lr_lambdas"] == [None]


def test_counter_keeps_its_type(tmp_path):
    assert_same(Counter({3: 2, 1: 1}), round_trip(tmp_path, Counter({3: 2, 1: 1})))


# Random generators


def draw():
    return (
        [random.random() for _ in range(3)], random.gauss(0, 1),
        np.random.rand(3).tolist(), np.random.standard_normal(),
        torch.rand(3).tolist(), torch.randn(17).tolist(), torch.randperm(50).tolist(),
    )  # fmt: skip


@pytest.mark.parametrize("burn", [0, 1, 700])
def test_random_generators_continue_bit_for_bit(tmp_path, burn):
    random.seed(burn)
    np.random.seed(burn)
    torch.manual_seed(burn)
    for _ in range(burn):
        random.gauss(0, 1)  # an odd number leaves a cached second value behind
        np.random.standard_normal()
        torch.randn(1)
    save_state(tmp_path / "rng", capture_rng())
    expected = draw()
    assert draw() != expected
    restore_rng(load_state(tmp_path / "rng"))
    assert draw() == expected


def test_capturing_does_not_advance_the_generators():
    random.seed(1)
    first = capture_rng()
    assert_same(first, capture_rng())


def test_another_number_of_gpus_is_refused():
    state = capture_rng()
    state["cuda"] = [*state["cuda"], torch.zeros(16, dtype=torch.uint8)]
    before = random.getstate()
    with pytest.raises(CheckpointError, match="CUDA devices"):
        restore_rng(state)
    assert random.getstate() == before
