"""Notebooks through the four layers, each exactly once."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from grader import compare, injection, notebook, sandbox, solution, validate
from grader.compare import Comparison
from grader.errors import GraderError, SandboxError
from grader.models import Gateway, ModelRun, typed
from grader.notebook import Cell
from grader.prompts import Assessment, Feedback, Material, code_review, feedback, text_review, unread
from grader.rubric import Assignment
from grader.sandbox.values import Execution
from grader.score import score
from grader.store import Grade, Store, Submission
from grader.validate import Validation

Layer = Literal["validation", "outputs", "code", "writing"]
LAYERS: Final[tuple[Layer, ...]] = ("validation", "outputs", "code", "writing")
LOG: Final = logging.getLogger(__name__)
AT_ONCE: Final = 4
"""Notebooks; kernels, which compute here, as many as cores."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A layer of a submission begins or ends; `layer` None: the submission itself. runs: figures of its models."""

    submission: int
    name: str
    layer: Layer | None
    state: Literal["running", "done", "failed"]
    detail: str = ""
    runs: tuple[ModelRun, ...] = ()


Observer = Callable[[Progress], None]


def validated(validations: Sequence[Validation]) -> str:
    return f"{sum(one.share == 1 for one in validations)} of {len(validations)} sections complete"


def compared(comparisons: Sequence[Comparison]) -> str:
    return f"{sum(one.share == 1 for one in comparisons)} of {len(comparisons)} outputs correct"


class Pipeline:
    """Grades what the store has queued. Its methods are used from one event loop."""

    def __init__(
        self, store: Store, gateway: Gateway, assignments: Mapping[str, Assignment], observe: Observer
    ) -> None:
        self._store, self._gateway, self._assignments, self._observe = store, gateway, assignments, observe
        self._kernels = asyncio.Semaphore(max(1, os.cpu_count() or 1))
        self._solutions: dict[str, asyncio.Task[tuple[tuple[Cell, ...], Execution]]] = {}

    async def drain(self, batch: str | None = None) -> None:
        """Until nothing is queued."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._work(batch))

    async def _work(self, batch: str | None) -> None:
        while (submission := self._store.claim(batch)) is not None:
            await self._one(submission)

    async def _one(self, submission: Submission) -> None:
        try:
            grade, runs = await self._grade(submission)
        except GraderError as error:
            self._fail(submission, str(error))
            return
        except Exception as error:  # a fault with one notebook does not end the others
            LOG.exception("%s", submission.name)
            self._fail(submission, f"a fault of the grader: {type(error).__name__}: {error}")
            return
        self._store.finish(submission.id, grade, runs)
        points = f"{grade.score.points:g} of {grade.score.maximum}"
        self._observe(Progress(submission.id, submission.name, None, "done", points, tuple(runs)))

    def _fail(self, submission: Submission, error: str) -> None:
        self._store.fail(submission.id, error)
        self._observe(Progress(submission.id, submission.name, None, "failed", error))

    async def _grade(self, submission: Submission) -> tuple[Grade, list[ModelRun]]:
        began = time.monotonic()
        assignment = self._assignments.get(submission.assignment)
        if assignment is None:
            raise GraderError(f"there is no assignment {submission.assignment!r}")
        rubric = assignment.rubric

        def tell(layer: Layer, state: Literal["running", "done"], detail: str = "", *runs: ModelRun) -> None:
            self._observe(Progress(submission.id, submission.name, layer, state, detail, runs))

        tell("validation", "running")
        of_solution = self._solution(assignment)
        cells, execution = await self._execute(self._store.notebook(submission.id), assignment)
        validations = validate.validate(rubric, cells, execution)
        tell("validation", "done", validated(validations))
        tell("outputs", "running")
        solution_cells, expected = await asyncio.shield(of_solution)
        comparisons = compare.compare(rubric, cells, execution, solution_cells, expected)
        tell("outputs", "done", compared(comparisons))
        rooms = await self._gateway.rooms((rubric.code_model, rubric.writing_model))
        material = Material(rubric, cells, execution, validations, comparisons, rooms)

        tell("code", "running", rubric.code_model)
        tell("writing", "running", rubric.writing_model)
        first = await self._gateway.ask([code_review(material), text_review(material)])
        code, code_run = typed(first.replies[0], Assessment)
        writing, writing_run = typed(first.replies[1], Assessment)
        tell("code", "done", code_run.error, code_run)
        last = await self._gateway.ask([feedback(material, code, writing)])
        text, text_run = typed(last.replies[0], Feedback)
        tell("writing", "done", writing_run.error or text_run.error, writing_run, text_run)

        finds = injection.find(cells)
        grade = Grade(
            score=score(
                rubric, validations, comparisons, {"code": code, "writing": writing}, finds, unread=unread(material)
            ),
            validations=validations,
            comparisons=comparisons,
            feedback=text,
            finds=finds,
            stopped=execution.stopped,
            efficiency=first.efficiency,
            seconds=time.monotonic() - began,
        )
        return grade, [code_run, writing_run, text_run]

    async def _execute(self, data: bytes, assignment: Assignment) -> tuple[tuple[Cell, ...], Execution]:
        rubric = assignment.rubric
        content = notebook.read(data)
        arguments: tuple[Any, ...] = (content, rubric.variables, rubric.limits, assignment.data)
        async with self._kernels:
            execution = await asyncio.to_thread(sandbox.execute, *arguments)
        return notebook.cells(content, rubric.sections), execution

    def _solution(self, assignment: Assignment) -> asyncio.Task[tuple[tuple[Cell, ...], Execution]]:
        """Executed once per assignment, beside the first notebook; again if the sandbox failed."""
        task = self._solutions.get(assignment.name)
        if task is None or (task.done() and (task.cancelled() or isinstance(task.exception(), SandboxError))):
            task = self._solutions[assignment.name] = asyncio.create_task(self._execute_solution(assignment))
        return task

    async def _execute_solution(self, assignment: Assignment) -> tuple[tuple[Cell, ...], Execution]:
        cells, execution = await self._execute(assignment.solution, assignment)
        solution.check(assignment.rubric, cells, execution)
        return cells, execution
