"""A first run: three settings, one call, a report.

    python examples/first_run.py --model Qwen/Qwen2.5-1.5B-Instruct --task task.jsonl --output runs/first

Further arguments override settings, as on the command line: train.max_steps=100 conflicts=drop
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import holdfast as hf


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub id or folder of a model that refuses")
    parser.add_argument("--task", required=True, help="what to learn: prompt/completion, messages or text rows")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    given = parser.parse_args(arguments)

    given.output.parent.mkdir(parents=True, exist_ok=True)
    run_file = given.output.parent / f"{given.output.name}.yaml"
    settings = {"model": given.model, "task": {"data": str(Path(given.task).absolute())}}
    run_file.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()), encoding="utf-8")
    result = hf.run(hf.load_config(run_file, [f"output_dir={given.output}", *given.overrides]))

    screening = result.values["screening"]
    print(f"conflicts left out: {screening['dropped']} of {screening['rows']} rows")
    for name, figure in result.values["behaviour"].items():
        limit = "within" if figure["shown"] else "not shown"
        print(f"{name}: {figure['kept']} of {figure['of']}, limit: {limit if figure['passed'] else 'lost'}")
    print(f"report: {hf.report(result.folder).path}")
    return 0 if result.feasible else 4


if __name__ == "__main__":
    raise SystemExit(main())
