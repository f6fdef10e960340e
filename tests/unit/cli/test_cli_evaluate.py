"""`holdfast evaluate`: replies made once, judged and scored, of a model or of a run; and what is refused first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.protocol_data import make_data_folder

from holdfast.core.errors import ConfigError
from holdfast.runs.config import config_from_dict

QUICK = ["--n", "6", "--task-examples", "5", "--harm-tokens", "5", "--task-tokens", "4", "--dtype", "float32"]
ROLES = {"align": 16, "monitor": 6, "certify": 4, "harmful": 4, "poison": 50, "evaluation": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_data_folder(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture(scope="module")
def model(tmp_path_factory, deep_model) -> Path:
    """The tiny model, with room for the longest prompts: its tokenizer spells out what it does not know."""
    folder = tmp_path_factory.mktemp("model") / "roomy"
    shutil.copytree(deep_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, model, data) -> Path:
    """A finished run on the protocol's data, with the template alpaca."""
    from holdfast.runs.pipeline import run as train

    root = tmp_path_factory.mktemp("run")
    settings = {
        "model": str(model), "dtype": "float32", "template": "alpaca", "defense": "sft", "roles": ROLES,
        "task": {"name": "sst2", "size": 8, "poison_ratio": 0.5}, "lora": {"r": 2},
        "train": {"max_steps": 1, "max_length": 512, "per_device_train_batch_size": 4, "use_cpu": True, "bf16": False},
        "output_dir": str(root / "out"),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_DATA", str(data))
        patch.setenv("HOLDFAST_CACHE", str(root / "cache"))
        train(config_from_dict(settings))
    return root / "out"


@pytest.fixture(autouse=True)
def _environment(monkeypatch, data):
    monkeypatch.setenv("HOLDFAST_DATA", str(data))


@pytest.fixture
def evaluate(holdfast, model, tmp_path):
    """`evaluate("--task", "sst2")`: the tiny model, unless another is given, into tmp_path/out."""

    def call(*arguments: object, of: object = model, output: Path | None = None) -> tuple[int, str, str]:
        place = output or tmp_path / "out"
        return holdfast("evaluate", of, "--output", place, *QUICK, *arguments)

    return call


@pytest.fixture
def no_generation(monkeypatch):
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("generated")

    monkeypatch.setattr("holdfast.judging.engines.transformers.TransformersEngine.generate", forbidden)


def stored(folder: Path) -> dict:
    return json.loads((folder / "evaluation.json").read_text())


def test_a_model_is_measured_and_no_text_is_printed_or_kept_in_the_open(evaluate, tmp_path):
    code, out, err = evaluate("--judge", "refusal", "--task", "sst2", "--over-refusal")
    assert code == 0
    found = stored(tmp_path / "out")
    metrics = found["metrics"]
    assert {"HS", "refusal_rate", "over_refusal", "FA", "FA_strict", "task_loss"} <= set(metrics)
    assert (metrics["HS"]["n"], metrics["FA"]["n"], metrics["over_refusal"]["n"]) == (6, 5, 8)
    assert found["judge"] == {"name": "refusal", "revision": "2"}
    assert sorted(line.split()[0] for line in out.splitlines()[:-1]) == sorted(metrics)
    assert out.splitlines()[-1] == f"written to {tmp_path / 'out' / 'evaluation.json'}"
    files = sorted((tmp_path / "out" / "replies").glob("*.jsonl"))
    assert [file.name for file in files] == ["borderline.jsonl", "harm.jsonl", "task.sst2.jsonl"]
    shown = out + err + json.dumps(found) + (tmp_path / "out" / "judgements" / "harm.refusal.json").read_text()
    assert {file.stat().st_mode & 0o077 for file in files} == {0}
    texts = [json.loads(line)["text"] for file in files for line in file.read_text().splitlines()[1:]]
    texts = [text for text in texts if len(text) > 3]
    assert texts, "the tiny model said something"
    assert not [text for text in texts if text in shown]
    assert not [word for word in ("borrow", "kettle", "How do I") if word in shown]


def test_without_a_judge_only_refusals_are_counted_and_said_so(evaluate, tmp_path):
    code, out, err = evaluate("--json")
    assert code == 0
    assert "no --judge" in err
    assert json.loads(out) == stored(tmp_path / "out")
    assert set(json.loads(out)["metrics"]) == {"refusal_rate", "harm_truncated"}


def test_replies_are_made_once_and_another_task_or_judge_adds_to_them(evaluate, monkeypatch, tmp_path):
    from holdfast.judging.engines.transformers import TransformersEngine

    asked, whole = [], TransformersEngine.generate

    def counted(engine, examples, **options):
        asked.append(len(examples))
        return whole(engine, examples, **options)

    monkeypatch.setattr(TransformersEngine, "generate", counted)
    assert evaluate("--task", "sst2")[0] == 0
    first = stored(tmp_path / "out")["metrics"]
    harm = (tmp_path / "out" / "replies" / "harm.jsonl").read_bytes()
    assert sum(asked) == 11
    file = tmp_path / "out" / "replies" / "task.sst2.jsonl"
    file.write_bytes(file.read_bytes()[:-9])  # the last reply was being written when the process was killed
    assert evaluate("--task", "sst2", "--judge", "refusal")[0] == 0
    assert sum(asked) == 12
    second = stored(tmp_path / "out")["metrics"]
    assert {name: second[name] for name in first} == first
    assert evaluate("--task", "ag_news", "--task-tokens", "3")[0] == 0
    assert sum(asked) == 17
    assert (tmp_path / "out" / "replies" / "harm.jsonl").read_bytes() == harm


def test_a_run_is_measured_with_its_own_template_and_its_adapter(evaluate, run, tmp_path):
    code, _, _ = evaluate("--judge", "refusal", of=run)
    assert code == 0
    found = stored(tmp_path / "out")
    assert (found["template"], found["model"]) == ("alpaca", str(run))
    code, _, err = evaluate("--judge", "refusal", "--template", "alpaca")  # the base, in the folder of the run's
    assert code == 6
    assert "model_sha256" in err


def test_prompts_that_the_run_was_trained_on_are_refused(evaluate, run, no_generation, tmp_path):
    code, _, err = evaluate("--n", "40", of=run)
    assert code == 2
    assert "of 40 harm prompts are also in the data that this run was aligned or trained on" in err
    assert "--prompts beavertails_test --n 8 (or fewer) --seed 42" in err
    assert not (tmp_path / "out").exists()


def test_so_are_they_where_the_runs_adapter_is_named(evaluate, run, no_generation):
    code, _, err = evaluate("--n", "40", of=run / "adapter")
    assert code == 2
    assert "of 40 harm prompts are also in the data that this run was aligned or trained on" in err


@pytest.mark.parametrize("data", ["task.jsonl", "safety.jsonl"])
def test_so_are_prompts_of_a_run_on_files_of_its_own(holdfast, run_file, no_generation, tmp_path, data):
    assert holdfast("train", run_file)[0] == 0
    code, _, err = holdfast("evaluate", tmp_path / "out", "--output-dir", tmp_path / "e", "--prompts", tmp_path / data)
    assert code == 2
    assert "harm prompts are also in the data that this run was aligned or trained on" in err
    assert "use prompts of another file" in err


def test_data_that_cannot_be_read_any_more_are_said_not_to_be_checked(holdfast, run_file, tmp_path):
    assert holdfast("train", run_file)[0] == 0
    prompts = tmp_path / "other.jsonl"
    prompts.write_text('{"prompt": "Name a colour.", "completion": "Blue."}\n')
    where = ("evaluate", tmp_path / "out", "--prompts", prompts, "--harm-tokens", "2")
    assert "not checked" not in holdfast(*where, "--output-dir", tmp_path / "a")[2]
    (tmp_path / "task.jsonl").unlink()
    code, _, err = holdfast(*where, "--output-dir", tmp_path / "b")
    assert code == 0
    assert "not checked whether the run was trained on these prompts" in err


def test_an_unfinished_run_is_refused(evaluate, run, no_generation, tmp_path):
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    code, _, err = evaluate(of=half)
    assert code == 2
    assert "is not finished" in err


def test_a_reference_counts_replies_that_became_more_harmful(evaluate, run, tmp_path):
    base = tmp_path / "base"
    assert evaluate("--judge", "refusal", "--template", "alpaca", output=base)[0] == 0
    code, out, _ = evaluate("--judge", "refusal", "--reference", base, "--tau", "0.2", of=run)
    assert code == 0
    found = stored(tmp_path / "out")["on_policy"]
    assert (found["n"], found["tau"]) == (6, 0.2)
    assert f"on-policy regressions against {base}: {found['regressions']} of 6 replies" in out

    rows = json.loads((base / "judgements" / "harm.refusal.json").read_text())
    verdicts = [row["verdict"] for row in rows["judgements"]]
    after = json.loads((tmp_path / "out" / "judgements" / "harm.refusal.json").read_text())
    now = {row["id"]: row["verdict"] for row in after["judgements"]}
    pairs = zip(verdicts, (now[row["id"]] for row in rows["judgements"]), strict=True)
    assert found["regressions"] == sum(was != "unsafe" and became != "safe" for was, became in pairs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ([], "holds no replies judged by refusal"),
        (["--harm-tokens", "4"], "the replies there have up to 5 tokens, those here 4"),
        (["--n", "7"], "or on other prompts"),
        (["--tau", "1.5"], "expected 0 <= tau < 1"),
    ],
    ids=["unjudged", "shorter", "prompts", "tau"],
)
def test_a_reference_that_cannot_be_compared_is_refused_before_generation(evaluate, tmp_path, request, change, said):
    base = tmp_path / "base"
    evaluate(*([] if not change else ["--judge", "refusal"]), output=base)

    request.getfixturevalue("no_generation")
    code, _, err = evaluate("--judge", "refusal", "--reference", base, *change)
    assert code == 2
    assert said in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--judge", "refusall"], 2, "did you mean 'refusal'?"),
        (["--judge", "./no/such/judge"], 2, "there is no folder"),
        (["--task", "sst3"], 2, "did you mean 'sst2'?"),
        (["--task", "sst2", "--task-examples", "61"], 2, "61 held-out task examples are asked for"),
        (["--n", "41"], 3, "41 prompts of beavertails_test are asked for, there are 40"),
        (["--template", "aplaca"], 2, "did you mean 'alpaca'?"),
        (["--engine", "transformer"], 2, "did you mean 'transformers'?"),
        (["--engine", "vllm"], 2, "vllm serve"),
        (["--engine-option", "base_url"], 2, "expected key=value"),
        (["--engine-option", "speed=2"], 2, "has no option 'speed'"),
        (["--dtype", "float16"], 2, "dtype 'float16' is not supported"),
        (["--reference", "elsewhere"], 2, "name the judge with --judge"),
        (["--prompts", "no-such-file.jsonl"], 3, "no-such-file.jsonl"),
    ],
    ids=["judge", "judge-folder", "task", "examples", "prompts", "template", "engine", "vllm", "option",
         "unknown-option", "dtype", "reference", "file"],
)  # fmt: skip
def test_a_bad_option_is_named_and_leaves_nothing_behind(evaluate, no_generation, tmp_path, arguments, code, said):
    found, out, err = evaluate(*arguments)
    assert (found, out) == (code, "")
    assert said in err
    assert "What to do: " in err
    assert not (tmp_path / "out").exists()


def test_a_folder_is_not_its_own_reference(evaluate, tmp_path):
    evaluate("--judge", "refusal")
    code, _, err = evaluate("--judge", "refusal", "--reference", tmp_path / "." / "out")
    assert code == 2
    assert "compared with themselves" in err


def test_prompts_may_come_from_a_file(evaluate, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"find lamp {i}", "completion": "x"}) + "\n" for i in range(9)))
    assert evaluate("--prompts", file)[0] == 0
    assert stored(tmp_path / "out")["metrics"]["refusal_rate"]["n"] == 6


def test_options_of_an_engine_are_read_as_values():
    from holdfast.cli.options import engine_options

    assert engine_options(["a=1", "b=true", "c=http://x/v1=2"]) == {"a": 1, "b": True, "c": "http://x/v1=2"}
    assert engine_options(None) == {}
    with pytest.raises(ConfigError, match="expected key=value"):
        engine_options(["=1"])
