"""Requests side by side, a few at a time."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_flight(work: Callable[[T, threading.Event], R], items: Sequence[T], workers: int) -> Iterator[R]:
    """Results in the order in which they arrive.

    After a failure what is on its way still counts and what waits is not sent; then the failure is raised. `work` is
    given an event that is set where nothing should be tried again.
    """
    pool, stop = ThreadPoolExecutor(workers, thread_name_prefix="endpoint"), threading.Event()
    try:
        futures = [pool.submit(work, item, stop) for item in items]
        failed: BaseException | None = None
        for future in as_completed(futures):
            if future.cancelled():
                continue
            if (error := future.exception()) is None:
                yield future.result()
            elif failed is None:
                failed = error
                stop.set()
                for waiting in futures:
                    waiting.cancel()
        if failed is not None:
            raise failed
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
