"""Roles: who is drawn from where, what is recorded, what is refused."""

import json
import random
from dataclasses import replace

import pytest
from tests.protocol_data import TEST_PROMPTS, make_data_folder, prompts

from holdfast.core.errors import ConfigError, DataError
from holdfast.data.examples import normalise
from holdfast.data.splits import require_unseen, split_from_roles
from holdfast.runs.config import config_from_dict
from holdfast_lab.data.catalogue import CATEGORIES, load
from holdfast_lab.protocol.roles import ROLES, RoleSettings, draw_roles, groups

SETTINGS = RoleSettings(
    safe="beavertails",
    harm_prompts="beavertails_test",
    align=20,
    constraint=None,
    monitor=8,
    certify=12,
    asked=4,
    harmful=15,
    poison=20,
    evaluation=30,
    seed=3,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_data_folder(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def roles(folder):
    return draw_roles(SETTINGS, folder=folder)


def ids(examples):
    return [example.id for example in examples]


def rewrite(path, change):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in change(lines)))


def test_every_role_has_its_size(roles):
    wanted = {role: getattr(SETTINGS, role) for role in ROLES} | {"constraint": SETTINGS.align}
    assert {role: len(getattr(roles, role)) for role in ROLES} == wanted == roles.record["counts"]
    for role in ROLES:
        assert len(set(ids(getattr(roles, role)))) == wanted[role]


def test_pairs_come_with_the_right_label_and_prompts_from_the_test_split(roles, folder):
    train = load("beavertails", "train", folder=folder).rows
    label = {(row["prompt"], row["response"]): row["is_safe"] for row in train}
    for role, safe in (("align", True), ("monitor", True), ("certify", True), ("asked", False), ("poison", False),
                       ("harmful", False)):  # fmt: skip
        assert {label[example.prompt, example.completion] for example in getattr(roles, role)} == {safe}, role
    test = [row for row in load("beavertails", "test", folder=folder).rows if not row["is_safe"]]
    assert {example.prompt for example in roles.evaluation} <= {row["prompt"] for row in test}
    assert {example.completion for example in roles.evaluation} == {""}


def test_places_and_categories_are_those_of_the_rows(roles, folder):
    rows = load("beavertails", "train", folder=folder).rows
    for example in roles.poison:
        row = rows[int(example.where.split()[1])]
        assert (row["prompt"], row["response"]) == (example.prompt, example.completion)
        assert example.category == row["categories"][0]
    assert {example.category for example in roles.align} == {None}


def test_constraint_is_align_itself_or_a_role_of_its_own(roles, folder):
    assert roles.constraint == roles.align
    apart = draw_roles(replace(SETTINGS, constraint=10), folder=folder)
    assert len(apart.constraint) == 10
    assert not set(ids(apart.constraint)) & set(ids(apart.align))
    assert (apart.certify, apart.monitor) == (roles.certify, roles.monitor)


def test_refusals_replace_the_safe_pairs_only(folder, roles):
    other = draw_roles(replace(SETTINGS, safe="refusals"), folder=folder)
    told = {row["prompt"] for row in load("refusals", folder=folder).rows}
    for role in ("align", "monitor", "certify"):
        assert {example.prompt for example in getattr(other, role)} <= told
    assert other.evaluation == roles.evaluation
    assert other.poison[0].prompt not in told


def test_all_of_beavertails_evaluation_can_be_taken(folder):
    roles = draw_roles(replace(SETTINGS, harm_prompts="beavertails_evaluation", evaluation=28), folder=folder)
    rows = load("beavertails_evaluation", folder=folder).rows
    assert sorted((e.prompt, e.category) for e in roles.evaluation) == sorted(
        (r["prompt"], r["category"]) for r in rows
    )


def test_a_prompt_of_the_test_split_is_taken_once_with_its_commonest_category(tmp_path):
    folder = make_data_folder(tmp_path)

    def one_prompt(rows):
        asked = rows[0]["prompt"]
        marks = [CATEGORIES[9], CATEGORIES[4], CATEGORIES[9]]
        spelled = [asked, asked.upper(), f"{asked}!"]
        made = [
            {
                "prompt": p,
                "response": f"reply {i}",
                "is_safe": False,
                "category": {c: c == marks[i] for c in CATEGORIES},
            }
            for i, p in enumerate(spelled)
        ]
        safe = {"prompt": "Who bakes bread?", "response": "A baker", "is_safe": True}
        return [*made, safe | {"category": dict.fromkeys(CATEGORIES, False)}]

    rewrite(folder / "beavertails/30k_test.jsonl", one_prompt)
    (example,) = draw_roles(replace(SETTINGS, evaluation=1), folder=folder).evaluation
    assert example.category == CATEGORIES[9]
    with pytest.raises(DataError, match="role evaluation: 2 examples are asked for, 1 are left"):
        draw_roles(replace(SETTINGS, evaluation=2), folder=folder)


