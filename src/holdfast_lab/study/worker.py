"""`python -m holdfast_lab.study.worker NODE.json`: one piece of a study's work in a process of its own.

The work is a function named in the file, `module:function`, called with the file's content and the folder. What it
returns becomes `outcome.json` and then the result files: the last act, so that a result stands for finished work.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name

from holdfast.core.file_lock import locked
from holdfast.core.files import read_json, write_json
from holdfast_lab.study.engine import end_with_parent
from holdfast_lab.study.failure import INTERRUPTED, of_exception
from holdfast_lab.study.folder import LOG, OUTCOME


def run_node(file: Path) -> int:
    """Do the work that a node file describes, unless it is done already; returns the exit code."""
    node, folder = read_json(file), file.parent
    try:
        with locked(file):  # another process may be at it: then wait, and find it done
            outcome = folder / OUTCOME
            if not outcome.exists():
                value = resolve_name(node["call"])(node, folder)
                if not isinstance(value, Mapping):
                    raise TypeError(f"{node['call']} returned {type(value).__name__}, expected a mapping")
                write_json(outcome, dict(value))
            for path, names in node["results"].items():
                write_json(Path(path), {**read_json(outcome), **names})
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  (recorded, and the others go on)
        traceback.print_exc()
        record = {"node": node["id"], **of_exception(error, folder / LOG)}
        for path in node["errors"]:
            write_json(Path(path), record)
        return int(record["exit_code"])
    return 0


if __name__ == "__main__":
    end_with_parent()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    sys.exit(run_node(Path(sys.argv[1])))
