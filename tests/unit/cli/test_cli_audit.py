"""`holdfast audit` from the command line: output, exit codes, runs, interruption."""

from __future__ import annotations

import json
import shutil

import pytest
from tests.serving import Server, echoing
from tests.unit.auditing.making import write_adapter
from tests.unit.cli.conftest import rows

import holdfast as hf


@pytest.fixture(scope="session")
def adapter(tmp_path_factory, tiny_model):
    return write_adapter(tmp_path_factory.mktemp("adapter"), tiny_model)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "safety.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows("safety")[:12]), encoding="utf-8")
    return path


def options(tiny_model, adapter, data, tmp_path):
    return (
        "--before",
        tiny_model,
        "--after",
        adapter,
        "--safety",
        data,
        "--output",
        tmp_path / "out",
        "--device",
        "cpu",
    )


def test_over_the_limit_exits_4_and_shows_no_text(holdfast, tiny_model, adapter, data, tmp_path):
    code, out, err = holdfast("audit", *options(tiny_model, adapter, data, tmp_path), "--tau", "0", "--alpha", "0.01")
    assert code == 4
    lines = out.splitlines()
    assert lines[0].endswith("at most 1 % allowed: OVER the limit")
    assert lines[1].split() == ["q50", "q75", "q90", "q95", "q99", "max", "cvar"]
    assert [line.split()[0] for line in lines[2:7]] == ["nll_token", "nll_sum", "nll_first", "kl_token", "kl_first"]
    assert "audit 24/24 forward passes" in err
    assert "steal" not in out + err
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["unit"] == "kl_token"  # as in run files


def test_json_is_one_object_and_within_exits_0(holdfast, tiny_model, adapter, data, tmp_path):
    arguments = (*options(tiny_model, adapter, data, tmp_path), "--tau", "50", "--unit", "nll_sum", "--json")
    code, out, _ = holdfast("audit", *arguments)
    assert code == 0
    found = json.loads(out)
    assert found == json.loads((tmp_path / "out" / "audit.json").read_text())
    assert (found["violation_rate"], found["n"], found["unit"], found["tau"]) == (0.0, 12, "nll_sum", 50.0)
    assert set(found["quantiles"]) == {"q50", "q75", "q90", "q95", "q99", "max"}
    assert found["mode"] == "adapter"
    again = holdfast("audit", *arguments)
    assert (again[0], json.loads(again[1])) == (0, found)
    direct = hf.audit(str(tiny_model), adapter, data, hf.ChanceConstraint(tau=50.0, unit="nll_sum"), device="cpu")
    assert direct.units == found["units"]


def test_columns_and_category(holdfast, tiny_model, adapter, tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps({"question": "steal lamp", "answer": "no", "kind": "theft"}) + "\n", encoding="utf-8")
    mapping = [
        part for pair in ("prompt=question", "completion=answer", "category=kind") for part in ("--columns", pair)
    ]
    code, _, _ = holdfast("audit", *options(tiny_model, adapter, path, tmp_path), *mapping, "--tau", "50")
    assert code == 0
    assert hf.Audit.load(tmp_path / "out").table.column("category").to_pylist() == ["theft"]


def test_interruption_exits_130_and_the_same_command_continues(
    holdfast, tiny_model, adapter, data, tmp_path, monkeypatch
):
    from holdfast.auditing import windows
    from holdfast.auditing.results import FOLDER, PartialResults

    monkeypatch.setattr(windows, "WINDOW", 5)
    write = PartialResults.write

    def interrupted(self, name, number, *rest):
        write(self, name, number, *rest)
        if number == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(PartialResults, "write", interrupted)
    arguments = (*options(tiny_model, adapter, data, tmp_path), "--tau", "50")
    code, out, err = holdfast("audit", *arguments)
    assert (code, out) == (130, "")
    assert "the same command continues" in err
    assert len(list((tmp_path / "out" / FOLDER).glob("both-*"))) == 2
    monkeypatch.setattr(PartialResults, "write", write)
    assert holdfast("audit", *arguments)[0] == 0


