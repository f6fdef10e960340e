"""Run files: strict YAML, overrides, presets, and a resolved form that reads back as the same run."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.redaction import REDACTED, redact
from holdfast.defaults import LATER_OPTIONS, own_reply_defaults
from holdfast.records.run_record import settings_sha256
from holdfast.records.yaml_file import MAX_BYTES
from holdfast.runs.config import config_from_dict, describe_preset, load_config, stored_config
from holdfast.runs.config.resolve import constraints, defense, peft_config, resolved, training_arguments
from holdfast.runs.stages.run_folder import RunFolder


def hash_of(config):
    return settings_sha256(resolved(config))


BASE = {
    "model": "owner/name",
    "task": {"data": "task.jsonl"},
    "safety": {"data": "safety.jsonl"},
    "output_dir": "runs/first",
}


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


@pytest.fixture
def run_file(tmp_path):
    return write(tmp_path, yaml.safe_dump(BASE))


def refusal(**changes: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({**BASE, **changes})
    assert caught.value.exit_code == 2
    return caught.value


# -- YAML


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model: a\nseed: 1\nmodel: b\n", "run.yaml:3: key 'model' appears twice, first on line 1"),
        ("train:\n  seed: 1\n  seed: 2\n", "run.yaml:3: key 'seed' appears twice"),
        ("a: &x [1]\nb: *x\n", "run.yaml:2: YAML aliases are not allowed"),
        ("a: !!python/object/apply:os.system ['true']\n", "run.yaml:1: YAML tag"),
        ("a: !local 3\n", "run.yaml:1: YAML tag '!local'"),
        ("model: a\n\tseed: 1\n", "line 2, column 1"),
        ("model: [a\n", "line 2, column 1"),
        ("- a\n- b\n", "expected `key: value` lines"),
        ("", "found nothing"),
        ("? [a, b]\n: 1\n", "a key must be a plain name"),
        ("a: " + "[" * 40 + "]" * 40, "nested more than 32 deep"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
    ],
)
def test_unclear_yaml_is_refused_with_its_line(tmp_path, text, reason):
    with pytest.raises(ConfigError, match=r"run\.yaml") as caught:
        load_config(write(tmp_path, text))
    assert reason in caught.value.what
    assert caught.value.remedy


def test_a_tag_runs_nothing(tmp_path):
    marker = tmp_path / "ran"
    path = write(tmp_path, f"model: !!python/object/apply:pathlib.Path.touch [{marker}]\n")
    with pytest.raises(ConfigError, match="YAML tag"):
        load_config(path)
    assert not marker.exists()


def test_an_alias_bomb_is_refused_at_once(tmp_path):
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    start = time.monotonic()
    with pytest.raises(ConfigError, match="aliases"):
        load_config(write(tmp_path, "\n".join(levels)))
    assert time.monotonic() - start < 2


def test_a_huge_file_is_not_parsed(tmp_path):
    path = write(tmp_path, "a: " + "x" * MAX_BYTES)
    with pytest.raises(ConfigError, match="expected at most 1000000"):
        load_config(path)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"model: \xff\xfe\n")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 7"):
        load_config(path)


def test_a_missing_file_names_its_neighbour(run_file):
    with pytest.raises(ConfigError, match="no such file") as caught:
        load_config(run_file.with_name("rum.yaml"))
    assert "run.yaml" in caught.value.remedy


def test_environment_variables_are_not_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_VALUE", "expanded")
    path = write(tmp_path, yaml.safe_dump({**BASE, "revision": "$SECRET_VALUE ${SECRET_VALUE}"}))
    assert load_config(path).revision == "$SECRET_VALUE ${SECRET_VALUE}"


# -- keys and values


def test_every_problem_is_listed_at_once():
    error = refusal(
        modle="x",
        dtype="float16",
        seed=-1,
        task={"data": "t.jsonl", "splt": "train"},
        train={"lerning_rate": 1e-4, "seed": 3, "max_steps": "four"},
        constraint={"tau": 0.1, "bta": 3, "alpha": 1.5},
        lora={"r": "4"},
    )
    lines = error.what.split("\n")
    assert lines[0] == "settings: 10 problems"
    keys = {line.removeprefix("  - ").split(": ")[0] for line in lines[1:]}
    assert keys == {
        "modle", "dtype", "seed", "task.splt", "train.lerning_rate", "train.seed", "train.max_steps",
        "constraint.bta", "constraint", "lora.r",
    }  # fmt: skip
    assert "pydantic" not in error.what


@pytest.mark.parametrize(
    ("changes", "what", "remedy"),
    [
        ({"modle": "x"}, "modle: unknown key", "'model'"),
        ({"task": {"data": "t", "colums": {}}}, "task.colums: unknown key", "'columns'"),
        ({"safety": {"data": "t", "on_lek": "move"}}, "safety.on_lek: unknown key", "'on_leak'"),
        ({"safety": {"a": {"dat": "t"}, "b": {"data": "t"}}}, "safety.a", "data"),
        ({"lora": {"rank": 4}}, "lora.rank: unknown key", "r"),
        ({"train": {"lerning_rate": 1}}, "train.lerning_rate: unknown key", "'learning_rate'"),
        ({"constraint": {"taw": 1}}, "constraint.taw: unknown key", "'tau'"),
        ({"filter": {"rate": 1}}, "filter: unknown key", "{name: holdfast, space: update, rate: 0.3}"),
        ({"defense": {"name": "holdfast", "rat": 1}}, "defense.rat: unknown key", "'rate'"),
        ({"defense": "holdfst"}, "defense: unknown defense 'holdfst'", "'holdfast'"),
        ({"train": {"seed": 1}}, "train.seed: is not set here", "`seed` at the top"),
        ({"train": {"output_dir": "x"}}, "train.output_dir: is not set here", "`output_dir` at the top"),
        ({"train": {"hub_token": "hf_abcdefghijk"}}, "train.hub_token: is not set here", "HF_TOKEN"),
        ({"train": {"trust_remote_code": True}}, "is not set here", "--trust-remote-code"),
        ({"trust_remote_code": True}, "trust_remote_code: unknown key", "--trust-remote-code"),
        ({"task": {"data": "t", "subset": False}}, "expected text, found false", "quotes"),
        ({"train": {"bf16": "yes"}}, "expected true or false or null, found 'yes'", "train.bf16"),
        ({"train": {"learning_rate": float("nan")}}, "expected a number, found nan", "train.learning_rate"),
        ({"seed": True}, "seed: expected a whole number, found true", "seed"),
        ({"preset": "papre"}, "preset: expected one of 'paper'", "preset"),
        ({"safety": {"data": "t", "fractions": [0.5, 0.2, 0.2]}}, "add up to 1", "safety.fractions"),
        ({"safety": {}}, "`safety` is empty", "safety"),
        ({"safety": {"adapter": {"data": "t"}}}, "cannot be called 'adapter'", "safety"),
        ({"constraint": {"buffer": 0.5}}, "buffer", "buffer"),
        ({"defense": {"name": "holdfast", "rate": 7}}, "rate", "0.3"),
        ({"quantization": "4bit", "lora": None}, "cannot be trained in full", "quantization"),
        ({"safety": {"a": {"data": "t"}}, "constraint": {"b": {}}}, "names of the safety sets (a)", "alike"),
    ],
)  # fmt: skip
def test_a_problem_names_its_key_and_a_remedy(changes, what, remedy):
    error = refusal(**changes)
    assert what in error.what
    assert remedy in (error.remedy if "problems" not in error.what else error.what)


def test_a_mistyped_key_is_said_before_torch_is_loaded(tmp_path):
    (tmp_path / "run.yaml").write_text("modle: embedded\ntask: task.jsonl\noutput_dir: out\nlora: {r: four}\n")
    code = (
        "import sys; sys.argv = ['holdfast', 'check', sys.argv[1]]\n"
        "from holdfast.cli.main import main\n"
        "try: main()\n"
        "finally: print([m for m in ('torch', 'trl', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (2, "[]")
    problems = ("3 problems", "model: missing", "modle: unknown key", "lora.r: expected a whole number")
    assert [words for words in problems if words not in done.stderr] == []


def test_secrets_do_not_appear_in_a_refusal():
    assert "hf_abcdefghijk" not in str(refusal(train={"hub_token": "hf_abcdefghijk"}))


def test_exponents_without_a_dot_are_numbers(tmp_path):
    text = yaml.safe_dump(BASE) + "train: {learning_rate: 1e-4}\nconstraint: {tau: 2e-1}\nlora: {alpha: 1e1}\n"
    config = load_config(write(tmp_path, text))
    assert config.train["learning_rate"] == 1e-4
    assert constraints(config)["safety"].tau == 0.2
    assert config.lora is not None
    assert config.lora.alpha == 10.0


def test_no_is_a_word_where_it_is_a_choice(run_file):
    config = load_config(run_file, ["train.save_strategy=no", "train.eval_strategy=no"])
    assert (config.train["save_strategy"], config.train["eval_strategy"]) == ("no", "no")


def test_a_config_cannot_be_changed():
    config = config_from_dict(BASE)
    with pytest.raises(ValidationError):
        config.seed = 3  # type: ignore[misc]


# -- several safety sets


def test_one_constraint_block_applies_to_every_safety_set():
    sets = {"refusals": {"data": "a.jsonl"}, "privacy": {"data": "b.jsonl"}}
    config = config_from_dict({**BASE, "safety": sets, "constraint": {"tau": 0.3}})
    assert config.named
    assert {name: c.tau for name, c in constraints(config).items()} == {"refusals": 0.3, "privacy": 0.3}


def test_each_safety_set_may_have_its_own_constraint():
    sets = {"refusals": {"data": "a.jsonl"}, "privacy": {"data": "b.jsonl"}}
    own = {"refusals": {"tau": 0.3}, "privacy": {"tau": 0.4, "unit": "nll_first"}}
    config = config_from_dict({**BASE, "safety": sets, "constraint": own})
    assert [c.tau for c in constraints(config).values()] == [0.3, 0.4]
    assert hash_of(config_from_dict(resolved(config))) == hash_of(config)


def test_a_problem_of_a_shared_constraint_is_reported_once():
    sets = {"refusals": {"data": "a.jsonl"}, "privacy": {"data": "b.jsonl"}}
    error = refusal(safety=sets, constraint={"taw": 0.3})
    assert error.what == "settings: constraint.taw: unknown key"


# -- overrides and paths


def test_overrides_win_over_the_file(run_file):
    config = load_config(
        run_file, ["train.learning_rate=1e-4", "lora=null", "seed=7", "defense.name=sft", "task.limit=3"]
    )
    assert config.train["learning_rate"] == 1e-4
    assert config.lora is None
    assert (config.seed, config.defense.name, config.task.limit) == (7, "sft", 3)


def test_an_override_may_reach_into_a_defense_given_by_name(run_file):
    config = load_config(run_file, ["defense=holdfast", "defense.rate=0.5"])
    assert defense(config).config.rate == 0.5


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("seed", "expected key=value"),
        ("=3", "expected key=value"),
        ("train..x=3", "expected key=value"),
        ("model.x=3", "model is a value, not a block"),
        ("train.lerning_rate=3", "train.lerning_rate: unknown key"),
        ("train={a: &x 1, b: *x}", "aliases are not allowed"),
        ("seed=!!python/name:os.system", "tag"),
    ],
)
def test_a_bad_override_is_refused(run_file, override, what):
    with pytest.raises(ConfigError) as caught:
        load_config(run_file, [override])
    assert what in caught.value.what


def test_data_paths_are_relative_to_the_run_file_and_hub_names_stay(tmp_path):
    (tmp_path / "base").mkdir()
    changes = {"model": "base", "safety": {"data": "owner/safety-set"}, "task": {"data": "../task.jsonl"}}
    config = load_config(write(tmp_path, yaml.safe_dump({**BASE, **changes})))
    assert config.model == str(tmp_path / "base")
    assert config.task.data == str(tmp_path.parent / "task.jsonl")
    assert config.safety["safety"].data == "owner/safety-set"
    assert config.output_dir == "runs/first"


# -- presets


def test_the_paper_preset_is_the_papers_configuration():
    config = config_from_dict({**BASE, "preset": "paper"})
    limit = constraints(config)["safety"]
    assert (limit.unit, limit.tau, limit.beta, limit.alpha, limit.majorizer) == ("nll_sum", 0.1, 10.0, 0.05, "ramp")
    method = defense(config).config
    assert (method.space, method.rate, method.estimator) == ("gradient", 1.0, "batch")
    adapter = peft_config(config)
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (32, 4, 0.05)
    assert set(adapter.target_modules) == {"q_proj", "k_proj", "v_proj"}
    arguments = training_arguments(config_from_dict({**BASE, "preset": "paper", "train": {"bf16": False}}))
    assert arguments.learning_rate == 1e-5
    assert arguments.num_train_epochs == 20
    assert arguments.per_device_train_batch_size == arguments.safety_batch_size == 10
    assert (arguments.weight_decay, arguments.max_length, arguments.max_grad_norm) == (0.1, 512, 1.0)
    assert arguments.lr_scheduler_type == "constant"


def test_an_adapter_names_its_base_at_the_pinned_commit():
    """Else it is read, audited and certified on whatever the hub's main branch holds that day."""
    pinned = "0123456789abcdef0123456789abcdef01234567"
    assert peft_config(config_from_dict({**BASE, "lora": {"r": 4}, "revision": pinned})).revision == pinned
    assert peft_config(config_from_dict({**BASE, "lora": {"r": 4}})).revision is None


