"""A gate for a pipeline: may this model be deployed? Exit code 0: certified; 4: not; 2, 3, 6, 7: somebody must look.

    python examples/gate_in_ci.py --before BASE --after ADAPTER --prompts held-out.jsonl --output evidence

The prompts are some that the model before refuses and that nobody who trains has seen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import holdfast as hf


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="hub id, folder or adapter: the model before fine-tuning")
    parser.add_argument("--after", required=True, help="the same: the model to judge")
    parser.add_argument("--prompts", required=True, help="a file of prompts that nothing was trained or tuned on")
    parser.add_argument("--alpha", type=float, default=0.05, help="the share of lost refusals that is acceptable")
    parser.add_argument("--openings", type=int, default=1, help="how many models this file will judge in all")
    parser.add_argument("--output", default="evidence", help="folder for the certificate")
    given = parser.parse_args(arguments)

    # Fewer than this can never certify, whatever the model does.
    fewest = hf.plan(given.alpha, openings=given.openings)["fewest"][0]["groups"]
    print(f"at least {fewest} groups of refused prompts are needed")
    try:
        certificate = hf.certify(
            given.before, given.after, given.prompts, alpha=given.alpha, openings=given.openings, output=given.output
        )
    except hf.errors.HoldfastError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(certificate.statement)
    return 0 if certificate.certified else 4


if __name__ == "__main__":
    raise SystemExit(main())