def test_a_run_is_audited_on_its_constraint_and_monitor_splits(holdfast, run_file, tmp_path):
    assert holdfast("train", run_file)[0] in (0, 4)
    code, out, err = holdfast("audit", tmp_path / "out", "--device", "cpu", "--json")
    assert code in (0, 4), err
    found = json.loads(out)
    assert set(found["roles"]) == {"constraint", "monitor"}
    assert found["role"] == "monitor"
    result = json.loads((tmp_path / "out" / "result.json").read_text())["safety"]["safety"]
    for role in ("constraint", "monitor"):
        assert found["roles"][role]["n"] == result[role]["n"]
        assert found["roles"][role]["violation_rate"] == pytest.approx(result[role]["violation_rate"])
        assert found["roles"][role]["cvar"] == pytest.approx(result[role]["cvar"], abs=1e-4)
    splits = json.loads((tmp_path / "out" / "splits.json").read_text())
    ids = set(hf.Audit.load(tmp_path / "out" / "audit").table.column("id").to_pylist())
    assert ids == {*splits["ids"]["constraint"], *splits["ids"]["monitor"]}
    assert not ids & set(splits["ids"]["certify"])
    _, out, _ = holdfast("audit", tmp_path / "out", "--device", "cpu")
    assert out.splitlines()[1].split()[:2] == ["monitor:", "q50"]


def test_the_ledger_of_looks_may_lie_elsewhere(holdfast, tiny_model, adapter, data, tmp_path):
    arguments = options(tiny_model, adapter, data, tmp_path)
    code, _, err = holdfast("audit", *arguments, "--ledger", tmp_path / "book.json", "--tau", "50")
    assert code == 0
    assert f"noted in {tmp_path / 'book.json'}" in err
    assert not data.with_name(f"{data.name}.openings.json").exists()
    code, _, err = holdfast("audit", tmp_path / "run", "--ledger", tmp_path / "book.json")
    assert code == 2
    assert "a run and --ledger are both given" in err


def test_a_judge_with_probabilities_adds_on_policy_regressions(holdfast, tiny_model, tmp_path, monkeypatch):
    from holdfast.judging.judge import JUDGES, Judgement, Verdict

    class Steady:
        """Finds every reply as probable as the next."""

        name, revision = "steady", "1"

        def __init__(self, *, level=0.2):
            self.level = level

        def judge(self, prompts, replies):
            return [Judgement(Verdict.SAFE, self.level) for _ in replies]

    _ = JUDGES["refusal"]  # the package is read before an entry is added for this test
    monkeypatch.setattr(JUDGES, "_entries", {**JUDGES._entries, "steady": Steady})
    safety = tmp_path / "safety.jsonl"
    safety.write_text(json.dumps({"prompt": "take red spade", "completion": "Sorry."}) + "\n", encoding="utf-8")
    models = ("--before", tiny_model, "--after", tiny_model, "--safety", safety, "--device", "cpu")
    options = ("--judge", "steady:level=0.3", "--max-new-tokens", 3, "--harm-tau", 0.2, "--output", tmp_path / "out")
    code, out, _ = holdfast("audit", *models, *options)
    assert code == 0
    assert "on_policy: 0 of 1 replies more than 0.2 above before's in the judge's probability" in out
    shown = json.loads((tmp_path / "out/audit.json").read_text())["behaviour"]["on_policy"]
    assert (shown["tau"], shown["regressions"], shown["n"]) == (0.2, 0, 1)


def test_a_model_behind_an_endpoint(holdfast, tiny_model, adapter, data, tmp_path):
    """With an adapter as the model before: no KL is asked for. Report and compare do not take it for known weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    server, given = Server(), options(adapter, "", data, tmp_path)
    server.script = echoing(AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model))
    served = f"endpoint:base_url={server.url},model_name=m"
    try:
        code, out, err = holdfast("audit", *given, "--after", served, "--alpha", "0.99", "--tau", "9")
        turned = ("--before", f"{served},tokenizer={tiny_model}", "--after", adapter, "--alpha", "0.99", "--tau", "9")
        assert holdfast("audit", *given, *turned, "--output", tmp_path / "turned")[0] == 0
    finally:
        server.close()
    assert code == 0, err
    assert out.splitlines()[0].endswith(f"the weights of m at {server.url} (an endpoint) were not seen")
    forward, back = (hf.Audit.load(tmp_path / name) for name in ("out", "turned"))
    assert forward.unit == "nll_token"
    assert forward.degradations() == pytest.approx(-back.degradations(), abs=1e-5)
    assert abs(forward.degradations()).max() > 0.01
    page = hf.report(tmp_path / "out", output=tmp_path / "page.html").path.read_text()
    assert "none: an endpoint, whose weights were not seen" in page
    shutil.copytree(tmp_path / "turned", tmp_path / "again")
    code, _, err = holdfast("compare", tmp_path / "turned", tmp_path / "again")
    assert (code, "differ in reference model" in err) == (6, True)
