"""What an execution leaves: cells, outputs, variables, data of plots. It comes from student code and is not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

MAX_ITEMS: Final = 5000
MAX_COLUMNS: Final = 50
MAX_TEXT: Final = 20_000

Scalar = float | str | None
Items = Annotated[list[Scalar], Field(max_length=MAX_ITEMS)]
Floats = Annotated[list[float], Field(max_length=MAX_ITEMS)]


class Evidence(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Number(Evidence):
    kind: Literal["number"]
    value: float


class Text(Evidence):
    kind: Literal["text"]
    value: Annotated[str, Field(max_length=MAX_TEXT)]


class Sequence(Evidence):
    """A list, tuple, array or column."""

    kind: Literal["list"]
    items: Items


class Table(Evidence):
    kind: Literal["table"]
    columns: Annotated[dict[str, Items], Field(max_length=MAX_COLUMNS)]


class Other(Evidence):
    """Anything else: functions, classes, modules."""

    kind: Literal["other"]
    type: Annotated[str, Field(max_length=200)]


Value = Annotated[Number | Text | Sequence | Table | Other, Field(discriminator="kind")]


class Series(Evidence):
    """What one call drew. x, y: of equal length."""

    kind: Literal["line", "bar", "points"]
    x: Floats
    y: Floats


PLOTS: TypeAdapter[list[Series]] = TypeAdapter(Annotated[list[Series], Field(max_length=50)])
VARIABLES: TypeAdapter[dict[str, Value]] = TypeAdapter(dict[str, Value])


@dataclass(frozen=True, slots=True)
class CellRun:
    """A code cell. index: in the notebook. text: what it printed and returned. error: why it failed."""

    index: int
    state: Literal["ran", "failed", "not run"]
    text: str = ""
    error: str = ""
    plots: tuple[Series, ...] = ()


@dataclass(frozen=True, slots=True)
class Execution:
    """stopped: why the kernel was ended before the last cell. memory: too much of it, or too many processes."""

    cells: tuple[CellRun, ...]
    variables: Mapping[str, Value] = field(default_factory=dict)
    stopped: Literal["time", "output", "memory", "kernel ended"] | None = None
