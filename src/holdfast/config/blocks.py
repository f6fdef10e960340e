"""What the blocks of a run file have in common, and the block that names a data file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_serializer


def number(value: Any) -> Any:
    """Read `1e-4` as a number: YAML 1.1 wants a dot in it and hands over text otherwise."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Number = Annotated[float, BeforeValidator(number)]


class Block(BaseModel):
    """Base of all blocks: unknown keys, NaN and conversions are refused; values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class DataBlock(Block):
    """Where examples come from."""

    data: str | None = Field(default=None, min_length=1)
    """A .jsonl, .json, .csv, .tsv or .parquet file, relative to the run file, or a hub data set."""
    columns: dict[str, str] | None = None
    """Our names (prompt, completion, messages, text) to the file's columns."""
    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    limit: int | None = Field(default=None, ge=1)
    """Read only the first rows."""
    skip_bad: Literal[True] | None = None
    """Leave out malformed rows, as long as they are few, and count them; null refuses them."""

    @model_serializer(mode="wrap")
    def _without_default(self, dump: Any) -> dict[str, Any]:
        """Settings that were stored before `skip_bad` was known are the same settings, with the same hash."""
        return {key: value for key, value in dump(self).items() if key != "skip_bad" or value is not None}

    def only_with_data(self) -> None:
        """Refuse options of a file where there is none."""
        for name in ("columns", "split", "subset", "revision", "limit", "skip_bad"):
            if self.data is None and getattr(self, name) is not None:
                raise ValueError(f"`{name}` belongs to `data`, which is not given")
