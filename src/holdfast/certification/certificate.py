"""A certificate from bare counts: the exact test of them, and the claim in words."""

from dataclasses import asdict, dataclass

from holdfast.certification import binomial, finite_pool
from holdfast.certification.arguments import confidence_level, count, tally
from holdfast.certification.share import require_enough, with_raw_share
from holdfast.certification.terms import Words, claim, confident, verdict
from holdfast.core.percent import exact_percent


@dataclass(frozen=True)
class Certificate:
    """Whether `regressions` of `n` prompts show that at most a share `alpha` regress.

    `p_value` is of H0 "more than alpha regress", and 1 where more than alpha of the measured prompts regress, which a
    sample of nearly a whole list could otherwise outweigh.
    """

    alpha: float  # the claimed share
    confidence: float  # 1 - delta, over all openings of the split together
    n: int  # independent prompts measured once, on a model fixed beforehand
    regressions: int  # those that regressed
    test: str  # "clopper-pearson", or "hypergeometric" for a sample from a known list
    level: float  # delta / openings, what this opening may spend
    p_value: float
    upper_bound: float  # of the regressing share at confidence 1 - level; at most alpha exactly when certified
    openings: int = 1  # how often the split may be opened, declared beforehand
    pool: int | None = None  # the size of the known list the prompts were drawn from; None for an open source

    @property
    def certified(self) -> bool:
        """The verdict: p_value <= level."""
        return self.p_value <= self.level

    @property
    def statement(self) -> str:
        """The claim as one sentence."""
        return self.sentence("regress")

    def sentence(self, regress: str) -> str:
        """Returns the statement in other words for "regress", such as "degrade by more than 0.1 nats"."""
        counts = f"{self.regressions} of {self.n} did"
        if self.pool is None:
            said = claim(self.alpha, Words(regress), drawn="rows")
        else:
            share = f"{exact_percent(self.alpha)} of the {self.pool} listed prompts {regress}"
            if self.n == self.pool:
                return f"{'At most' if self.certified else 'More than'} {share}: all were measured, {counts}."
            said, counts = f"at most {share}", f"{self.regressions} of {self.n} drawn from the list at random did"
        return verdict(self.certified, said, counts, self.upper_bound, confident(self.confidence, self.openings))

    def to_json(self) -> dict[str, object]:
        """Returns the fields by name, with the verdict and the statement."""
        return {**asdict(self), "certified": self.certified, "statement": self.statement}


def certify_counts(
    regressions: int, n: int, alpha: float = 0.05, confidence: float = 0.95, *, openings: int = 1,
    pool: int | None = None,
) -> Certificate:  # fmt: skip
    """Tests "at most a share alpha of the prompts regress" on a count made once.

    Args:
        regressions: prompts that regressed among the `n` measured.
        n: prompts drawn one by one, independently of one another, that played no part in training, tuning or
            selection; nothing here can check that. Of groups of near-duplicates count each group once.
        alpha: the share to certify.
        confidence: 1 - delta.
        openings: how often the split may be opened in all, declared beforehand; each opening gets delta / openings.
        pool: the size of the known list when the prompts were drawn from it without replacement.

    Raises:
        InfeasibleError: not even zero regressions among `n` prompts would certify; names the number needed.
    """
    k, n = tally(regressions, n)
    level = confidence_level(confidence, count("openings", openings, least=1))
    if pool is None:
        test, needed = "clopper-pearson", binomial.fewest_prompts(alpha, confidence, parts=openings)
        require_enough(n, needed, alpha, confidence, openings)
        p, bound = binomial.p_value(k, n, alpha), binomial.upper_bound(k, n, confidence, parts=openings)
    else:
        test, p = "hypergeometric", finite_pool.p_value(k, n, pool, alpha)
        needed = finite_pool.fewest_prompts(pool, alpha, confidence, parts=openings)
        require_enough(n, needed, alpha, confidence, openings)
        bound = finite_pool.upper_count(k, n, pool, confidence, parts=openings) / pool
        p, bound = with_raw_share(p, bound, k, n, alpha)
    return Certificate(float(alpha), float(confidence), n, k, test, level, p, bound, int(openings), pool)
