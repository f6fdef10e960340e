"""`python -m holdfast_lab.study.worker NODE.json`: one piece of a study's work in a process of its own.

The work is a function named in the file, `module:function`, called with the file's content and the folder. What it
returns becomes `outcome.json` and then the result files: the last act, so that a result stands for finished work. Of a
failure its kind, its message where it is ours and its exit code are kept, never a text from data.
"""

import errno
import logging
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name

from holdfast.core.errors import HoldfastError, ResourceError
from holdfast.core.file_lock import locked
from holdfast.core.files import read_json, write_json
from holdfast.models.library_errors import out_of_memory
from holdfast_lab.study.engine import end_with_parent
from holdfast_lab.study.folder import LOG, OUTCOME

INTERRUPTED = 130


def of_exception(error: BaseException, log: Path) -> dict[str, object]:
    """The record of an exception in a worker; messages of other libraries stay in the log, which is private."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        error = ResourceError("no space left on the disk", remedy="free disk space, then --retry-failed")
    elif isinstance(error, Exception) and out_of_memory(error):
        error = ResourceError("out of memory", remedy="lower `workers` or the batch sizes, then --retry-failed")
    if isinstance(error, HoldfastError):
        what, remedy, code = error.what, error.remedy, error.exit_code
    else:
        what, remedy, code = "an unexpected error, which is a bug", f"see {log}", 1
    return {"error": type(error).__name__, "what": what, "remedy": remedy, "exit_code": code}


def of_exit(code: int, log: Path) -> dict[str, object]:
    """The record of a worker that ended without saying why; `code` is negative for a signal."""
    if -code == signal.SIGKILL:
        what, remedy = "its process was killed, most likely for want of memory", "lower `workers`, then --retry-failed"
        return {"error": "Killed", "what": what, "remedy": remedy, "exit_code": ResourceError.exit_code}
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    what = f"its process ended with {how} and no record"
    return {"error": "Ended", "what": what, "remedy": f"see {log}", "exit_code": max(code, 1)}


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
