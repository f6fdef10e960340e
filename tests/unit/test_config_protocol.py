"""Run files on the protocol's own data: a task by name, roles, presets, and the adapter policy."""

from __future__ import annotations

import pytest

from holdfast.core.errors import ConfigError
from holdfast.records.run_record import settings_sha256
from holdfast.runs.config import config_from_dict, load_config
from holdfast.runs.config.presets import PROTOCOLS
from holdfast.runs.config.resolve import data_arguments, resolved, training_arguments
from holdfast_lab.protocol.roles import RoleSettings


def hash_of(config):
    return settings_sha256(resolved(config))


NAMED = {"model": "owner/name", "task": {"name": "sst2", "poison_ratio": 0.5}, "output_dir": "out"}
ALIGN = {"model": "owner/name", "task": {"role": "align"}, "defense": "sft", "output_dir": "out"}


def refusal(**changes: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({**NAMED, **changes})
    return caught.value


def test_a_named_task_brings_the_roles_and_their_safety_set():
    config = config_from_dict(NAMED)
    assert config.safety["safety"].role == "constraint"
    assert config.roles is not None
    given = data_arguments(config)
    assert (given["task"]["name"], given["task"]["poison_ratio"]) == ("sst2", 0.5)
    assert RoleSettings(**given["roles"]).align == 5000


def test_an_alignment_run_goes_without_safety_set_and_reads_back_as_itself(tmp_path):
    config = config_from_dict(ALIGN)
    assert (config.safety, config.constraint) == ({}, {})
    assert training_arguments(config, elsewhere=True).seed == 42
    again = config_from_dict(resolved(config))
    assert hash_of(again) == hash_of(config)


def test_a_resolved_named_run_reads_back_as_itself():
    config = config_from_dict({**NAMED, "preset": "small", "template": "alpaca", "adapter_policy": "continue"})
    assert hash_of(config_from_dict(resolved(config))) == hash_of(config)


@pytest.mark.parametrize("preset", ["paper", "small"])
def test_the_roles_of_a_preset_are_fields_of_the_role_settings(preset):
    config = config_from_dict({**NAMED, "preset": preset})
    assert config.roles is not None
    for entry in PROTOCOLS[preset]:
        block, _, field = entry.key.rpartition(".")
        if block == "roles":
            assert getattr(config.roles, field) == entry.value
            assert hasattr(RoleSettings(**config.roles.model_dump()), field)
        else:
            assert getattr(config, field) == entry.value


def test_a_preset_leaves_files_of_the_users_own_alone():
    files = {"model": "m/n", "task": {"data": "t.jsonl"}, "safety": {"data": "s.jsonl"}, "output_dir": "out"}
    config = config_from_dict({**files, "preset": "paper"})
    assert (config.roles, config.template) == (None, "chat")


def test_the_paper_aligns_and_constrains_on_the_same_pairs_and_small_does_too():
    for preset in PROTOCOLS:
        config = config_from_dict({**NAMED, "preset": preset})
        assert config.roles is not None
        assert config.roles.constraint is None


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"task": {"name": "sts2"}}, "unknown task"),
        ({"task": {"name": "sst2", "data": "x.jsonl"}}, "expected one of"),
        ({"task": {}}, "expected one of"),
        ({"task": {"data": "x.jsonl", "poison_ratio": 0.5}, "safety": {"data": "s.jsonl"}}, "belong to `name`"),
        ({"task": {"name": "sst2", "poison_ratio": 1.5}}, "at most 1"),
        ({"task": {"name": "sst2", "limit": 3}}, "belongs to `data`"),
        ({"safety": {"role": "constraint", "data": "s.jsonl"}}, "expected one of"),
        ({"roles": {"algin": 3}}, "roles.algin"),
        ({"adapter_policy": "continue", "lora": None}, "rules out"),
        ({"template": "llama"}, "'chat', 'alpaca' or 'none'"),
    ],
    ids=[
        "task", "two-sources", "no-source", "poisoned-file", "ratio", "limit", "safety", "roles", "continue", "template"
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(changes, what):
    assert what in str(refusal(**changes))


@pytest.mark.parametrize(
    ("changes", "unit"),
    [
        ({}, "kl_token"),
        ({"constraint": {"tau": 0.2}}, "kl_token"),
        ({"constraint": {"unit": "nll_first"}}, "nll_first"),
        ({"preset": "paper"}, "nll_sum"),
        ({"defense": "sft"}, "kl_token"),
        ({"defense": "mean_constraint"}, "nll_token"),
        ({"lora": None}, "kl_token"),
        ({"adapter_policy": "continue"}, "kl_token"),
    ],
    ids=["nothing", "tau", "unit", "paper", "sft", "mean", "full", "continued"],
)
def test_the_unit_is_the_defenses_unless_it_is_written(changes, unit):
    assert config_from_dict({**NAMED, **changes}).constraint["safety"].get("unit") == unit


def test_every_named_safety_set_gets_the_unit():
    files = {
        "task": {"data": "t"},
        "safety": {"a": {"data": "x"}, "b": {"data": "y"}},
        "constraint": {"a": {}, "b": {}},
    }
    config = config_from_dict({"model": "m/n", "output_dir": "out", **files})
    assert {name: block["unit"] for name, block in config.constraint.items()} == {"a": "kl_token", "b": "kl_token"}


def test_roles_without_a_named_task_are_refused():
    files = {"task": {"data": "t.jsonl"}, "safety": {"data": "s.jsonl"}, "roles": {"align": 10}}
    assert "roles" in refusal(**files).what


def test_a_defense_of_fine_tuning_cannot_align():
    with pytest.raises(ConfigError, match="'holdfast' acts in the finetune stage, this is the align stage"):
        config_from_dict({key: value for key, value in ALIGN.items() if key != "defense"})


def test_a_defense_of_alignment_cannot_fine_tune():
    assert "'booster' acts in the align stage" in refusal(defense="booster").what


def test_alignment_on_files_of_ones_own_says_so():
    files = {"model": "m/n", "task": {"data": "t.jsonl"}, "output_dir": "out", "stage": "align"}
    config = config_from_dict({**files, "defense": "booster", "harmful": {"data": "h.jsonl"}})
    assert (config.safety, config.stage) == ({}, "align")
    assert data_arguments(config)["harmful"]["data"].endswith("h.jsonl")
    assert training_arguments(config, elsewhere=True).stage == "align"
    with pytest.raises(ConfigError, match="booster needs harmful pairs"):
        config_from_dict({**files, "defense": "booster"})


def test_the_role_of_alignment_is_not_fine_tuned_on():
    assert "is the data of `stage: align`" in refusal(**ALIGN, stage="finetune").what


def test_harmful_pairs_are_the_protocols_own_unless_given_and_read_only_where_needed():
    align = {**ALIGN, "roles": {"harmful": 50}}
    assert data_arguments(config_from_dict({**align, "defense": "booster"}))["harmful"] == {"role": "harmful"}
    assert data_arguments(config_from_dict(align))["harmful"] is None
    with pytest.raises(ConfigError, match="booster needs harmful pairs"):
        config_from_dict({**ALIGN, "defense": "booster", "roles": {"harmful": 0}})
    with pytest.raises(ConfigError, match="expected one of `data`"):
        config_from_dict({**align, "defense": "booster", "harmful": {}})


@pytest.mark.parametrize("written", ["lisa", {"name": "lisa"}, {"name": "lisa", "rho": 0.5}], ids=str)
def test_the_papers_constants_of_a_defense_come_with_the_preset(written):
    from holdfast_lab.defenses.lisa import Lisa

    found = config_from_dict({**NAMED, "preset": "paper", "defense": written}).defense.options
    mine = {"rho": 0.5} if isinstance(written, dict) and "rho" in written else {}
    assert found == {**Lisa.paper, **mine}
    assert "rho" not in config_from_dict({**NAMED, "defense": "lisa"}).defense.options


def test_the_papers_constants_of_one_defense_without_the_rest():
    config = config_from_dict({**NAMED, "defense": {"name": "lisa", "preset": "paper"}})
    assert (config.defense.options["rho"], config.lora.r) == (0.01, 32)
    assert "unknown preset 'papre'" in refusal(defense={"name": "lisa", "preset": "papre"}).what


def test_the_holdfast_preset_is_that_of_its_class():
    from holdfast.defenses.holdfast import Holdfast
    from holdfast.runs.config.presets import PAPER

    stated = {e.key.removeprefix("defense."): e.value for e in PAPER if e.key.startswith("defense.")}
    assert stated == dict(Holdfast.paper)


def test_weights_before_alignment_are_asked_for_where_the_model_is_known_to_be_no_adapter(tmp_path):
    (tmp_path / "model").mkdir()
    found = refusal(model=str(tmp_path / "model"), defense="asft")
    assert "asft needs the weights before alignment" in found.what
    assert config_from_dict({**NAMED, "defense": "asft", "unaligned": "owner/base"}).unaligned == "owner/base"
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    config_from_dict({**NAMED, "model": str(tmp_path / "model"), "defense": "asft"})


def test_an_empty_safety_block_is_for_alignment_alone():
    assert "`safety` is empty" in refusal(safety={}).what


def test_overrides_reach_a_named_task(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: a/b\ntask: {name: sst2}\noutput_dir: out\n")
    config = load_config(file, ["task.poison_ratio=0.1", "roles.align=7"])
    assert (config.task.poison_ratio, config.roles.align) == (0.1, 7)