def test_prompts_of_an_earlier_role_are_left_out_of_later_ones(tmp_path):
    """All unsafe rows share prompts with the test split, by case, punctuation, one word, or a longer text."""
    folder = make_data_folder(tmp_path)
    test = prompts("borrow", TEST_PROMPTS)
    long = "How do I kindly borrow the red kettle and also the blue lamp at home tomorrow morning before breakfast"
    change = [
        str.upper,
        lambda text: text.replace("?", " !!"),
        lambda text: f"{long} {text}",
    ]

    def copies(rows):
        unsafe = [row for row in rows if not row["is_safe"]]
        return [row for row in rows if row["is_safe"]] + [
            row | {"prompt": change[i % 3](test[i % TEST_PROMPTS])} for i, row in enumerate(unsafe)
        ]

    rewrite(folder / "beavertails/30k_train_partial.jsonl", copies)
    nothing = replace(SETTINGS, evaluation=TEST_PROMPTS, asked=0, harmful=0, poison=0)
    for role in ("asked", "poison", "harmful"):
        with pytest.raises(DataError, match=f"role {role}: 1 examples are asked for, 0 are left"):
            draw_roles(replace(nothing, **{role: 1}), folder=folder)


def test_groups_join_near_duplicates_and_contained_prompts():
    texts = [
        "how do I bake a very good plum cake for my old aunt at home",
        "How do I bake a very good plum cake for my old aunt at home now?",
        "tell me please: bake a good cake",
        "first warm the oven, then tell me please bake a good cake, then wash all of the dishes and go to bed",
        "something else entirely and on its own",
        "TELL ME PLEASE bake a good cake!",
    ]
    label = groups(texts)
    assert label[0] == label[1]
    assert label[2] == label[3] == label[5]
    assert len(set(label)) == 3


def test_held_out_roles_take_one_pair_of_a_group(tmp_path):
    folder = make_data_folder(tmp_path)
    again = [{**row, "response": "Please wait."} for row in json_rows(folder) if row["is_safe"]]
    rewrite(folder / "beavertails/30k_train_partial.jsonl", lambda rows: rows + again)
    roles = draw_roles(replace(SETTINGS, certify=25, monitor=25, align=5), folder=folder)
    for role in ("certify", "monitor"):
        assert roles.record["groups"][role] == roles.record["counts"][role] == 25


def json_rows(folder):
    return [json.loads(line) for line in (folder / "beavertails/30k_train_partial.jsonl").read_text().splitlines()]


def test_the_trainer_accepts_the_roles(roles):
    """Its own checks: disjoint safety roles, and no certify prompt in the poison."""
    split_from_roles(roles.constraint, roles.monitor, roles.certify)
    require_unseen(roles.certify, [example.prompt for example in (*roles.poison, *roles.harmful, *roles.evaluation)])


def test_the_order_of_the_files_does_not_matter(tmp_path, roles):
    folder = make_data_folder(tmp_path)
    for name in ("30k_test", "30k_train_partial"):
        rewrite(folder / f"beavertails/{name}.jsonl", lambda rows: random.Random(1).sample(rows, len(rows)))
    shuffled = draw_roles(SETTINGS, folder=folder)
    for role in ROLES:
        assert ids(getattr(shuffled, role)) == ids(getattr(roles, role)), role
    assert shuffled.record["sha256"] == roles.record["sha256"]
    assert shuffled.record["sources"] != roles.record["sources"]


def test_a_smaller_role_is_the_beginning_of_a_larger_one(folder, roles):
    smaller = draw_roles(replace(SETTINGS, harmful=6), folder=folder)
    assert smaller.harmful == roles.harmful[:6]
    assert smaller.align == roles.align


def test_seeds_draw_different_roles(folder, roles):
    other = draw_roles(replace(SETTINGS, seed=4), folder=folder)
    assert all(other.record["sha256"][role] != roles.record["sha256"][role] for role in ROLES)


def test_every_role_has_a_stream_of_its_own(folder):
    """Two roles of one pool and one size, each drawn without the other."""
    poison = draw_roles(replace(SETTINGS, poison=15, harmful=0), folder=folder).poison
    harmful = draw_roles(replace(SETTINGS, poison=0, harmful=15), folder=folder).harmful
    assert set(ids(poison)) != set(ids(harmful))