def test_written_keys_win_over_the_preset():
    written = {"constraint": {"tau": 0.2}, "lora": {"r": 8}, "train": {"learning_rate": 1e-4}, "seed": 1337}
    config = config_from_dict({**BASE, "preset": "paper", **written})
    limit = constraints(config)["safety"]
    assert (limit.tau, limit.unit) == (0.2, "nll_sum")
    assert config.lora is not None
    assert (config.lora.r, config.lora.alpha) == (8, 4)
    assert (config.train["learning_rate"], config.train["weight_decay"], config.seed) == (1e-4, 0.1, 1337)


def test_the_preset_leaves_out_what_does_not_apply():
    config = config_from_dict({**BASE, "preset": "paper", "defense": "sft", "lora": None})
    assert config.defense.options == {}
    assert config.lora is None


def test_the_preset_reaches_every_named_constraint():
    sets = {"a": {"data": "a.jsonl"}, "b": {"data": "b.jsonl"}}
    config = config_from_dict({**BASE, "preset": "paper", "safety": sets, "constraint": {"a": {"tau": 0.2}, "b": {}}})
    assert [(c.tau, c.unit) for c in constraints(config).values()] == [(0.2, "nll_sum"), (0.1, "nll_sum")]


def test_every_value_of_a_preset_says_where_it_comes_from():
    for entry in describe_preset("paper"):
        assert entry.source
    silent = {entry.key for entry in describe_preset("paper") if "silent" in entry.source}
    assert {"train.max_grad_norm", "train.loss_type"} <= silent


