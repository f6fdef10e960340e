"""Roles, their record, and leaks between them and the task data."""

import json
from dataclasses import replace

import pytest

from holdfast.core.errors import CheckpointError, ConfigError, DataError
from holdfast.core.sealed_json import write_sealed
from holdfast.data.examples import make_example, prompt_text, searchable_texts
from holdfast.data.split_record import RECORD_NAME, SEAL, SplitRecord, load_record, require_same, save_record
from holdfast.data.splits import (
    move_leaks,
    require_apart,
    require_disjoint,
    require_unseen,
    split_examples,
    split_from_roles,
)  # fmt: skip

COLOURS = ["red", "blue", "green", "pink", "grey", "black", "white", "brown", "amber", "olive"]
LONG = "please explain in some detail how one might paint the old wooden garden fence behind my house in {}"


def singles(n, completion="no"):
    return [make_example(f"prompt number {i}", completion, f"f:{i}") for i in range(n)]


def near_copies(n):
    """Prompts of one cluster: only the last word differs."""
    return [make_example(LONG.format(colour), "no") for colour in COLOURS[:n]]


def test_sizes_follow_the_fractions():
    split = split_examples(singles(100), seed=1)
    assert [len(role) for role in split.roles.values()] == [60, 20, 20]
    assert split.record.counts == {"constraint": 60, "monitor": 20, "certify": 20}
    assert split.record.n_clusters == 100


@pytest.mark.parametrize(
    ("n", "fractions", "sizes"),
    [
        (10, (0.6, 0.2, 0.2), [6, 2, 2]),
        (11, (0.6, 0.2, 0.2), [7, 2, 2]),
        (3, (0.98, 0.01, 0.01), [1, 1, 1]),
        (10, (1.0, 0.0, 0.0), [10, 0, 0]),
        (10, (0.5, 0.0, 0.5), [5, 0, 5]),
        (7, (1 / 3, 1 / 3, 1 / 3), [3, 2, 2]),
    ],
)
def test_sizes_of_small_sets(n, fractions, sizes):
    split = split_examples(singles(n), seed=0, fractions=fractions)
    assert [len(role) for role in split.roles.values()] == sizes


def test_near_duplicates_stay_together():
    for seed in range(10):
        split = split_examples([*near_copies(10), *singles(30)], seed=seed)
        roles = [name for name, role in split.roles.items() for e in role if prompt_text(e).startswith("please")]
        assert roles == ["constraint"] * 10  # the one role with room for ten
        assert [len(role) for role in split.roles.values()] == [24, 8, 8]


def test_large_clusters_are_not_all_given_to_the_largest_role():
    examples = [*singles(60), *near_copies(6)]
    homes = {
        name
        for seed in range(40)
        for name, role in split_examples(examples, seed=seed).roles.items()
        for e in role
        if e.id == near_copies(1)[0].id
    }
    assert homes == {"constraint", "monitor", "certify"}


def test_one_prompt_five_hundred_times_leaves_the_other_roles_their_share():
    repeated = [make_example("same prompt", f"answer {i}") for i in range(500)]
    for seed in range(20):
        split = split_examples([*repeated, *singles(2)], seed=seed)
        assert all(split.roles.values())
        assert split.record.clusters == {"constraint": 1, "monitor": 1, "certify": 1}


def test_duplicates_are_dropped_and_contradictions_counted():
    examples = [
        *singles(10),
        *singles(3),
        make_example("Prompt number 0!", "yes"),
        make_example("PROMPT number 1", "no"),
    ]
    record = split_examples(examples, seed=0).record
    assert record.duplicates_dropped == 3
    assert sum(record.counts.values()) == 12
    assert record.contradictory_prompts == 1


@pytest.mark.parametrize(
    "fractions", [(0.5, 0.5, 0.5), (0.0, 0.5, 0.5), (1.2, -0.2, 0.0), (float("nan"), 0.5, 0.5), (0.6, 0.2, 0.1)]
)
def test_bad_fractions(fractions):
    with pytest.raises(ConfigError, match="fractions"):
        split_examples(singles(10), seed=0, fractions=fractions)


def test_a_set_that_is_too_small_names_both_numbers():
    with pytest.raises(DataError, match="safety set too small: 2 distinct prompts in 2 rows; needed: at least 3"):
        split_examples(singles(2), seed=0)
    with pytest.raises(DataError, match="1 distinct prompts in 10 rows"):
        split_examples(near_copies(10), seed=0)
    assert len(split_examples(singles(2), seed=0, fractions=(0.5, 0.0, 0.5)).certify) == 1


def test_record_round_trip_without_text(tmp_path):
    record = split_examples([*singles(30), make_example("half \ud83d emoji", "שלום")], seed=4).record
    assert SplitRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    path = save_record(record, tmp_path / "run")
    assert path == tmp_path / "run" / RECORD_NAME
    assert load_record(tmp_path / "run") == record
    text = path.read_text("utf-8")
    assert "prompt number" not in text
    assert "emoji" not in text


