"""One figure of an evaluation, with its 95 % interval and the number of examples behind it."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Self

from holdfast.certification.binomial import Rate
from holdfast.core.errors import DataError


@dataclass(frozen=True)
class Metric:
    """A value with its interval."""

    value: float  # the figure
    low: float | None  # lower end of the 95 % interval; None where none is defined
    high: float | None  # upper end
    n: int  # examples that it was computed from

    def __post_init__(self) -> None:
        ends = [end for end in (self.value, self.low, self.high) if end is not None]
        if self.n < 1 or not all(map(math.isfinite, ends)):
            raise DataError(
                f"a metric of {self.value} in [{self.low}, {self.high}] from {self.n} examples, expected finite "
                "numbers from at least one example",
                remedy="measure on at least one example, and look for non-finite losses",
            )

    @classmethod
    def share(cls, hits: int, n: int) -> Self:
        """hits / n with the Clopper-Pearson interval; refused unless 0 <= hits <= n and n >= 1."""
        rate = Rate(hits, n)
        return cls(rate.value, *rate.interval, n)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