# -- the resolved form


@pytest.mark.parametrize("changes", [{}, {"preset": "paper"}, {"defense": "sft", "lora": None}])
def test_resolved_settings_read_back_as_the_same_run(tmp_path, changes):
    config = config_from_dict({**BASE, **changes})
    values = resolved(config)
    again = load_config(write(tmp_path, yaml.safe_dump(values)))
    assert resolved(again) == values
    assert hash_of(again) == hash_of(config)


def test_resolved_settings_leave_nothing_implicit():
    values = resolved(config_from_dict(BASE))
    assert values["constraint"]["beta"] == 10.0
    assert values["defense"]["estimator"]
    assert values["train"]["learning_rate"] > 0
    assert values["train"]["safety_eval_batch_size"] >= 1
    assert "output_dir" not in values["train"]
    json.dumps(values, allow_nan=False)


def test_stored_settings_with_a_filter_of_their_own_are_read_and_resumed(tmp_path):
    """`config.yaml` of version 0.1: the filter's options stood in a block of their own."""
    config = config_from_dict({**BASE, "defense": {"rate": 0.5}, "output_dir": str(tmp_path)})
    values = resolved(config)
    options = values["defense"]
    for later in LATER_OPTIONS:
        del options[later]  # they did not exist
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**values, "defense": dict(options)}))
    RunFolder(tmp_path).require_free(resolved(config), resume=True)
    old = {**values, "defense": {"name": options.pop("name")}, "filter": options}
    file.write_text(yaml.safe_dump(old))
    assert hash_of(stored_config(file)) == hash_of(config)
    RunFolder(tmp_path).require_free(resolved(config), resume=True)
    with pytest.raises(CheckpointError, match=r"defense\.rate: stored 0\.5, now 0\.3"):
        RunFolder(tmp_path).require_free(resolved(config_from_dict(BASE)), resume=True)
    file.write_text(yaml.safe_dump({**old, "defense": {"name": "sft"}, "filter": {}}))
    assert stored_config(file).defense.options == {}
    with pytest.raises(ConfigError, match="filter: unknown key"):
        load_config(file)