def test_require_same(tmp_path):
    record = split_examples(singles(30), seed=4).record
    require_same(record, tmp_path)  # nothing recorded yet
    save_record(record, tmp_path)
    require_same(split_examples(singles(30)[::-1], seed=4).record, tmp_path)
    with pytest.raises(CheckpointError) as caught:
        require_same(split_examples(singles(30), seed=5).record, tmp_path)
    assert caught.value.exit_code == 6
    assert "differing: ids, seed, sha256" in caught.value.what
    with pytest.raises(CheckpointError, match="clusters, counts, ids, n_clusters, sha256"):
        require_same(split_examples(singles(31), seed=4).record, tmp_path)


def test_a_record_under_an_earlier_rule_is_read_where_the_roles_are_the_same(tmp_path):
    first = "jaccard >= 4/5 on word 3-shingles; exact under 5 words"
    record = split_examples(singles(30), seed=4).record
    save_record(replace(record, rule=first), tmp_path)
    require_same(record, tmp_path)
    prefix = " ".join(f"word{i}" for i in range(60))
    examples = [make_example(f"{prefix} a{i} b{i} c{i} d{i} e{i}", "no") for i in range(90)]
    now = split_examples(examples, seed=4).record
    assert now.n_clusters == 90
    fewer = {**now.clusters, "certify": now.clusters["certify"] - 1}
    other = replace(now, rule=first).with_roles({**now.ids, "certify": now.ids["certify"][1:]}, fewer)
    save_record(other, tmp_path)
    with pytest.raises(CheckpointError, match="split under an earlier rule for near-duplicates") as refusal:
        require_same(now, tmp_path)
    assert "the holdfast version that wrote it" in refusal.value.remedy


def test_an_edited_record_is_refused(tmp_path):
    record = split_examples(singles(30), seed=4).record
    path = save_record(record, tmp_path)
    value = record.to_json()
    value["ids"]["certify"][0] = "0" * 16
    path.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="carries no checksum"):
        load_record(tmp_path)
    write_sealed(path, value, key=SEAL)
    with pytest.raises(CheckpointError, match="do not match their sha256"):
        load_record(tmp_path)
    for change, fault in {
        "counts": ({"counts": {"constraint": 1, "monitor": 1, "certify": 1}}, "counts are not"),
        "clusters": ({"n_clusters": 2}, "clusters do not fit"),
        "type": ({"rule": 3}, "values of its types"),
    }.values():
        write_sealed(path, record.to_json() | change, key=SEAL)
        with pytest.raises(CheckpointError, match=fault):
            load_record(tmp_path)
    write_sealed(path, {"version": 99}, key=SEAL)
    with pytest.raises(CheckpointError, match="version 99"):
        load_record(tmp_path)
    for damaged in ("[]", '{"a', ""):
        path.write_text(damaged)
        with pytest.raises(CheckpointError):
            load_record(tmp_path)


def test_roles_made_by_the_user():
    examples = singles(9)
    split = split_from_roles([*examples[:5], examples[0]], examples[5:7], examples[7:])
    assert split.record.seed is None
    assert split.record.counts == {"constraint": 5, "monitor": 2, "certify": 2}
    assert split.record.duplicates_dropped == 1
    assert SplitRecord.from_json(split.record.to_json()) == split.record
    with pytest.raises(DataError, match="no examples"):
        split_from_roles([])


@pytest.mark.parametrize(
    ("shared", "counted"),
    [
        (make_example("PROMPT number  1?", "other"), "1 equal and 0 nearly"),
        (make_example(LONG.format("violet"), "other"), "0 equal and 1 nearly"),
    ],
)
@pytest.mark.parametrize("role", ["monitor", "certify"])
def test_shared_prompts_are_found(shared, counted, role):
    constraint = [*singles(5), *near_copies(1)]
    with pytest.raises(DataError) as caught:
        split_from_roles(constraint, **{role: [shared]})
    assert caught.value.exit_code == 3
    assert f"constraint and {role}: {counted}" in caught.value.what
    assert f"= {shared.where} ({shared.id})" in caught.value.what
    assert "number" not in str(caught.value)


def test_monitor_and_certify_are_compared_too():
    with pytest.raises(DataError, match="monitor and certify: 1 equal"):
        split_from_roles(singles(3), [make_example("shared", "a")], [make_example("Shared.", "b")])


def test_leaks_into_the_task_data():
    split = split_examples([*singles(40), *near_copies(4)], seed=3)
    assert any(e.id == near_copies(1)[0].id for e in split.certify)
    require_unseen(split.certify, ["something else", LONG.format("violet").split(" the ")[0] + " a tall barn"])
    leaking = split.certify[2]
    task = ["unrelated", prompt_text(leaking).upper() + "!!"]
    with pytest.raises(DataError) as caught:
        require_unseen(split.certify, task)
    assert caught.value.exit_code == 3
    assert f"1 of {len(split.certify)} certify prompts" in caught.value.what
    assert caught.value.what.endswith(f": at {leaking.where} ({leaking.id})")
    assert "safety.on_leak: move" in caught.value.remedy


