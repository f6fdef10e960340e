"""The blocks of `certificate.json`, as its JSON has them; what each says is in `records/certificate.py`.

A key that is not required is there once the certificate is issued, or of one way of comparing only (`Measured`).
"""

from typing import Any, NotRequired, TypedDict


class Counts(TypedDict):
    """Groups or prompts: how many, how many regressed, and the test over them where the verdict rests on it."""

    n: int
    regressions: int
    p_value: float | None
    upper_bound: float | None


class CategoryFigures(TypedDict):
    """One of several categories: `share.CategoryVerdict`."""

    n: int
    regressions: int
    groups: Counts
    rows: Counts
    p_value: float
    adjusted_p: float
    upper_bound: float
    certified: bool
    needed: int | None


class StrengthFigures(TypedDict):
    """One strength that was tested: `assessment.Tested`."""

    strength: float
    regressions: int
    n: int
    p_value: float
    passed: bool


class Strength(TypedDict):
    """A search for the largest strength of an adapter, the adapter it was scaled from, and the one that was written."""

    chosen: float | None
    tested: list[StrengthFigures]
    adapter: NotRequired[str | None]
    original: NotRequired[str]
    original_sha256: NotRequired[str]


class ProcessState(TypedDict):
    """The state of the e-process of a sequence."""

    alpha: float
    confidence: float
    parts: int
    n: int
    regressions: int
    certified_at: int | None


class Rules(TypedDict):
    """The rules that sort replies."""

    name: str
    revision: str


class Behaviour(TypedDict):
    """Replies: of each claim (refusals, answers) how many were counted, lost, and changed when asked twice."""

    prompts: int
    unclear: int
    classes: dict[str, dict[str, int]]
    counted: dict[str, int]
    lost: dict[str, int]
    flips: dict[str, int]
    asked_twice: dict[str, int]
    rules: NotRequired[Rules]
    engine: NotRequired[str]
    dtype: NotRequired[str]
    max_new_tokens: NotRequired[int]
    longest: NotRequired[int]


class Screened(TypedDict):
    """What screening found before training, and the sets whose certify prompts were opened."""

    rows: int
    asked_rows: int
    conflicts: int
    dropped: int
    rule: str
    sets: list[str]
    public: int
    prompts: int
    task_sha256: str


class Figures(TypedDict):
    """What every kind of test says."""

    certified: bool
    statement: str
    n: int
    regressions: int
    upper_bound: float
    p_value: float | None
    groups: Counts
    rows: Counts


class KindFigures(Figures, total=False):
    """What one kind of test says beside that."""

    examples: int
    e_value: float | None
    certified_tau: float | None
    sequential: ProcessState
    categories: dict[str, CategoryFigures]
    strength: Strength


class Assessment(Figures):
    """What follows from a table of degradations; null where the kind of test does not have it."""

    level: float
    examples: int
    drawn: str
    max_weight: int | None
    e_value: float | None
    certified_tau: float | None
    sequential: ProcessState | None
    categories: dict[str, CategoryFigures] | None
    strength: Strength | None


class Assessed(Assessment):
    """What follows from a certificate's table; `also` is the second claim of a behaviour certificate."""

    also: Assessment | None
    behaviour: Behaviour | None


class Sides(TypedDict):
    """The names of both models, as they were given."""

    before: str
    after: str


class Openings(TypedDict):
    """The ledger's entry: opening number `this` of `declared`, for the claim with this sha256."""

    declared: int
    this: int
    ledger: str
    claim: str


class GivenBound(TypedDict):
    """sha256 of what a certificate rests on, known before it is written; of replies by file."""

    data_sha256: str
    before_sha256: str
    after_sha256: str
    tokenizer_sha256: str
    template_sha256: str
    splits_sha256: str | None
    replies_sha256: dict[str, str] | None


class Bound(GivenBound):
    """The same, with the prompts' ids, the table, and the model that degradations are measured from."""

    split_sha256: str
    table_sha256: str
    reference_sha256: str


class GivenPlaces(TypedDict):
    """Where models, prompts and a run's record of its split were; null where there is none."""

    before: str
    after: str
    prompts: str | None
    splits: str | None


class Places(GivenPlaces):
    """The same, with the table beside the certificate."""

    table: str


class LeakSearch(TypedDict):
    """Whether the prompts were looked for in the training data, which that was, and how many were looked for."""

    checked: bool
    against: str | None
    prompts: int


class Judge(TypedDict):
    """The judge of a certificate by harm, and the longest reply it sees."""

    name: str
    revision: str
    max_new_tokens: int


class ReplySettings(TypedDict):
    """How replies are made and sorted."""

    rules: str
    rules_revision: str
    decoding: str
    max_new_tokens: int
    longest: int


class Measured(TypedDict, total=False):
    """How replies were judged (by harm) or sorted (by behaviour), or which logs were compared (by log)."""

    judge: Judge
    replies: ReplySettings
    log: dict[str, Any]


class Settings(Measured):
    """How prompts were read (`reading`: options of `read_examples`) and models loaded."""

    before_revision: str | None
    after_revision: str | None
    reading: dict[str, Any]
    template: str
    tokenizer: str
    max_length: int | None
    dtype: str
    trust_remote_code: bool
