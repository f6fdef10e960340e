"""Run files that name no safety data: `safety: auto`, the sets it stands for, their limits, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from holdfast.core.errors import ConfigError
from holdfast.records.run_record import settings_sha256
from holdfast.runs.config import config_from_dict, load_config
from holdfast.runs.config.resolve import constraints, data_arguments, resolve, resolved, training_arguments
from holdfast.screening.settings import PromptSet


def hash_of(config):
    return settings_sha256(resolved(config))


THREE = {"model": "owner/name", "task": "train.jsonl", "output_dir": "runs/first"}
REFUSALS = {"prompts": ["task", "probes"], "keep": "refusals"}
ANSWERS = {"prompts": ["everyday", "borderline"], "keep": "answers"}
SPELLED = {"refusals": REFUSALS, "answers": ANSWERS}
PAIRS = {"safety": {"data": "safety.jsonl"}}


def refusal(**changes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({**THREE, **changes})
    assert caught.value.exit_code == 2
    return f"{caught.value.what} | {caught.value.remedy}"


def held(**block: object) -> dict:
    return {"safety": {"mine": block}}


# -- what nothing, and `auto`, stand for


def test_three_lines_are_a_run_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: owner/name\ntask: train.jsonl\noutput_dir: runs/first\n")
    config = load_config(file)
    assert config.task.data == str(tmp_path / "train.jsonl")
    assert config.asks
    assert {name: (b.prompts, b.keep) for name, b in config.prompt_sets.items()} == {
        "refusals": (["task", "probes"], "refusals"),
        "answers": (["everyday", "borderline"], "answers"),
    }


def test_prompts_take_a_limit_and_none_is_the_run_that_it_was():
    limited = config_from_dict({**THREE, "safety": {**SPELLED, "refusals": {**REFUSALS, "limit": 80}}})
    screening = resolve(limited).screening
    assert screening.sets["refusals"] == PromptSet(("task", "probes"), "refusals", 80)
    assert resolved(limited)["safety"]["refusals"] == {**REFUSALS, "limit": 80, "openings": 1}
    assert "limit" not in resolved(config_from_dict(THREE))["safety"]["refusals"]
    assert "limit" in refusal(safety={"refusals": {**REFUSALS, "limit": 0}})


def test_nothing_auto_and_the_sets_spelled_out_are_one_run():
    hashes = {
        hash_of(config_from_dict({**THREE, **said}))
        for said in ({}, {"safety": "auto"}, {"safety": SPELLED}, {"task": {"data": "train.jsonl"}})
    }
    assert len(hashes) == 1


def test_a_named_task_keeps_the_protocols_pairs_unless_auto_is_written():
    named = {**THREE, "task": {"name": "sst2"}}
    assert config_from_dict(named).safety["safety"].role == "constraint"
    assert not config_from_dict(named).asks
    auto = config_from_dict({**named, "safety": "auto"})
    assert list(auto.prompt_sets) == ["refusals", "answers"]
    assert auto.roles is not None
    assert hash_of(config_from_dict(resolved(auto))) == hash_of(auto)


@pytest.mark.parametrize("task", [{"role": "align"}, "pairs.jsonl"], ids=str)
def test_an_alignment_run_holds_nothing_and_cannot(task):
    align = {"task": task, "stage": "align", "defense": "sft"}
    config = config_from_dict({**THREE, **align})
    assert (config.safety, config.asks, config.constraint) == ({}, False, {})
    found = refusal(**align, safety="auto")
    assert "safety: a model that is being aligned has no replies yet" in found
    assert "remove `safety`" in found


def test_pairs_of_the_users_own_are_not_asked_for():
    config = config_from_dict({**THREE, **PAIRS})
    assert (config.asks, config.prompt_sets) == (False, {})


def test_only_sets_with_data_are_read():
    both = {"mine": {"data": "safety.jsonl"}, "refusals": REFUSALS}
    config = config_from_dict({**THREE, "safety": both})
    assert list(data_arguments(config)["safety"]) == ["mine"]
    assert list(config.prompt_sets) == ["refusals"]
    assert data_arguments(config_from_dict(THREE))["safety"] == {}


def test_shares_of_what_is_asked_steer_and_monitor():
    block = config_from_dict(THREE).safety["refusals"]
    assert block.fractions == (0.75, 0.25, 0.0)
    assert training_arguments(config_from_dict(THREE), elsewhere=True).safety_fractions == (0.75, 0.25, 0.0)
    assert config_from_dict({**THREE, **PAIRS}).safety["safety"].fractions == (0.6, 0.2, 0.2)


def test_what_is_asked_is_named_in_records():
    assert config_from_dict(THREE).safety["refusals"].source == "refusals of task, probes"


def test_files_among_the_prompts_are_relative_to_the_run_file_and_hub_names_stay(tmp_path):
    (tmp_path / "task").mkdir()  # which is no reason to read it
    prompts = ["task", "more.jsonl", "../far.csv", "owner/set"]
    raw = {**THREE, **held(prompts=prompts, keep="refusals"), "conflicts": {"learn": "ids.txt"}}
    config = config_from_dict(raw, folder=tmp_path)
    here, above = str(tmp_path / "more.jsonl"), str(tmp_path.parent / "far.csv")
    assert config.safety["mine"].prompts == ["task", here, above, "owner/set"]
    assert config.conflicts_rule == ("learn", False, tmp_path / "ids.txt")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"safety": "atuo"}, ["safety: expected `auto`"]),
        ({"safety": None}, ["safety: expected `auto`"]),
        ({"safety": ["task"]}, ["safety: expected `auto`"]),
        (held(prompts=["task"], data="x.jsonl", keep="refusals"), ["expected one of `data`", "`prompts`"]),
        (held(prompts=["task"], role="constraint", keep="refusals"), ["expected one of `data`", "`prompts`"]),
        (held(prompts=["task"]), ["`prompts` needs `keep: refusals` or `keep: answers`"]),
        (held(data="x.jsonl", keep="refusals"), ["`keep` belongs to `prompts`"]),
        (held(prompts=["task"], keep="all"), ["safety.mine.keep", "'refusals' or 'answers'"]),
        (held(prompts=[], keep="refusals"), ["safety.mine.prompts", "at least one"]),
        (held(prompts="task", keep="refusals"), ["safety.mine.prompts", "expected a list, found 'task'"]),
        (held(prompts=["task", ""], keep="refusals"), ["safety.mine.prompts.1", "not empty"]),
        (held(prompts=["prob"], keep="refusals"), ["safety.mine.prompts", "'prob' is none of task", "'probes'"]),
        (held(prompts=["task", "task"], keep="refusals"), ["'task' is listed twice", "list it once"]),
        (held(prompts=["everyday"], keep="refusals"), ["refusals of everyday prompts are never held", "keep: answers"]),
        (held(prompts=["task", "borderline"], keep="refusals"), ["refusals of borderline prompts are never held"]),
        ({"safety": {"screening": {"data": "x"}}}, ["cannot be called 'screening'"]),
    ],
)  # fmt: skip
def test_a_set_that_cannot_be_made_is_refused_by_name(changes, words):
    found = refusal(**changes)
    for word in words:
        assert word in found


def test_answers_to_probes_may_be_held_where_a_file_says_so():
    answers = {"prompts": ["everyday", "borderline", "probes"], "keep": "answers"}
    config = config_from_dict({**THREE, "safety": {"refusals": REFUSALS, "answers": answers}})
    plan = resolve(config, elsewhere=True)
    assert plan.screening is not None
    assert plan.screening.sets["answers"] == PromptSet(("everyday", "borderline", "probes"), "answers")
    assert plan.values["safety"]["answers"] == {**answers, "openings": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [("columns", {"prompt": "q"}), ("split", "train"), ("subset", "main"), ("revision", "1"),
     ("skip_bad", True), ("fractions", [0.5, 0.5, 0.0]), ("on_leak", "move")],
)  # fmt: skip
def test_options_of_a_file_are_refused_with_prompts(name, value):
    assert f"`{name}` belongs to `data`" in refusal(**held(**REFUSALS, **{name: value}))


def test_a_set_without_a_name_is_reported_where_it_was_written():
    assert "safety.prompts: refusals of everyday" in refusal(safety={"prompts": ["everyday"], "keep": "refusals"})


def test_answers_to_the_task_may_be_held():
    config = config_from_dict({**THREE, **held(prompts=["task", "everyday"], keep="answers")})
    assert constraints(config)["mine"].alpha == 0.10


# -- limits


def limits(**changes: object) -> dict[str, tuple]:
    return {n: (c.alpha, c.tau, c.unit) for n, c in constraints(config_from_dict({**THREE, **changes})).items()}


@pytest.mark.parametrize(
    ("constraint", "refusals", "answers"),
    [
        (None, (0.05, 0.01, 100.0, "kl_first"), (0.10, 0.1, 10.0, "kl_token")),
        ({}, (0.05, 0.01, 100.0, "kl_first"), (0.10, 0.1, 10.0, "kl_token")),
        ({"tau": 0.2}, (0.05, 0.2, 10.0, "kl_token"), (0.10, 0.2, 10.0, "kl_token")),
        ({"beta": 20.0}, (0.05, 0.1, 20.0, "kl_token"), (0.10, 0.1, 20.0, "kl_token")),
        ({"alpha": 0.02}, (0.02, 0.01, 100.0, "kl_first"), (0.02, 0.1, 10.0, "kl_token")),
        ({"answers": {"alpha": 0.2}}, (0.05, 0.01, 100.0, "kl_first"), (0.2, 0.1, 10.0, "kl_token")),
        ({"unit": "kl_token"}, (0.05, 0.03, 33.3, "kl_token"), (0.10, 0.1, 10.0, "kl_token")),
        ({"refusals": {"tau": 0.3}}, (0.05, 0.3, 10.0, "kl_token"), (0.10, 0.1, 10.0, "kl_token")),
        (
            {"refusals": {"alpha": 0.01}, "answers": {"tau": 0.2}},
            (0.01, 0.01, 100.0, "kl_first"),
            (0.10, 0.2, 10.0, "kl_token"),
        ),
    ],
)
def test_each_set_has_its_limit_and_what_is_written_wins(constraint, refusals, answers):
    changes = {} if constraint is None else {"constraint": constraint}
    found = constraints(config_from_dict({**THREE, **changes}))
    assert {n: (c.alpha, c.tau, c.beta, c.unit) for n, c in found.items()} == {"refusals": refusals, "answers": answers}


def test_a_preset_reaches_also_the_set_that_a_partial_constraint_leaves_out():
    found = limits(preset="paper", constraint={"refusals": {"tau": 0.2}})
    assert found == {"refusals": (0.05, 0.2, "nll_sum"), "answers": (0.05, 0.1, "nll_sum")}


def test_the_limit_that_was_tuned_for_kl_is_not_that_of_a_likelihood():
    found = limits(lora=None, constraint={"refusals": {"unit": "nll_token"}})
    assert found == {"refusals": (0.05, 0.1, "nll_token"), "answers": (0.10, 0.1, "kl_token")}


def test_a_constraint_of_an_unknown_set_is_refused():
    found = refusal(constraint={"refusal": {"alpha": 0.1}})
    assert "expected the names of the safety sets (refusals, answers), found refusals, answers, refusal" in found


def test_a_problem_of_one_block_for_both_sets_is_reported_once():
    assert refusal(constraint={"taw": 0.3}).startswith("settings: constraint.taw: unknown key")
    assert "settings: constraint.answers.taw: unknown key" in refusal(constraint={"answers": {"taw": 0.3}})


def test_sets_of_files_still_need_a_constraint_each():
    sets = {"a": {"data": "a.jsonl"}, "b": {"data": "b.jsonl"}}
    assert "names of the safety sets (a, b), found a" in refusal(safety=sets, constraint={"a": {}})


# -- conflicts, screening, monitor


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, ("drop", True, None)),
        ({"conflicts": None}, ("drop", True, None)),
        ({"conflicts": "drop"}, ("drop", False, None)),
        ({"conflicts": "keep"}, ("keep", False, None)),
        ({"conflicts": "fail"}, ("fail", False, None)),
        ({"conflicts": {"learn": "/ids.txt"}}, ("learn", False, Path("/ids.txt"))),
        ({"defense": "sft"}, ("keep", False, None)),
        ({"defense": "sft", "conflicts": "drop"}, ("drop", False, None)),
        ({"defense": "safegrad"}, ("drop", True, None)),
    ],
)
def test_conflicts_are_dropped_up_to_a_limit_unless_written_and_not_by_plain_sft(changes, rule):
    assert config_from_dict({**THREE, **changes}).conflicts_rule == rule


@pytest.mark.parametrize("value", ["dorp", True, 3, ["drop"], {"learn": 3}, {"learn": "a", "drop": "b"}, {}], ids=str)
def test_another_word_for_conflicts_is_refused(value):
    assert "conflicts: expected drop, keep, fail or {learn: FILE}" in refusal(conflicts=value)


def test_an_empty_name_of_the_file_to_learn_is_refused():
    assert "conflicts" in refusal(conflicts={"learn": ""})


@pytest.mark.parametrize(
    "changes",
    [{"task": {"name": "sst2"}}, {"task": {"role": "align"}, "defense": "sft"}],
    ids=["the protocol's pairs", "alignment"],
)
def test_conflicts_belong_to_a_run_that_asks(changes):
    found = refusal(**changes, conflicts="drop")
    assert "conflicts: conflicts are found by asking the model" in found
    assert "use `safety: auto`, or remove `conflicts`" in found
    assert config_from_dict({**THREE, **changes, "conflicts": "keep"}).conflicts_rule[0] == "keep"


@pytest.mark.parametrize("changes", [PAIRS, held(prompts=["probes"], keep="refusals")], ids=["pairs", "probes"])
def test_conflicts_may_be_written_for_any_run_that_asks(changes):
    assert config_from_dict({**THREE, **changes, "conflicts": "drop"}).conflicts_rule == ("drop", False, None)


def test_screening_and_monitor_have_their_defaults():
    config = config_from_dict(THREE)
    screening, monitor = config.screening, config.monitor
    assert (screening.max_dropped, screening.max_prompts, screening.unsorted) == (0.10, 20_000, "refuse")
    assert (screening.engine, screening.engine_options, screening.judge) == ("auto", {}, None)
    assert (monitor.prompts, monitor.every) == (200, "end")


def test_an_endpoint_is_named_with_its_options():
    options = {"base_url": "http://localhost:8000/v1", "model_name": "m"}
    config = config_from_dict({**THREE, "screening": {"engine": "endpoint", "engine_options": options}})
    assert config.screening.engine_options == options
    assert resolved(config)["screening"]["engine_options"] == options


@pytest.mark.parametrize("every", ["end", "epoch", 50])
def test_the_monitor_asks_at_the_end_each_epoch_or_each_so_many_steps(every):
    assert config_from_dict({**THREE, "monitor": {"every": every}}).monitor.every == every


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"screening": {"max_droped": 1}}, ["screening.max_droped: unknown key", "'max_dropped'"]),
        ({"screening": {"max_dropped": 1.5}}, ["screening.max_dropped", "at most 1"]),
        ({"screening": {"max_prompts": 0}}, ["screening.max_prompts", "at least 1"]),
        ({"screening": {"unsorted": "ok"}}, ["screening.unsorted", "'refuse' or 'accept'"]),
        ({"screening": {"engine": "vlm"}}, ["screening.engine: unknown engine 'vlm'", "'vllm'"]),
        ({"screening": {"engine": "endpoint"}}, ["screening.engine_options", "needs base_url, model_name"]),
        ({"screening": {"engine": "transformers", "engine_options": {"x": 1}}}, ["no option 'x'"]),
        ({"screening": {"engine_options": {"x": 1}}}, ["screening.engine_options: the engine auto has none"]),
        ({"screening": {"judge": "gard"}}, ["screening.judge", "gard"]),
        ({"screening": "auto"}, ["screening: expected a mapping, found 'auto'"]),
        ({"monitor": {"promts": 3}}, ["monitor.promts: unknown key", "'prompts'"]),
        ({"monitor": {"prompts": -1}}, ["monitor.prompts", "at least 0"]),
        ({"monitor": {"every": 0}}, ["monitor.every: expected end, epoch or a number of steps"]),
        ({"monitor": {"every": True}}, ["monitor.every: expected end, epoch or a number of steps"]),
        ({"monitor": {"every": "step"}}, ["monitor.every: expected end, epoch or a number of steps"]),
        ({"monitor": {"rollback": True}}, ["monitor.rollback: unknown key", "set `train.rollback`"]),
        ({"train": {"rollback": "yes"}}, ["train.rollback: expected true or false"]),
        ({"task": ""}, ["task.data: expected text that is not empty"]),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_by_its_key(changes, words):
    found = refusal(**changes)
    for word in words:
        assert word in found


def test_a_trained_judge_is_a_folder_that_need_not_be_there_when_a_run_is_read_back(tmp_path):
    (tmp_path / "judge").mkdir()
    config = config_from_dict({**THREE, "screening": {"judge": "judge"}}, folder=tmp_path)
    assert config.screening.judge == str(tmp_path / "judge")
    (tmp_path / "judge").rmdir()
    assert config_from_dict(resolved(config)).screening.judge == config.screening.judge


def test_rollback_is_off_unless_written():
    for written, value in (({}, False), ({"rollback": True}, True)):
        assert training_arguments(config_from_dict({**THREE, "train": written}), elsewhere=True).rollback is value


# -- stored settings


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"conflicts": {"learn": "/ids.txt"}, "monitor": {"every": 10}, "screening": {"unsorted": "accept"}},
        {"safety": {"mine": {"data": "s.jsonl"}, "refusals": REFUSALS}, "constraint": {"tau": 0.2}},
        {"safety": REFUSALS},
        {**PAIRS, "monitor": {"prompts": 50}},
        {"preset": "paper"},
        {"lora": None, "defense": "sft"},
    ],
    ids=["auto", "options", "mixed", "one set", "pairs", "paper", "full"],
)
def test_resolved_settings_read_back_as_the_same_run(tmp_path, changes):
    config = config_from_dict({**THREE, **changes})
    values = resolved(config)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    again = load_config(tmp_path / "config.yaml")
    assert resolved(again) == values
    assert (again.safety, again.conflicts_rule, again.monitor) == (config.safety, config.conflicts_rule, config.monitor)


def test_a_run_that_asks_stores_all_of_it():
    values = resolved(config_from_dict(THREE))
    assert values["safety"]["refusals"] == {"prompts": ["task", "probes"], "keep": "refusals", "openings": 1}
    assert values["conflicts"] is None  # which is the rule under the limit, unlike `drop`
    assert values["screening"]["max_dropped"] == 0.10
    assert values["monitor"] == {"prompts": 200, "every": "end"}


def test_a_run_on_pairs_is_stored_as_it_was_before_runs_asked():
    values = resolved(config_from_dict({**THREE, **PAIRS}))
    assert not {"conflicts", "screening", "monitor"} & set(values)
    assert not {"prompts", "keep"} & set(values["safety"])
    written = resolved(config_from_dict({**THREE, **PAIRS, "monitor": {"every": "epoch"}}))
    assert written["monitor"] == {"prompts": 200, "every": "epoch"}


def test_overrides_reach_what_is_not_written(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(THREE))
    changes = ["task.limit=3", "constraint.answers.alpha=0.2", "conflicts=keep", "monitor.every=5"]
    config = load_config(file, [*changes, "screening.max_prompts=10"])
    assert (config.task.data, config.task.limit) == (str(tmp_path / "train.jsonl"), 3)
    assert {name: c.alpha for name, c in constraints(config).items()} == {"refusals": 0.05, "answers": 0.2}
    assert (config.conflicts, config.monitor.every, config.screening.max_prompts) == ("keep", 5, 10)


def test_bad_rows_of_files_may_still_be_skipped():
    config = config_from_dict(THREE).skipping_bad_rows()
    assert config.task.skip_bad is True
    assert config.safety == config_from_dict(THREE).safety