def test_the_limits_of_own_refusals_hold_in_every_unit_of_kl():
    tuned = own_reply_defaults("refusals", "kl_token")  # the defense's unit, not written
    assert set(tuned) == {"alpha", "unit", "tau", "beta", "majorizer"}
    assert own_reply_defaults("refusals", "kl_first", {"unit"}) == tuned
    whole = own_reply_defaults("refusals", "kl_token", {"unit"})
    assert (whole["unit"], whole["tau"], whole["beta"], whole["majorizer"]) == ("kl_token", 0.03, 33.3, "ramp")
    assert set(own_reply_defaults("answers", "kl_token", {"unit"})) == {"alpha"}
    assert set(own_reply_defaults("refusals", "nll_token")) == {"alpha"}
    assert set(own_reply_defaults("refusals", "kl_first", {"tau"})) == {"alpha"}


def test_the_hash_follows_every_setting_but_the_folder():
    base = hash_of(config_from_dict(BASE))
    assert hash_of(config_from_dict({**BASE, "output_dir": "elsewhere"})) == base
    for changes in ({"seed": 1}, {"constraint": {"tau": 0.2}}, {"train": {"learning_rate": 0.1}}, {"lora": None}):
        assert hash_of(config_from_dict({**BASE, **changes})) != base


def test_writing_out_a_default_does_not_change_the_hash():
    written = config_from_dict({**BASE, "constraint": {"beta": 10}, "defense": {"rate": 0.3}, "seed": 42})
    assert hash_of(written) == hash_of(config_from_dict(BASE))


