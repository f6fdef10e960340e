"""`python -m holdfast.study.worker NODE.json`: one piece of a study's work in a process of its own.

The work is a function named in the file, `module:function`, called with the file's content and the folder. What it
returns becomes `outcome.json` and then the result files: the last act, so that a result stands for finished work.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.core.file_lock import locked
from holdfast.core.files import read_json, write_json
from holdfast.study.failure import INTERRUPTED, of_exception
from holdfast.study.folder import LOG, OUTCOME
from holdfast.study.process import end_with_parent


def run_node(file: Path) -> int:
    """Do the work that a node file describes, unless it is done already; returns the exit code."""
    node, folder = read_json(file), file.parent
    try:
        with locked(file):  # another process may be at it: then wait, and find it done
            outcome = folder / OUTCOME
            if not outcome.exists():
                value = _function(node["call"])(node, folder)
                if not isinstance(value, Mapping):
                    raise TypeError(f"{node['call']} returned {type(value).__name__}, expected a mapping")
                write_json(outcome, dict(value))
            _publish(node, read_json(outcome))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  (recorded, and the others go on)
        traceback.print_exc()
        record = {"node": node["id"], **of_exception(error, folder / LOG)}
        for path in node["errors"]:
            write_json(Path(path), record)
        return int(record["exit_code"])
    return 0


def _publish(node: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
    for path, names in node["results"].items():
        write_json(Path(path), {**outcome, **names})


def _function(name: str) -> Callable[[Mapping[str, Any], Path], Any]:
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ConfigError(f"{name!r} is not a function", remedy="name it as module:function")
    return found  # type: ignore[no-any-return]


if __name__ == "__main__":
    end_with_parent()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    sys.exit(run_node(Path(sys.argv[1])))