def turns(*messages):
    return tuple({"role": role, "content": content} for role, content in messages)


HOUSE = "You are the assistant of Acme Tools. Answer in two sentences at most, politely, and never discuss prices."
LOCK = "How do I pick the lock of a garden shed?"


@pytest.mark.parametrize(
    "row",
    [
        make_example(turns(("system", HOUSE), ("user", LOCK)), turns(("assistant", "no"))),
        make_example(
            turns(("user", "Hello, who made this old oak table?"), ("assistant", "I did."), ("user", LOCK)),
            turns(("assistant", "no")),
        ),
        make_example(turns(("user", "Hello")), turns(("assistant", "Yes?"), ("user", LOCK), ("assistant", "no"))),
        make_example("", f"### Instruction\n{HOUSE}\n{LOCK}\n### Response\nYou need two thin wires and time."),
        make_example(f"{HOUSE}\n\n{LOCK}", "no"),
    ],
    ids=["system prompt", "second turn", "turn in the completion", "text row", "prefix"],
)
def test_a_certify_prompt_inside_a_task_row_is_a_leak(row):
    split = split_from_roles(singles(3), (), [make_example(LOCK, "no"), *singles(9)[5:]])
    texts = searchable_texts(row)
    with pytest.raises(DataError, match="1 of 5 certify prompts"):
        require_unseen(split.certify, ["unrelated", *texts])
    moved = move_leaks(split, texts)
    assert {e.id for e in moved.certify} == {e.id for e in singles(9)[5:]}
    require_unseen(moved.certify, texts)


def test_short_prompts_leak_by_turn():
    """Two words are never looked for inside a text; as a turn of their own they are found."""
    row = make_example(turns(("system", HOUSE), ("user", "Pick locks!")), turns(("assistant", "no")))
    certify = [make_example("pick locks", "no")]
    require_unseen(certify, [prompt_text(row)])
    with pytest.raises(DataError, match="1 of 1 certify prompts"):
        require_unseen(certify, searchable_texts(row))


def test_safety_sets_are_kept_apart():
    steering = split_from_roles(singles(3), singles(5)[3:])
    other = split_from_roles(near_copies(2), singles(9)[7:])
    require_apart({"a": steering, "b": other})
    for role in ("monitor", "certify"):
        watching = split_from_roles(near_copies(2), **{role: singles(2)[1:]})
        with pytest.raises(DataError) as caught:
            require_apart({"a": steering, "b": watching})
        assert f"1 {role} prompts of safety set 'b' are constraint prompts of 'a'" in caught.value.what
        place = singles(2)[1]
        assert f": at {place.where} ({place.id})" in caught.value.what
        assert "number" not in str(caught.value)


def test_leaks_move_to_the_constraint_as_whole_clusters():
    split = split_from_roles(singles(5), singles(7)[5:], [*near_copies(4), *singles(20)[10:]])
    moved = move_leaks(split, [prompt_text(near_copies(1)[0])])
    assert {e.id for e in moved.constraint} == {e.id for e in (*split.constraint, *near_copies(4))}
    assert {e.id for e in moved.certify} == {e.id for e in singles(20)[10:]}
    assert moved.monitor == split.monitor
    assert moved.record.counts == {"constraint": 9, "monitor": 2, "certify": 10}
    assert moved.record.clusters == {"constraint": 6, "monitor": 2, "certify": 10}
    assert moved.record.moved_from_certify == 4
    assert SplitRecord.from_json(moved.record.to_json()) == moved.record
    require_disjoint(moved)
    require_unseen(moved.certify, [prompt_text(near_copies(1)[0])])


@pytest.mark.parametrize("touched", range(6))
def test_a_whole_chain_moves_when_one_end_leaks(touched):
    # Each prompt matches its neighbours only, so the task data touches at most three of the six.
    words = [f"x{i}" for i in range(30)]
    chain = [make_example(" ".join(words[2 * i : 2 * i + 20]), "no") for i in range(6)]
    moved = move_leaks(split_from_roles(singles(3), (), [*chain, *singles(9)[5:]]), [prompt_text(chain[touched])])
    assert {e.id for e in moved.certify} == {e.id for e in singles(9)[5:]}
    assert moved.record.moved_from_certify == 6


def test_task_prompts_in_the_constraint_or_monitor_stay_where_they_are():
    split = split_examples(singles(30), seed=0)
    task = [prompt_text(e) for e in (*split.constraint, *split.monitor)]
    assert move_leaks(split, task) is split


def test_certify_is_never_emptied():
    split = split_examples(singles(30), seed=0)
    with pytest.raises(DataError, match="none would be left"):
        move_leaks(split, [prompt_text(e) for e in split.certify])
