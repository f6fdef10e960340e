"""Engines and precisions in which the two gradients would not be computed correctly are refused by name."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import Trainer

import holdfast as hf
from holdfast.constraint.gradients import ParameterSpace
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.training import support
from holdfast.training.support import require_shardable, require_supported_engine
from tests import tiny
from tests.distributed import launch_cases
from tests.unit.trainers.building import TIGHT, build


def arguments(tmp_path, **kwargs) -> hf.SafeSFTConfig:
    return hf.SafeSFTConfig(
        str(tmp_path), reference_cache=str(tmp_path), max_steps=1, bf16=False, use_cpu=True, report_to="none",
        save_strategy="no", max_length=32, disable_tqdm=True, **kwargs,
    )  # fmt: skip


def trainer(args, model=None, peft_config=None) -> hf.SafeSFTTrainer:
    return hf.SafeSFTTrainer(
        model or tiny.model(), args, processing_class=tiny.tokenizer(), peft_config=peft_config,
        train_dataset=tiny.dataset(16, seed=1, start="w1"), safety_dataset=tiny.dataset(20, seed=2),
    )  # fmt: skip


def assert_refused(caught, *words: str) -> None:
    error = caught.value
    assert type(error) is UnsupportedError
    assert error.exit_code == 2
    assert "\n" not in error.what
    assert error.remedy
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("fp16", True, ("fp16", "loss scale", "bf16=True")),
        ("deepspeed", {"zero_optimization": {"stage": 3}}, ("DeepSpeed ZeRO-3", "fsdp_version: 2", "ZeRO-2")),
        ("_n_gpu", 2, ("nn.DataParallel", "accelerate launch")),
        ("optim", "adalomo", ("adalomo", "adamw_torch")),
    ],
)
def test_arguments(tmp_path, attribute, value, words):
    args = arguments(tmp_path)
    if attribute == "_n_gpu":
        assert args.n_gpu <= 1  # settles the devices, which would overwrite the number
    setattr(args, attribute, value)
    with pytest.raises(UnsupportedError) as caught:
        trainer(args)
    assert_refused(caught, *words)


def launch_with_deepspeed(monkeypatch, *words: str) -> None:
    given = ["--use_deepspeed", "--num_processes", "2", "--mixed_precision", "no", *words]
    for name, value in launch_cases.deepspeed_variables(given).items():
        monkeypatch.setenv(name, value)


ZERO_3 = ("DeepSpeed ZeRO-3", "distributed_type: FSDP", "fsdp_version: 2", "examples/launch/fsdp2.yaml")
OFFLOADED = ("offload_optimizer to cpu", "offload_optimizer: {device: none}")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--zero_stage", "3"], ZERO_3),
        (["--zero_stage", "0"], ("DeepSpeed stage 0", "stage: 2")),
        (["--zero_stage", "2", "--offload_optimizer_device", "cpu"], OFFLOADED),
    ],
)
def test_deepspeed_by_accelerate_launch(tmp_path, monkeypatch, given, words):
    """Refused before transformers asks for the package, which need not be there, and before a model is loaded."""
    launch_with_deepspeed(monkeypatch, *given)
    with pytest.raises(UnsupportedError) as caught:
        arguments(tmp_path)
    assert_refused(caught, *words)


def zero(**settings) -> dict:
    return {"zero_optimization": {"stage": 2, **settings}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stage": 3}}, ZERO_3),
        ({"train_batch_size": "auto"}, ("DeepSpeed stage 0", "stage: 2")),
        (zero(offload_optimizer={"device": "cpu"}), OFFLOADED),
        (zero(offload_param={"device": "nvme"}), ("offload_param to nvme", "device: none")),
        ({**zero(), "fp16": {"enabled": True}}, ("fp16 in DeepSpeed's settings", "use bf16")),
        ({**zero(), "optimizer": {"type": "Adam"}}, ("optimizer in DeepSpeed's settings", "the run's own optim")),
        ({**zero(), "scheduler": {"type": "WarmupLR"}}, ("scheduler in DeepSpeed's settings", "lr_scheduler_type")),
        ({**zero(), "torch_autocast": {"enabled": True}}, ("never run with the filter: torch_autocast", "leave them")),
        (zero(zenflow={}, leaf_module={}), ("never run with the filter: leaf_module, zenflow", "leave them out")),
    ],
)
def test_deepspeed_settings(tmp_path, config, words):
    (tmp_path / "zero.json").write_text(json.dumps(config), encoding="utf-8")
    for given in (config, str(tmp_path / "zero.json")):
        with pytest.raises(UnsupportedError) as caught:
            arguments(tmp_path, deepspeed=given)
        assert_refused(caught, *words)


def test_deepspeed_settings_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"DeepSpeed's settings .*none\.json: .*No such file") as caught:
        arguments(tmp_path, deepspeed=str(tmp_path / "none.json"))
    assert "JSON" in caught.value.remedy


@pytest.mark.parametrize("stage", ["1", "2"])
def test_a_missing_deepspeed_is_named(tmp_path, monkeypatch, stage):
    """The stages that are supported."""
    launch_with_deepspeed(monkeypatch, "--zero_stage", stage)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="DeepSpeed is not installed") as caught:
        arguments(tmp_path)
    assert "pip install deepspeed" in caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "DPO"}, ("DPO under DeepSpeed", "DDP")),
        ({"method": "GRPO"}, ("GRPO under DeepSpeed", "DDP")),
        ({"model": SimpleNamespace(is_quantized=True)}, ("a quantised base under DeepSpeed", "FSDP2")),
        (
            {
                "args": SimpleNamespace(
                    gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
                )
            },
            ("re-entrant gradient checkpointing", "use_reentrant: false"),
        ),
    ],
)
def test_runs_under_deepspeed(changes, words):
    args = SimpleNamespace(gradient_checkpointing=True, gradient_checkpointing_kwargs=None)
    plain = {"args": args, "model": SimpleNamespace(), "method": "SFT"}
    support.require_supported_zero_run(SimpleNamespace(**plain))
    with pytest.raises(UnsupportedError) as caught:
        support.require_supported_zero_run(SimpleNamespace(**plain | changes))
    assert_refused(caught, *words)


def test_asking_a_model_that_will_be_sharded(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UnsupportedError) as caught:
        hf.SafeSFTTrainer(
            tiny.model(), arguments(tmp_path), processing_class=tiny.tokenizer(), peft_config=tiny.lora(),
            train_dataset=tiny.dataset(16, seed=1, start="w1"), safety_dataset="auto",
        )  # fmt: skip
    assert_refused(caught, "safety_dataset='auto' under FSDP", "holdfast.screen(model, dataset)")


def test_fsdp_version_1(tmp_path):
    args = arguments(tmp_path, fsdp=True, fsdp_config={"version": 1})
    with pytest.raises(UnsupportedError) as caught:
        trainer(args)
    assert_refused(caught, "FSDP version 1", "fsdp_version: 2")


THIRD = {"zero_optimization": {"stage": 3}}


def engine(kind: DistributedType, **attributes) -> SimpleNamespace:
    return SimpleNamespace(distributed_type=kind, **{"is_fsdp2": False, "parallelism_config": None, **attributes})


@pytest.mark.parametrize(
    ("accelerator", "words"),
    [
        (engine(DistributedType.FSDP), ("FSDP version 1", "fsdp_version: 2")),
        (engine(DistributedType.DEEPSPEED), ("DeepSpeed stage 0", "DDP")),
        (engine(DistributedType.DEEPSPEED, deepspeed_plugin=SimpleNamespace(deepspeed_config=THIRD)), ZERO_3),
        (engine(DistributedType.MEGATRON_LM), ("MEGATRON_LM", "DDP or FSDP2")),
        (engine(DistributedType.XLA), ("XLA", "DDP or FSDP2")),
        (engine(DistributedType.FSDP, is_fsdp2=True, parallelism_config=ParallelismConfig(tp_size=2)), ("tp_size=2",)),
        (engine(DistributedType.FSDP, is_fsdp2=True, parallelism_config=ParallelismConfig(cp_size=4)), ("cp_size=4",)),
        (engine(DistributedType.MULTI_GPU, parallelism_config=ParallelismConfig(sp_size=2)), ("sp_size=2",)),
        (
            engine(
                DistributedType.FSDP,
                is_fsdp2=True,
                parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
            ),
            ("hybrid sharding", "dp_replicate_size=2"),
        ),
    ],
)
def test_engines_that_only_accelerate_reveals(accelerator, words):
    with pytest.raises(UnsupportedError) as caught:
        require_supported_engine(accelerator)
    assert_refused(caught, *words)


@pytest.mark.parametrize("kind", [DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU])
def test_data_parallelism_is_not_refused(kind):
    require_supported_engine(engine(kind))
    require_supported_engine(
        engine(DistributedType.FSDP, is_fsdp2=True, parallelism_config=ParallelismConfig(dp_shard_size=2))
    )


def test_the_trainer_asks_accelerate_for_its_engine(tmp_path, monkeypatch):
    create = Trainer.create_accelerator_and_postprocess

    def with_tensor_parallelism(self):
        create(self)
        self.accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", with_tensor_parallelism)
    with pytest.raises(UnsupportedError) as caught:
        trainer(arguments(tmp_path), peft_config=tiny.lora())
    assert_refused(caught, "tensor parallelism (tp_size=2)")


def test_trainable_weights_in_bfloat16(tmp_path):
    with pytest.raises(UnsupportedError) as caught:
        trainer(arguments(tmp_path), model=tiny.model(dtype=torch.bfloat16))
    assert_refused(caught, "bfloat16", "float32")


def test_a_frozen_base_in_bfloat16_is_not_refused(tmp_path):
    made = trainer(arguments(tmp_path), model=tiny.model(dtype=torch.bfloat16), peft_config=tiny.lora())
    made.train()
    assert made.state.global_step == 1


def test_a_model_sharded_while_it_was_loaded(tmp_path, monkeypatch):
    model = tiny.model()
    monkeypatch.setattr(type(model), "is_distributed_loading_by_transformers", True, raising=False)
    with pytest.raises(UnsupportedError) as caught:
        trainer(arguments(tmp_path), model=model)
    assert_refused(caught, "sharded while it was loaded", "FSDP2")


def test_a_base_in_8_bits_that_fsdp2_cannot_shard():
    base = SimpleNamespace(is_loaded_in_8bit=True)
    with pytest.raises(UnsupportedError) as caught:
        require_shardable(SimpleNamespace(get_base_model=lambda: base))
    assert_refused(caught, "8-bit base under FSDP2", "quantization: 4bit")
    require_shardable(SimpleNamespace(get_base_model=lambda: SimpleNamespace(is_loaded_in_4bit=True)))


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    torch.distributed.destroy_process_group()


def test_parameters_that_fsdp2_shards_in_part_or_twice(mesh):
    plain = nn.Parameter(torch.zeros(4))
    sharded = nn.Parameter(distribute_tensor(torch.zeros(4), mesh["shard"], [Shard(0)]))
    twice = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Shard(1)]))
    with pytest.raises(UnsupportedError) as caught:
        ParameterSpace([sharded, plain])
    assert_refused(caught, "shards only some", "ignored_modules")
    with pytest.raises(UnsupportedError) as caught:
        ParameterSpace([twice])
    assert_refused(caught, "several dimensions", "one-dimensional FSDP2")
    assert len(ParameterSpace([sharded]).params) == len(ParameterSpace([plain]).params) == 1


def test_a_safety_batch_that_two_processes_cannot_share(ddp):
    for rank in ddp:
        name, code, message = rank["uneven"]
        assert (name, code) == ("ConfigError", 2)
        assert "safety_batch_size 7 cannot be shared equally by 2 processes" in message


def test_evaluation_before_a_sharded_model_exists(fsdp2):
    for rank in fsdp2:
        name, code, message = rank["early"]
        assert (name, code) == ("UnsupportedError", 2)
        assert "evaluation before training under FSDP2" in message


def test_an_adapter_that_would_be_saved_empty(fsdp2):
    for rank in fsdp2:
        name, code, message = rank["empty"]
        assert (name, code) == ("UnsupportedError", 2)
        assert "activation_checkpointing with an adapter" in message


def test_verified_steps_are_refused_under_deepspeed(tmp_path, monkeypatch):
    """In the optimizer's hook the model does not have the step's weights yet."""
    one = build(tmp_path, given={"defense": {"name": "holdfast", "anchor": True, "verify": 8}, "constraint": TIGHT})
    monkeypatch.setattr(one, "is_deepspeed_enabled", True)
    monkeypatch.setattr(support, "require_supported_zero_run", lambda _: None)
    with pytest.raises(UnsupportedError) as caught:
        support.require_supported_defense(one)
    assert_refused(caught, "verify under DeepSpeed", "verify: 0")
