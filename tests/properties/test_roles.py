"""What holds for every draw of roles: on invented prompts of few words, and on the real data where it is at hand."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import DataError
from holdfast.data.examples import normalise
from holdfast.data.near_duplicates import clusters, contained
from holdfast_lab.data.catalogue import CATEGORIES, Collection
from holdfast_lab.protocol import roles as pools
from holdfast_lab.protocol.roles import ROLES, RoleSettings, draw_roles

APART = [role for role in ROLES if role != "constraint"]
REAL = os.environ.get("HOLDFAST_DATA")

# Few words make near-duplicates, containment and both labels common.
WORD = st.sampled_from([f"w{i}" for i in range(9)])
PROMPTS = st.lists(WORD, min_size=1, max_size=10).map(" ".join)
PAIRS = st.lists(st.tuples(PROMPTS, st.booleans(), st.integers(0, 3)), min_size=12, max_size=40)
SIZES = st.tuples(*[st.integers(0, 3)] * 5)


def make_settings(**sizes):
    common = {"safe": "beavertails", "harm_prompts": "beavertails_test", "constraint": None, "seed": 0}
    return RoleSettings(**{**common, **sizes})


def assert_disjoint(roles):
    """By the definitions themselves, all roles at once, with none of the code that groups prompts."""
    found = [(example.prompt, role) for role in APART for example in getattr(roles, role)]
    texts, home = [text for text, _ in found], [role for _, role in found]
    for label in (list(map(normalise, texts)), clusters(texts)):
        assert len(set(zip(label, home, strict=True))) == len(set(label))
    assert all(home[i] == home[j] for i, j in contained(texts, texts, ignore_common=False))


def collection(rows, split):
    return Collection("beavertails", split, rows, "folder", None, "0" * 64)


def row(prompt, safe, number):
    return {"prompt": prompt, "response": f"r{number}", "is_safe": safe, "categories": [] if safe else [CATEGORIES[0]]}


@settings(max_examples=60, deadline=None)
@given(PAIRS, PAIRS, SIZES, st.integers(0, 3))
def test_roles_never_share_a_prompt(train, test, sizes, seed):
    rows = {"train": [row(*pair) for pair in train], "test": [row(*pair) for pair in test]}
    held_out = dict(zip(("monitor", "certify", "asked", "poison", "harmful"), sizes, strict=True))
    wanted = make_settings(align=1, evaluation=1, seed=seed, **held_out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "load", lambda _, split=None, **__: collection(rows[split], split))
        try:
            roles = draw_roles(wanted)
        except DataError:  # too few rows: refused before anything is returned
            return
    assert roles.record["counts"] == {role: len(getattr(roles, role)) for role in ROLES}
    assert all(roles.record["counts"][role] == getattr(wanted, role) for role in APART)
    assert_disjoint(roles)


needs_data = pytest.mark.skipif(not REAL, reason="HOLDFAST_DATA is not set")


@needs_data
@pytest.mark.parametrize("safe", ["beavertails", "refusals"])
@pytest.mark.parametrize("harm_prompts", ["beavertails_test", "beavertails_evaluation"])
def test_roles_of_the_real_data_share_no_prompt(safe, harm_prompts):
    wanted = make_settings(
        safe=safe, harm_prompts=harm_prompts, align=800, monitor=150, certify=300, asked=700, poison=500,
        harmful=1000, evaluation=700,
    )  # fmt: skip
    roles = draw_roles(wanted, folder=Path(REAL))
    assert roles.record["counts"] == {role: len(getattr(roles, role)) for role in ROLES}
    assert_disjoint(roles)


@needs_data
def test_the_sizes_of_the_paper_fit_into_all_prompts_of_the_train_split(tmp_path):
    """The complete split with invented replies: 2,482 of its prompts carry both labels."""
    real = Path(REAL) / "beavertails"
    (tmp_path / "beavertails").mkdir()
    (tmp_path / "beavertails/30k_test.jsonl").symlink_to(real / "30k_test.jsonl")
    labelled = [json.loads(line) for line in (real / "30k_train_prompts_labels.jsonl").read_text().splitlines()]
    assert len(labelled) == 27186
    both = Counter(prompt for prompt, _ in {(one["prompt"], one["is_safe"]) for one in labelled})
    assert sum(count == 2 for count in both.values()) == 2482
    marks = dict.fromkeys(CATEGORIES, False)
    with (tmp_path / "beavertails/30k_train.jsonl").open("w") as handle:
        for one in labelled:
            pair = {"prompt": one["prompt"], "is_safe": one["is_safe"], "response": f"reply {one['id']}"}
            handle.write(json.dumps(pair | {"category": marks}) + "\n")
    wanted = make_settings(align=5000, monitor=300, certify=500, poison=1000, harmful=5000, evaluation=1000)
    roles = draw_roles(wanted, folder=tmp_path)
    assert roles.record["contradictory_prompts"] == 2480  # two more differ in their spelling alone
    assert_disjoint(roles)