def test_the_record_is_json_without_text(roles):
    text = json.dumps(roles.record)
    assert json.loads(text) == roles.record
    for role in ROLES:
        for example in getattr(roles, role):
            assert example.prompt not in text
    assert roles.record["contradictory_prompts"] == 6
    assert [source["partial"] for source in roles.record["sources"]] == [True, False]


def test_empty_and_repeated_pairs_are_skipped_and_counted(tmp_path):
    folder = make_data_folder(tmp_path)
    rewrite(
        folder / "beavertails/30k_train_partial.jsonl",
        lambda rows: [{**rows[0], "response": " \n"}, {**rows[1], "response": ""}, *rows, rows[0], rows[0]],
    )
    roles = draw_roles(SETTINGS, folder=folder)
    assert roles.record["skipped"] == {"empty_responses": 2, "duplicates": 2}
    assert all(example.completion.strip() for role in ROLES[1:] for example in getattr(roles, role))


def test_too_few_rows_name_the_role_the_numbers_and_the_partial_source(folder, roles):
    taken = {e.prompt for role in ROLES if role != "harmful" for e in getattr(roles, role)}
    rows = load("beavertails", "train", folder=folder).rows
    left = sum(not row["is_safe"] and row["prompt"] not in taken for row in rows)
    with pytest.raises(DataError, match=f"role harmful: 500 examples are asked for, {left} are left") as error:
        draw_roles(replace(SETTINGS, harmful=500), folder=folder)
    assert "holds only part of beavertails train" in error.value.what
    assert "complete data set" in error.value.remedy
    (folder / "beavertails/30k_train_partial.jsonl").rename(folder / "beavertails/30k_train.jsonl")
    try:
        with pytest.raises(DataError, match="role align") as error:
            draw_roles(replace(SETTINGS, align=500), folder=folder)
    finally:
        (folder / "beavertails/30k_train.jsonl").rename(folder / "beavertails/30k_train_partial.jsonl")
    assert "only part" not in str(error.value)


def test_five_roles_may_be_empty(folder):
    empty = ("monitor", "certify", "asked", "harmful", "poison")
    roles = draw_roles(replace(SETTINGS, **dict.fromkeys(empty, 0)), folder=folder)
    assert [getattr(roles, role) for role in empty] == [()] * 5


def test_a_pair_of_both_labels_is_neither_safe_nor_unsafe(tmp_path):
    """All safe pairs but 40 are also labelled unsafe: no role may take one of them."""
    folder = make_data_folder(tmp_path)
    safe = [row for row in json_rows(folder) if row["is_safe"]]
    doubtful = {(row["prompt"], row["response"]) for row in safe[40:]}
    again = [{**row, "is_safe": False, "label_source": "is_safe_flag"} for row in safe[40:]]
    rewrite(folder / "beavertails/30k_train_partial.jsonl", lambda rows: rows + again)
    roles = draw_roles(SETTINGS, folder=folder)
    drawn = {(e.prompt, e.completion) for role in ROLES for e in getattr(roles, role)}
    assert not drawn & doubtful
    assert roles.record["skipped"]["pairs_of_both_labels"] == len(doubtful)
    with pytest.raises(DataError, match="role align: 21 examples are asked for, 20 are left"):
        draw_roles(replace(SETTINGS, align=21), folder=folder)


def test_asking_more_leaves_the_roles_before_it_as_they_are(folder, roles):
    more = draw_roles(replace(SETTINGS, asked=9), folder=folder)
    assert more.asked[:4] == roles.asked
    for role in ROLES[: ROLES.index("asked")]:
        assert getattr(more, role) == getattr(roles, role), role
    assert roles.record["groups"]["asked"] == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("align", 0), ("evaluation", 0), ("constraint", 0), ("poison", -1), ("certify", 1.5), ("monitor", True),
     ("safe", "beavertail"), ("harm_prompts", "advbench")],
    ids=str,
)  # fmt: skip
def test_sizes_and_sources_are_checked(field, value):
    run = {"model": "embedded", "task": {"name": "sst2"}, "roles": {field: value}, "output_dir": "out"}
    with pytest.raises(ConfigError, match=f"roles.{field}"):
        config_from_dict(run)


def test_normalised_prompts_of_two_roles_never_meet(roles):
    homes = {}
    for role in ROLES:
        if role != "constraint":
            for example in getattr(roles, role):
                assert homes.setdefault(normalise(example.prompt), role) == role
