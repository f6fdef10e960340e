"""Issue one certificate of the experiment and record its figures.

    python benchmarks/behaviour_gate/certify.py WORK --run holdfast --seed 1 --by behaviour

writes WORK/results/holdfast.s1.behaviour.json: exit code, counts, bounds and hashes, no text and no places. The
certificate itself stays in WORK/certificates, its replies with it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from commands import RUNS, WAYS, certify_command, run_command

from holdfast.core.files import read_json, write_json

FIGURES = (
    "by", "certified", "alpha", "tau", "unit", "confidence", "level", "drawn", "n", "examples", "regressions",
    "upper_bound", "p_value", "groups", "rows", "behaviour", "noise_floor", "sha256", "made",
)  # fmt: skip
BOUND = ("before_sha256", "after_sha256", "data_sha256", "tokenizer_sha256", "template_sha256")


def figures_of(certificate: dict[str, Any]) -> dict[str, Any]:
    """What a certificate counted and is bound to, without places and texts."""
    found = {name: certificate.get(name) for name in FIGURES}
    found["openings"] = {name: certificate["openings"][name] for name in ("this", "declared")}
    found["leakage_checked"] = certificate["leakage"]["checked"]
    found["bound"] = {name: certificate["bound"].get(name) for name in BOUND}
    return found


def certificate_record(work: Path, run: str, seed: int, by: str) -> dict[str, Any]:
    """Run the command, and keep figures alone; without a certificate, its message says why."""
    done = run_command(certify_command(run, seed, by), work, f"{run}.s{seed}.{by}")
    certificate = json.loads(done.out) if done.out.strip() else {}
    return {
        "kind": "certificate", "run": run, "seed": seed, "by": by, **done.record(), "message": done.message,
        "figures": figures_of(certificate) if "sha256" in certificate else None,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Issue one certificate of the experiment.")
    parser.add_argument("work", type=Path, help="Folder of the data and of runs/.")
    parser.add_argument("--run", choices=RUNS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--by", choices=WAYS, required=True)
    options = parser.parse_args()
    place = options.work / "results" / f"{options.run}.s{options.seed}.{options.by}.json"
    if place.is_file() and read_json(place)["figures"]:
        return
    write_json(place, certificate_record(options.work, options.run, options.seed, options.by))


if __name__ == "__main__":
    main()
