"""The data of a run on the protocol: a poisoned task by name, and roles as safety set or as task."""

import json

import pytest
from tests.protocol_data import make_data_folder

from holdfast.core.errors import DataError
from holdfast.data.examples import normalise, prompt_text
from holdfast.data.tasks import TASKS
from holdfast.runs.stages.prepare import prepare
from holdfast_lab.protocol.roles import RoleSettings, draw_roles

ROLES = {
    "safe": "beavertails", "harm_prompts": "beavertails_test", "align": 20, "constraint": None, "monitor": 8,
    "certify": 12, "asked": 4, "harmful": 6, "poison": 20, "evaluation": 30, "seed": 3,
}  # fmt: skip
SAFETY = {"safety": {"role": "constraint", "on_leak": "error"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_data_folder(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def _folder(monkeypatch, folder):
    monkeypatch.setenv("HOLDFAST_DATA", str(folder))


def prepared(task, *, template="chat", seed=1, safety=SAFETY):
    return prepare(task, safety, template=template, seed=seed, roles=ROLES)


def ids(examples):
    return [example.id for example in examples]


@pytest.mark.parametrize("template", ["chat", "alpaca", "none"])
@pytest.mark.parametrize(("ratio", "unsafe"), [(0.0, 0), (0.29, 8), (0.5, 15), (None, 0)], ids=str)
def test_a_poisoned_task_has_exact_counts_and_no_held_out_prompt(folder, template, ratio, unsafe):
    roles = draw_roles(RoleSettings(**ROLES), folder=folder)
    found = prepared({"name": "sst2", "size": 30, "poison_ratio": ratio}, template=template).task
    poison, task = set(ids(roles.poison)), set(ids(TASKS["sst2"].train(template, folder=folder)))
    assert [sum(i in kind for i in ids(found)) for kind in (poison, task)] == [unsafe, 30 - unsafe]
    assert {example.kind for example in found} == {"plain" if template == "none" else "chat"}
    held = {normalise(e.prompt) for e in (*roles.evaluation, *roles.certify, *roles.monitor)}
    held |= {normalise(e.prompt) for e in TASKS["sst2"].test(template, folder=folder)}
    assert not held & {normalise(prompt_text(example)) for example in found}


def test_the_seed_of_the_run_draws_and_orders_the_task_and_leaves_the_roles_alone():
    block = {"name": "sst2", "size": 30, "poison_ratio": 0.5}
    first, again, other = (prepared(block, seed=seed) for seed in (1, 1, 2))
    assert ids(first.task) == ids(again.task)
    assert set(ids(first.task)) != set(ids(other.task))
    assert first.safety == other.safety


def test_the_safety_set_is_the_roles_of_its_names_and_alignment_trains_on_align(folder):
    roles = draw_roles(RoleSettings(**ROLES), folder=folder)
    found = prepared({"role": "align"})
    assert ids(found.task) == ids(roles.align)
    for role in ("constraint", "monitor", "certify"):
        assert ids(getattr(found.safety["safety"], role)) == sorted(ids(getattr(roles, role))), role
    assert prepared({"role": "align"}, safety={}).safety == {}


def test_harmful_pairs_are_the_role_and_no_certify_prompt(folder):
    roles = draw_roles(RoleSettings(**ROLES), folder=folder)
    found = prepare({"role": "align"}, SAFETY, template="none", seed=1, roles=ROLES, harmful={"role": "harmful"})
    assert ids(found.harmful) == ids(roles.harmful)
    assert len(found.harmful) == 6
    assert prepared({"role": "align"}).harmful is None


def test_a_certify_prompt_among_harmful_pairs_of_ones_own_is_refused(folder, tmp_path):
    roles = draw_roles(RoleSettings(**ROLES), folder=folder)
    row = {"prompt": prompt_text(roles.certify[0]), "completion": "no"}
    (tmp_path / "h.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="certify"):
        prepare(
            {"role": "align"}, SAFETY, template="chat", seed=1, roles=ROLES, harmful={"data": str(tmp_path / "h.jsonl")}
        )


def test_more_poison_than_the_role_has_is_refused():
    with pytest.raises(DataError, match="needs 25 poison examples; there are 20 different ones"):
        prepared({"name": "sst2", "size": 50, "poison_ratio": 0.5})
