"""Blocks of a run file that name data: what they have in common, and what a run holds."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_serializer
from pydantic.functional_validators import AfterValidator, BeforeValidator, field_validator, model_validator

from holdfast.defaults import default
from holdfast.screening.settings import AUTO

SPELLED_OUT: Final = {name: {"prompts": list(one.prompts), "keep": one.keep} for name, one in AUTO.items()}
NAMED_PROMPTS = ("task", "probes", "everyday", "borderline")  # the task's own, and those that are shipped with holdfast
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz")


def number(value: Any) -> Any:
    """Read `1e-4` as a number: YAML 1.1 wants a dot in it and hands over text otherwise."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def located(*suffixes: str, names: Sequence[str] = ()) -> AfterValidator:
    """A path made absolute, from the run file's folder (the context), so that it means the same from anywhere.

    What ends in one of `suffixes`, begins with `.` or `/`, or is there is a path; `names` and hub ids stay.
    """

    def locate(value: str, info: ValidationInfo) -> str:
        if info.context is None or value in names:
            return value
        path = info.context / value
        is_path = value.endswith(suffixes) or value.startswith((".", "/")) or path.exists()
        return str(path.resolve()) if is_path else value

    return AfterValidator(locate)


Number = Annotated[float, BeforeValidator(number)]
Text = Annotated[str, Field(min_length=1)]
DataPlace = Annotated[Text, located(*DATA_SUFFIXES)]
AskedPlace = Annotated[Text, located(*DATA_SUFFIXES, names=NAMED_PROMPTS)]
ModelPlace = Annotated[Text, located("/", names=["embedded"])]


class Block(BaseModel):
    """Base of all blocks: unknown keys, NaN and conversions are refused; values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class DataBlock(Block):
    """Where examples come from: one of the keys in `sources`, each with what it is."""

    sources: ClassVar[dict[str, str]] = {}

    data: DataPlace | None = None
    """A .jsonl, .json, .csv, .tsv or .parquet file, relative to the run file, or a hub data set."""
    columns: dict[str, str] | None = None
    """Our names (prompt, completion, messages, text) to the file's columns."""
    split: str | None = None
    """Which split of a hub data set; null: `train`."""
    subset: str | None = None
    """Which configuration of a hub data set."""
    revision: str | None = None
    """Commit, tag or branch of a hub data set."""
    limit: int | None = Field(default=None, ge=1)
    """Read only the first rows."""
    skip_bad: Literal[True] | None = None
    """Leave out malformed rows, as long as they are few, and count them; null refuses them."""

    @model_serializer(mode="wrap")
    def _without_default(self, dump: Any) -> dict[str, Any]:
        """Settings that were stored before `skip_bad` was known are the same settings, with the same hash."""
        return {key: value for key, value in dump(self).items() if key != "skip_bad" or value is not None}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = {"data": "`data` (a file or hub data set)", **self.sources}
        if sum(getattr(self, name) is not None for name in sources) != 1:
            *others, last = sources.values()
            raise ValueError(f"expected one of {', '.join(others)} and {last}")
        limited = getattr(self, "prompts", None) is not None  # of prompts, too, a part may be taken
        for name in ("columns", "split", "subset", "revision", *(() if limited else ("limit",)), "skip_bad"):
            if self.data is None and getattr(self, name) is not None:
                raise ValueError(f"`{name}` belongs to `data`, which is not given: remove it, or give `data`")
        return self


class SafetyBlock(DataBlock):
    """What must stay likely: pairs of prompts and replies, or the model's own replies to prompts."""

    sources: ClassVar[dict[str, str]] = {"role": "`role: constraint`", "prompts": "`prompts` (what to ask)"}

    role: Literal["constraint"] | None = None
    """`constraint`: the protocol's constraint, monitor and certify pairs, instead of `data`."""
    prompts: list[AskedPlace] | None = Field(default=None, min_length=1)
    """What to ask the model before training: `task`, `probes`, `everyday`, `borderline`, files and hub data sets."""
    keep: Literal["refusals", "answers"] | None = None
    """Which of the model's replies to `prompts` are held."""
    limit: int | None = Field(default=None, ge=1)
    """Read only the first rows. With `prompts`: at most this many of each source other than the task; of a bundled
    source, at most this many for each use."""
    fractions: Annotated[tuple[Number, Number, Number], Field(strict=False)] = default("safety.data.fractions")
    """Shares for steering (constraint), watching (monitor) and certifying; they add up to 1."""
    on_leak: Literal["error", "move"] = "error"
    """A certify prompt that also occurs in the task data: refuse, or move it to the constraint share."""
    openings: int = Field(default=default("safety.openings"), ge=1)
    """How often the certify share may be opened; each opening gets an equal part of the allowed error."""

    @model_validator(mode="before")
    @classmethod
    def _shares_of_prompts(cls, value: Any) -> Any:
        """Prompts are shared out by holdfast: task prompts steer or monitor, whole bundled kinds certify."""
        if not isinstance(value, Mapping) or value.get("prompts") is None:
            return value
        for name in ("fractions", "on_leak"):
            if name in value:
                raise ValueError(f"`{name}` belongs to `data`; prompts are shared out by holdfast, so remove it")
        return {**value, "fractions": default("safety.fractions")}

    @field_validator("fractions")
    @classmethod
    def _fractions(cls, value: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(value) < 0 or value[0] == 0 or abs(sum(value) - 1) > 1e-6:
            raise ValueError("expected three shares that add up to 1, the first above 0")
        return value

    @model_validator(mode="after")
    def _keeps_replies(self) -> Self:
        if self.prompts is not None and self.keep is None:
            raise ValueError("`prompts` needs `keep: refusals` or `keep: answers`")
        if self.prompts is None and self.keep is not None:
            raise ValueError("`keep` belongs to `prompts`, which is not given")
        return self

    @model_serializer(mode="wrap")
    def _without_default(self, dump: Any) -> dict[str, Any]:
        """What belongs to the block's kind: settings that were stored before `prompts` was known keep their hash."""
        values = dump(self)
        if self.prompts is not None:
            limit = () if self.limit is None else ("limit",)
            return {key: values[key] for key in ("prompts", "keep", *limit, "openings")}
        return {k: v for k, v in values.items() if v is not None or k not in ("skip_bad", "prompts", "keep")}

    @property
    def source(self) -> str:
        """Where the examples come from, for records."""
        if self.prompts is not None:
            return f"{self.keep} of {', '.join(self.prompts)}"
        return self.data if self.data is not None else f"role {self.role}"


def is_single(value: object, block: type[BaseModel] | None = None) -> bool:
    """Whether a `safety` or `constraint` value is one block rather than a mapping of names to blocks."""
    if not isinstance(value, Mapping) or not value:
        return isinstance(value, Mapping)
    if block is not None and any(key in block.model_fields for key in value):
        return True
    return not all(isinstance(item, Mapping) for item in value.values())


def on_protocol_data(raw: Mapping[str, Any]) -> bool:
    """Whether a run uses the protocol's own data: a task by name, or a role."""
    task = raw.get("task")
    return isinstance(task, Mapping) and any(task.get(key) is not None for key in ("name", "role"))
