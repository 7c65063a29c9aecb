"""An assignment: a folder with rubric.toml, solution.ipynb and, if notebooks read files, data/."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from grader.errors import AssignmentError

Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=64)]


class Strict(BaseModel):
    """Frozen, and without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NumberCheck(Strict):
    """A number: of a variable, or the last one that the section prints. Equal within `tolerance`, relative for values
    above 1."""

    kind: Literal["number"]
    variable: Name | None = None
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6


class TableCheck(Strict):
    """A pandas table, column by column. columns: those that count; all of the solution's if empty."""

    kind: Literal["table"]
    variable: Name
    columns: tuple[str, ...] = ()
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6


class PlotCheck(Strict):
    """The data of the section's plots: lines, bars, points; their colours and sizes do not count."""

    kind: Literal["plot"]
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6


class TextCheck(Strict):
    """A text: of a variable, or all that the section prints. Case, white space and punctuation do not count."""

    kind: Literal["text"]
    variable: Name | None = None


Check = Annotated[NumberCheck | TableCheck | PlotCheck | TextCheck, Field(discriminator="kind")]


class Section(Strict):
    """A part of the notebook, from its heading to the next section's. task: what the models are told about it."""

    id: Name
    heading: Annotated[str, Field(min_length=1, max_length=200)]
    points: Annotated[int, Field(ge=1, le=100)]
    task: Annotated[str, Field(max_length=1000)] = ""
    variables: tuple[Name, ...] = ()
    checks: tuple[Check, ...] = ()


class Weights(Strict):
    """Shares of the four layers. They need not add up to 1."""

    validation: Fraction = 0.2
    outputs: Fraction = 0.4
    code: Fraction = 0.25
    writing: Fraction = 0.15

    @model_validator(mode="after")
    def some_measured(self) -> Weights:
        if self.validation + self.outputs <= 0:
            raise ValueError("validation or outputs must have a weight: a score needs a layer that is not a model")
        return self


class Limits(Strict):
    """Of one notebook's execution. Times in seconds, sizes in bytes, output in characters per cell."""

    cell_seconds: Annotated[float, Field(gt=0, le=600)] = 20
    notebook_seconds: Annotated[float, Field(gt=0, le=3600)] = 90
    memory_bytes: Annotated[int, Field(ge=1 << 28)] = 2 << 30
    file_bytes: Annotated[int, Field(ge=1 << 12)] = 16 << 20
    cell_output: Annotated[int, Field(ge=1000, le=1_000_000)] = 50_000
    processes: Annotated[int, Field(ge=16, le=4096)] = 64


class Rubric(Strict):
    """rubric.toml. agreement: how far a model's share of a section's points may be from layers 1 and 2 before it is
    moved there and the section marked for review."""

    title: Annotated[str, Field(min_length=1, max_length=200)]
    code_model: str
    writing_model: str
    agreement: Fraction = 0.35
    weights: Weights = Weights()
    limits: Limits = Limits()
    sections: Annotated[tuple[Section, ...], Field(min_length=1, max_length=20)]

    @model_validator(mode="after")
    def sections_differ(self) -> Rubric:
        ids = [section.id for section in self.sections]
        if len(set(ids)) < len(ids):
            raise ValueError("two sections have the same id")
        return self

    @property
    def points(self) -> int:
        return sum(section.points for section in self.sections)

    @property
    def variables(self) -> tuple[str, ...]:
        """All that layers 1 and 2 read, in order, once each."""
        named = [name for section in self.sections for name in section.variables]
        checked = [getattr(check, "variable", None) for section in self.sections for check in section.checks]
        return tuple(dict.fromkeys([*named, *(name for name in checked if name)]))


@dataclass(frozen=True)
class Assignment:
    """A folder. name: how the page and the store call it."""

    name: str
    folder: Path
    rubric: Rubric

    @cached_property
    def solution(self) -> bytes:
        return (self.folder / "solution.ipynb").read_bytes()

    @property
    def data(self) -> Path | None:
        folder = self.folder / "data"
        return folder if folder.is_dir() else None


def load(folder: Path) -> Assignment:
    """Raises AssignmentError."""
    try:
        rubric = parse(tomllib.loads((folder / "rubric.toml").read_text("utf-8")))
    except OSError as error:
        raise AssignmentError(f"{folder}: {error.strerror}: {error.filename}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AssignmentError(f"{folder / 'rubric.toml'}: {error}") from error
    if not (folder / "solution.ipynb").is_file():
        raise AssignmentError(f"{folder}: solution.ipynb is missing")
    return Assignment(folder.resolve().name, folder.resolve(), rubric)


def parse(values: Mapping[str, object]) -> Rubric:
    try:
        return Rubric.model_validate(values)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise AssignmentError("rubric.toml: " + "; ".join(faults)) from error


def find(folder: Path) -> dict[str, Assignment]:
    """The assignments below a folder, by name."""
    return {path.parent.name: load(path.parent) for path in sorted(folder.glob("*/rubric.toml"))}
