"""When a device had nothing to do, and what the host did meanwhile.

Kernels and host sections are intervals of seconds on one clock:

    busy = length of the union of the kernels        gaps = what is left of [start, end]
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

Interval = tuple[float, float]
Call = tuple[float, float, str]
LONGEST = 10
OTHER = "other"


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times in intervals that neither overlap nor touch, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def gaps(busy: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """What the union `busy` leaves of [start, end], in order."""
    found = []
    for first, last in busy:
        if start < min(first, end):
            found.append((start, min(first, end)))
        start = max(start, last)
    return found + ([(start, end)] if start < end else [])


def timeline(sections: Mapping[str, Iterable[Interval]]) -> list[Call]:
    """The calls of all sections in order; none overlaps another."""
    return sorted((start, end, name) for name, calls in sections.items() for start, end in calls)


def shares(gap: Interval, calls: Sequence[Call]) -> dict[str, float]:
    """How many seconds of a gap each section covers; `other` is what none does."""
    found = {OTHER: gap[1] - gap[0]}
    for start, end, name in calls[bisect_right(calls, gap[0], key=lambda call: call[1]) :]:
        if start >= gap[1]:
            break
        common = min(gap[1], end) - max(gap[0], start)
        found[name] = found.get(name, 0.0) + common
        found[OTHER] -= common
    return found


def report(
    kernels: Iterable[Interval], whole: Interval, sections: Mapping[str, Iterable[Interval]], longest: int = LONGEST
) -> dict[str, Any]:
    """Seconds in which the device worked, in which it did not by what the host did, and the longest gaps.

    Kernels outside of `whole` are cut off. A gap's `section` is the one that covers most of it; `at_seconds` counts
    from the start. Where launching is slower than running, there is a gap after every kernel: too short for the list,
    these are in the idle seconds of `forward`.
    """
    start, end = whole
    calls = timeline(sections)
    busy = union((max(a, start), min(b, end)) for a, b in kernels if b > start and a < end)
    idle: dict[str, float] = dict.fromkeys((*sections, OTHER), 0.0)
    listed = []
    for gap in gaps(busy, start, end):
        by_section = shares(gap, calls)
        for name, seconds in by_section.items():
            idle[name] += seconds
        section = max(by_section, key=lambda name: by_section[name])
        listed.append({"seconds": gap[1] - gap[0], "at_seconds": gap[0] - start, "section": section})
    listed.sort(key=lambda gap: (-gap["seconds"], gap["at_seconds"]))
    return {
        "seconds": end - start, "device_busy_seconds": sum(b - a for a, b in busy),
        "idle_seconds_by_section": idle, "longest_gaps": listed[:longest],
    }  # fmt: skip


def on_host_clock(kernels: Iterable[Interval], number: int, launched: float) -> list[Interval]:
    """Kernels in order, moved so that the one of this number starts when the host launched it.

    Raises:
        RuntimeError: there are not so many.
    """
    found = sorted(kernels)
    if len(found) <= number:
        raise RuntimeError("the profiler recorded no kernels: torch was built without CUPTI, or may not use it here")
    shift = launched - found[number][0]
    return [(start + shift, end + shift) for start, end in found]


def profiled(run: Callable[[], Any], device: torch.device) -> tuple[list[Interval], Interval]:
    """The device's work during `run`, copies included, and when `run` began and ended, on `time.perf_counter`'s clock.

    Only the device is recorded: recording the host's operators would slow down the host that is looked at. A kernel of
    known start, on an idle device, tells how the two clocks differ, a launch (some ten microseconds) aside.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):  # the first one starts the recording up
            torch.cuda.synchronize(device)
            marked = time.perf_counter()
            torch.ones(1, device=device)
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        end = time.perf_counter()
    kernels = [
        (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
    return on_host_clock(kernels, 1, marked), (start, end)
