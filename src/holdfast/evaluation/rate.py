"""A share with its exact interval."""

from __future__ import annotations

from dataclasses import dataclass

from scipy.special import betaincinv

from holdfast.core.errors import DataError

TAIL = 0.025  # on each side of a 95 % interval


@dataclass(frozen=True)
class Rate:
    """`hits` of `n`, with 0 <= hits <= n and n >= 1."""

    hits: int
    n: int

    def __post_init__(self) -> None:
        if not (self.n >= 1 and 0 <= self.hits <= self.n):
            raise DataError(
                f"a rate of {self.hits} in {self.n}, expected 0 <= hits <= n and n >= 1",
                remedy="measure on at least one example",
            )

    @property
    def value(self) -> float:
        """hits / n."""
        return self.hits / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """Clopper-Pearson, 95 %: quantiles of Beta(k, n - k + 1) and of Beta(k + 1, n - k); 0 and 1 at the ends."""
        k, n = self.hits, self.n
        low = 0.0 if k == 0 else float(betaincinv(k, n - k + 1, TAIL))
        high = 1.0 if k == n else float(betaincinv(k + 1, n - k, 1 - TAIL))
        return low, high

    def as_json(self) -> dict[str, float]:
        """For result.json."""
        low, high = self.interval
        return {"rate": self.value, "hits": self.hits, "n": self.n, "low": low, "high": high}
