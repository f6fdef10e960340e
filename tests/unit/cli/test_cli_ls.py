"""`holdfast ls tasks`: names, summaries and headline match, without loading what only training needs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import get_args

from holdfast.cli.ls import Kind
from holdfast.core.units import UNITS
from holdfast.scoring import degradation


def test_ls_lists_the_tasks(holdfast):
    code, out, _ = holdfast("ls", "tasks")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["ag_news", "gsm8k", "sst2"]
    code, as_json, _ = holdfast("ls", "tasks", "--json")
    rows = json.loads(as_json)
    assert [row["name"] for row in rows] == ["ag_news", "gsm8k", "sst2"]
    assert all(row["summary"] and row["metric"] == "lenient" for row in rows)


def test_ls_without_an_argument_says_what_can_be_listed(holdfast):
    code, out, _ = holdfast("ls")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [*get_args(Kind), "holdfast"]
    code, as_json, _ = holdfast("ls", "--json")
    assert [row["name"] for row in json.loads(as_json)] == list(get_args(Kind))


def test_ls_lists_the_units_with_their_formulas(holdfast):
    code, out, _ = holdfast("ls", "units")
    assert code == 0
    rows = json.loads(holdfast("ls", "units", "--json")[1])
    assert [row["name"] for row in rows] == [line.split()[0] for line in out.splitlines()] == list(UNITS)
    formulas = (degradation.__doc__ or "").split("|")
    listed = dict(zip(formulas[1::3], formulas[2::3], strict=False))
    stated = {name.strip(" `"): words.strip() for name, words in listed.items() if "`" in name}
    assert {row["name"]: row["summary"] for row in rows} == stated


def test_listing_the_tasks_needs_no_torch():
    code = (
        "import sys; sys.argv = ['holdfast', 'ls', 'tasks']\n"
        "from holdfast.cli.main import main\n"
        "try: main()\n"
        "finally: print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"


def test_ls_lists_the_defenses_in_columns(holdfast):
    code, out, _ = holdfast("ls", "defenses")
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= 120
    names = [line.split()[0] for line in lines[1:] if line and not line.startswith(" ")]
    code, as_json, _ = holdfast("ls", "defenses", "--json")
    rows = {row["name"]: row for row in json.loads(as_json)}
    assert names == list(rows)
    at = [lines[0].index(word) for word in ("stage", "passes", "side data", "reference")]
    below = lines[next(i for i, line in enumerate(lines) if line.startswith("booster ")) + 1]
    cells = [below[a:b].strip() for a, b in zip(at, [*at[1:], None], strict=True)]
    assert cells == ["align", "3 forward + backward", "harmful", "Huang et al., Booster, ICLR 2025"]
    booster = rows["booster"]
    assert (booster["stages"], booster["needs"]) == (["align"], ["harmful"])
    assert (booster["fsdp"], booster["deepspeed"], rows["salora"]["fsdp"]) == (True, False, False)
    assert booster["options"]["lam"] == booster["paper"]["lam"] == 5.0


def test_the_list_of_defenses_says_all_that_the_classes_say(holdfast):
    from holdfast.training.hooks import DEFENSES

    _, out, _ = holdfast("ls", "defenses")
    words = " ".join(out.split())
    for name, cls in DEFENSES.items():
        assert f"{name} {cls.summary}" in words
        assert all(word in words for word in (*cls.passes.split(), *cls.reference.split(), *cls.stages, *cls.needs))
