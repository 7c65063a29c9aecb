"""Layer 1: does each section exist, do its variables, did its cells run?"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from grader.notebook import Cell
from grader.rubric import Rubric, Section
from grader.sandbox.values import Execution


class Validation(BaseModel):
    """A section's result. missing: of its `required` variables. failed, not_run: of its `cells` code cells."""

    model_config = ConfigDict(frozen=True)

    section: str
    present: bool
    required: int = 0
    missing: tuple[str, ...] = ()
    cells: int = 0
    failed: int = 0
    not_run: int = 0
    errors: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """0 to 1: the mean of the cells that ran and of the variables that exist. 0 without a cell."""
        if not self.present or not self.cells:
            return 0.0
        ran = (self.cells - self.failed - self.not_run) / self.cells
        return ran if self.required == 0 else (ran + 1 - len(self.missing) / self.required) / 2


def validate(rubric: Rubric, cells: Sequence[Cell], execution: Execution) -> tuple[Validation, ...]:
    """One result per section of the rubric, in its order."""
    return tuple(_section(section, cells, execution) for section in rubric.sections)


def _section(section: Section, cells: Sequence[Cell], execution: Execution) -> Validation:
    own = [cell for cell in cells if cell.section == section.id]
    code = {cell.index for cell in own if cell.kind == "code" and cell.source.strip()}
    runs = [run for run in execution.cells if run.index in code]
    return Validation(
        section=section.id,
        present=bool(own),
        missing=tuple(name for name in section.variables if name not in execution.variables),
        required=len(section.variables),
        cells=len(runs),
        failed=sum(run.state == "failed" for run in runs),
        not_run=sum(run.state == "not run" for run in runs),
        errors=tuple(run.error for run in runs if run.error)[:5],
    )
