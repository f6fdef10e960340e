"""A share with its exact interval."""

from dataclasses import dataclass

from holdfast.certification import binomial
from holdfast.core.errors import DataError


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
        return self.hits / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """Clopper-Pearson, 95 %."""
        return binomial.interval(self.hits, self.n)

    def as_json(self) -> dict[str, float]:
        low, high = self.interval
        return {"rate": self.value, "hits": self.hits, "n": self.n, "low": low, "high": high}