def test_secrets_are_blanked():
    values = {
        "api_key": "plain", "hub_token": "plain", "password": "plain", "pad_token": "<pad>",
        "note": "use hf_ABCDEFGHIJKLMN here", "list": ["sk-abcdefghijkl"],
        "url": "https://user:word@host/x", "n": 3,
    }  # fmt: skip
    assert redact(values) == {
        "api_key": REDACTED, "hub_token": REDACTED, "password": REDACTED, "pad_token": "<pad>",
        "note": f"use {REDACTED} here", "list": [REDACTED], "url": f"https://{REDACTED}@host/x", "n": 3,
    }  # fmt: skip


def test_bf16_is_chosen_by_the_machine_unless_written(monkeypatch):
    for available in (True, False):
        monkeypatch.setattr("holdfast.runs.config.resolve.is_torch_bf16_gpu_available", lambda found=available: found)
        found = training_arguments(config_from_dict({**BASE, "train": {"use_cpu": True}}))
        assert found.bf16 is available
    written = config_from_dict({**BASE, "train": {"bf16": True}})
    assert training_arguments(written, elsewhere=True).bf16 is True


def test_what_the_trainer_refuses_is_a_config_error():
    config = config_from_dict({**BASE, "train": {"lr_scheduler_type": "nonsense", "bf16": False}})
    with pytest.raises(ConfigError, match=r"train: .*nonsense"):
        training_arguments(config)
