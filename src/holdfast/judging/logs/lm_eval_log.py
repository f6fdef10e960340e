"""Logs of lm-eval: `samples_TASK_DATE.jsonl`, with `results_DATE.json` beside it for model and version.

A sample is its `doc_id`, with one row for each filter, so that a score is called `metric,filter` as in lm-eval's own
results, and `metric` where there is one filter. What a sample asks for is known by the hashes that lm-eval writes.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from holdfast.core.hashing import sha256_file, sha256_lines
from holdfast.judging.logs import evaluation_log as log
from holdfast.judging.logs.evaluation_log import EvaluationLog, LoggedSample, inner, loads, require, typed

MAX_LINE: Final = 64 << 20
MAX_ROWS: Final = 2_000_000
MAX_RESULTS: Final = 64 << 20
_NAME: Final = re.compile(r"samples_(?P<task>.{1,200}?)_(?P<date>\d{4}-\d\d-\d\dT[\d.:-]{1,40})\.jsonl")
_HASHES: Final = ("doc_hash", "prompt_hash", "target_hash")


def read_lm_eval(path: Path) -> EvaluationLog:
    """The log in a `samples_*.jsonl`."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for where, row in _rows(path):
        rows.setdefault(typed(row, "doc_id", int, where), []).append(row)
    filters = {str(row.get("filter", "none")) for alike in rows.values() for row in alike}
    samples = [_sample(path, number, alike, one_filter=len(filters) == 1) for number, alike in rows.items()]
    named = _NAME.fullmatch(path.name)
    task = named["task"] if named else path.stem.removeprefix("samples_")
    results = path.with_name(f"results_{named['date']}.json") if named else None
    about = loads(log.read_bounded(results, MAX_RESULTS), str(results)) if results and results.is_file() else None
    config = inner(about, "configs", task)
    config = config if isinstance(config, dict) else {}
    return EvaluationLog(
        path.name, sha256_file(path), "lm-eval",
        task=task,
        task_version=log.optional_text(inner(about, "versions"), task),
        dataset=log.optional_text(config, "dataset_path"),
        model=log.optional_text(about, "model_name"),
        settings={key: config.get(key) for key in ("num_fewshot", "generation_kwargs", "output_type", "description")},
        scorers={
            str(metric.get("metric")): {"higher_is_better": metric.get("higher_is_better")}
            for metric in config.get("metric_list") or () if isinstance(metric, dict)
        },
        samples=samples,
    )  # fmt: skip


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with path.open("rb") as handle:
            for number, line in enumerate(iter(lambda: handle.readline(MAX_LINE + 1), b""), start=1):
                where, too_long = f"{path}:{number}", f"a line over {MAX_LINE >> 20} MiB, or over {MAX_ROWS} lines"
                require(len(line) <= MAX_LINE and number <= MAX_ROWS, where, too_long)
                if line.strip():
                    row = loads(line, where)
                    require(isinstance(row, dict), where, "not an object")
                    yield where, row
    except OSError as error:
        raise log.unreadable(path, error) from None


def _sample(path: Path, number: int, rows: list[dict[str, Any]], *, one_filter: bool) -> LoggedSample:
    where = f"{path}, doc_id {number}"
    scores: dict[str, Any] = {}
    for row in rows:
        chosen = str(row.get("filter", "none"))
        for metric in typed(row, "metrics", list, where):
            name = f"{metric}" if one_filter else f"{metric},{chosen}"
            unique = isinstance(metric, str) and name not in scores
            require(unique, where, "a metric or a filter occurs twice for one sample")
            scores[name] = row.get(metric)
    hashes = {tuple(typed(row, name, str, where) for name in _HASHES) for row in rows}
    require(len(hashes) == 1, where, "rows of one sample ask for different things")
    return LoggedSample(
        str(number), 1,
        prompt=_prompt(rows[0]),
        content_sha256=sha256_lines(next(iter(hashes))),
        scores=scores,
        category=log.optional_text(rows[0].get("doc"), "category"),
    )  # fmt: skip


def _prompt(row: dict[str, Any]) -> str:
    given, listed = inner(row, "arguments", "gen_args_0", "arg_0"), row.get("arguments")
    while isinstance(listed, list) and listed:  # as older versions wrote them: [[context, settings]]
        given = listed = listed[0]
    return given if isinstance(given, str) else ""
