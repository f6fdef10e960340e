"""What the host does during an audit: when each of its sections ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from holdfast.auditing.pair import Pair
from holdfast.auditing.results import PartialResults
from holdfast.auditing.windows import Windows
from holdfast.scoring.completion import Batch
from holdfast.scoring.transfer import OnHost


class Watch:
    """When a function was called: the host's seconds at the start and end of every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float]] = []

    @property
    def seconds(self) -> float:
        """In all calls together."""
        return sum(end - start for start, end in self.calls)

    def around(self, function: Callable[..., Any], counts: Callable[..., bool] = lambda *_, **__: True) -> Any:
        """The function, watched; calls that do not count are left out."""

        @wraps(function)
        def watched(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            found = function(*arguments, **options)
            if counts(*arguments, **options):
                self.calls.append((start, time.perf_counter()))
            return found

        return watched


@contextmanager
def watched(pair: Pair, *, fewest_rows: int = 1) -> Iterator[dict[str, Watch]]:
    """Watches on the sections of an audit, none of which runs inside another.

    `forward` includes the wait for a place in the device's queue. `waiting` is for results, `storing` writes them.

    Args:
        fewest_rows: forwards of fewer are left out; the checks before the first batch are of one row.
    """
    model = pair.model("before")
    found = {name: Watch() for name in ("forward", "encoding", "collating", "waiting", "storing")}
    forward = found["forward"].around(model.forward, lambda **inputs: len(inputs["input_ids"]) >= fewest_rows)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(model, "forward", forward))
        for name, owner, method in (
            ("encoding", Windows, "encode"), ("collating", Batch, "of"), ("waiting", OnHost, "get"),
            ("storing", PartialResults, "write"),
        ):  # fmt: skip
            around = found[name].around(getattr(owner, method))
            stack.enter_context(mock.patch.object(owner, method, around))
        yield found
