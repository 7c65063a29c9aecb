"""Routes of the page, for one teacher on this machine: other hosts' names and other pages' forms are refused."""

from __future__ import annotations

import asyncio
import io
import secrets
import time
import zipfile
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from statistics import mean
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from grader import notebook, report
from grader.errors import GraderError
from grader.models import Gateway
from grader.pipeline import LAYERS, Layer, Pipeline, Progress
from grader.rubric import Assignment
from grader.store import Store, Submission, final_points
from grader.web.progress import graded, progress_line, running
from grader.web.uploads import MAX_NOTEBOOKS, MAX_UPLOAD, notebooks

PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined
)
PAGES.filters["when"] = lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)


@dataclass(slots=True)
class Grader:
    """What the routes share. progress: state and detail of each layer of what is not graded yet, by submission."""

    store: Store
    assignments: Mapping[str, Assignment]
    pipeline: Pipeline
    gateway: Gateway
    progress: dict[int, dict[Layer, str]] = field(default_factory=lambda: defaultdict(dict))
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self) -> None:
        """Grade what is queued, beside what runs already."""
        if len(self.tasks) < 2:  # the second one takes what is queued while the first one ends
            task = asyncio.create_task(self.pipeline.drain())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)


def create(store: Store, gateway: Gateway, assignments: Mapping[str, Assignment]) -> Starlette:
    progress: dict[int, dict[Layer, str]] = defaultdict(dict)

    def observe(event: Progress) -> None:
        if event.layer:
            progress[event.submission][event.layer] = progress_line(event.state, event.detail, event.runs)
        elif event.state == "done":
            progress.pop(event.submission, None)
        else:
            layers = progress[event.submission]
            progress[event.submission] = {name: line for name, line in layers.items() if not running(line)}

    grader = Grader(store, assignments, Pipeline(store, gateway, assignments, observe), gateway, progress)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        store.requeue()
        grader.start()
        yield
        for task in grader.tasks:
            task.cancel()
        await gateway.close()

    routes = [
        Route("/", home),
        Route("/batches", upload, methods=["POST"]),
        Route("/batches/{batch}", batch_page),
        Route("/batches/{batch}/state", batch_state),
        Route("/batches/{batch}/results.csv", batch_table),
        Route("/batches/{batch}/students.zip", batch_students),
        Route("/batches/{batch}/again", again, methods=["POST"]),
        Route("/submissions/{submission:int}", submission_page),
        Route("/submissions/{submission:int}/corrections", correct, methods=["POST"]),
        Route("/submissions/{submission:int}/feedback.html", student_page),
        Route("/models", models_page),
        Route("/progress.js", script),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "testserver"])
    errors = {HTTPException: refused, GraderError: refused}
    app = Starlette(routes=routes, middleware=[hosts], exception_handlers=errors, lifespan=lifespan)
    app.state.grader = grader
    return app


async def home(request: Request) -> Response:
    grader = _grader(request)
    return _page("home.html", assignments=grader.assignments, batches=grader.store.batches(), most=MAX_NOTEBOOKS)


async def upload(request: Request) -> Response:
    grader = _own(request)
    length = request.headers.get("content-length", "")
    if not length.isdigit() or int(length) > MAX_UPLOAD:
        raise HTTPException(413, f"an upload has at most {MAX_UPLOAD >> 20} MiB")
    async with request.form(max_files=MAX_NOTEBOOKS, max_fields=10) as form:
        assignment = str(form.get("assignment", ""))
        if assignment not in grader.assignments:
            raise HTTPException(400, "choose an assignment")
        uploaded = [one for one in form.getlist("notebooks") if isinstance(one, UploadFile)]
        files = [(one.filename or "", await one.read()) for one in uploaded]
    batch = secrets.token_hex(4)
    for name, data in await asyncio.to_thread(notebooks, files):
        grader.store.add(batch, assignment, name, data)
    grader.start()
    return RedirectResponse(f"/batches/{batch}", 303)


async def batch_page(request: Request) -> Response:
    batch = request.path_params["batch"]
    rows = _rows(_grader(request), batch)
    if not rows:
        raise HTTPException(404, "there is no such batch")
    failed = any(row["state"] == "failed" for row in rows)
    return _page("batch.html", batch=batch, rows=rows, layers=LAYERS, failed=failed)


async def batch_state(request: Request) -> Response:
    return JSONResponse(_rows(_grader(request), request.path_params["batch"]))


async def batch_table(request: Request) -> Response:
    grader, batch = _grader(request), request.path_params["batch"]
    found = grader.store.batch(batch)
    if not found or found[0].assignment not in grader.assignments:
        raise HTTPException(404, "there is no such batch")
    table = report.table(grader.store, batch, grader.assignments[found[0].assignment].rubric)
    headers = {"Content-Disposition": 'attachment; filename="results.csv"'}
    return PlainTextResponse(table, media_type="text/csv", headers=headers)


async def batch_students(request: Request) -> Response:
    """The page of each student, as files."""
    grader, out = _grader(request), io.BytesIO()
    submissions = [one for one in grader.store.batch(request.path_params["batch"]) if one.state == "done"]
    if not submissions:
        raise HTTPException(404, "nothing of this batch is graded yet")
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for one in submissions:
            page = PAGES.get_template("student.html").render(**_result(grader, one.id))
            archive.writestr(f"{PurePath(one.name).stem}.html", page)
    headers = {"Content-Disposition": 'attachment; filename="students.zip"'}
    return Response(out.getvalue(), media_type="application/zip", headers=headers)


async def again(request: Request) -> Response:
    """Grade what failed once more."""
    grader, batch = _own(request), request.path_params["batch"]
    grader.store.requeue(batch, ("failed",))
    grader.start()
    return RedirectResponse(f"/batches/{batch}", 303)


async def submission_page(request: Request) -> Response:
    return _page("submission.html", **_result(_grader(request), request.path_params["submission"]))


async def student_page(request: Request) -> Response:
    return _page("student.html", **_result(_grader(request), request.path_params["submission"]))


async def correct(request: Request) -> Response:
    grader, submission = _own(request), request.path_params["submission"]
    async with request.form(max_files=0, max_fields=10) as form:
        try:
            points = float(str(form.get("points")))
        except ValueError as error:
            raise HTTPException(400, "points is a number") from error
        grader.store.correct(submission, str(form.get("section")), points, str(form.get("reason", "")))
    return RedirectResponse(f"/submissions/{submission}", 303)


async def models_page(request: Request) -> Response:
    store = _grader(request).store
    by_model = defaultdict(list)
    for run in store.runs():
        by_model[run.model].append(run)
    efficiencies = store.efficiencies()
    return _page("models.html", models=by_model, efficiency=mean(efficiencies) if efficiencies else None)


async def script(_request: Request) -> Response:
    text = (Path(__file__).parent / "templates" / "progress.js").read_text("utf-8")
    return PlainTextResponse(text, media_type="text/javascript")


async def refused(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 400
    message = error.detail if isinstance(error, HTTPException) else str(error)
    return _page("error.html", status, message=message)


def _page(name: str, status: int = 200, **values: Any) -> HTMLResponse:
    return HTMLResponse(PAGES.get_template(name).render(**values), status, {"Content-Security-Policy": POLICY})


def _grader(request: Request) -> Grader:
    grader: Grader = request.app.state.grader
    return grader


def _own(request: Request) -> Grader:
    """For requests that change something: a browser names the page that sends them, and it has to be this one."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise HTTPException(403, "the form is of another page")
    return _grader(request)


def _rows(grader: Grader, batch: str) -> list[dict[str, Any]]:
    return [_row(grader, submission) for submission in grader.store.batch(batch)]


def _row(grader: Grader, submission: Submission) -> dict[str, Any]:
    grade = grader.store.grade(submission.id)
    layers: Mapping[Layer, str] = grader.progress.get(submission.id, {})
    if grade is not None:
        layers = graded(grade, grader.store.runs(submission.id))
    row: dict[str, Any] = {"id": submission.id, "name": submission.name, "state": submission.state}
    waits = grader.gateway.waits_for if submission.state == "running" else ""
    row |= {"layers": {layer: layers.get(layer, "") for layer in LAYERS}, "error": submission.error or waits}
    if grade is None:
        return row | {"points": "", "review": ""}
    points = sum(final_points(grade.score, grader.store.corrections(submission.id)).values())
    return row | {
        "points": f"{points:g} of {grade.score.maximum}",
        "review": "review" if grade.score.needs_review else "",
    }


def _result(grader: Grader, number: int) -> dict[str, Any]:
    submission, grade = grader.store.submission(number), grader.store.grade(number)
    if submission is None:
        raise HTTPException(404, "there is no such notebook")
    if grade is None:
        raise HTTPException(404, f"{submission.name} has no grade yet: it is {submission.state}. {submission.error}")
    corrections = grader.store.corrections(number)
    points = final_points(grade.score, corrections)
    assignment = grader.assignments.get(submission.assignment)
    sections = assignment.rubric.sections if assignment else ()
    return {
        "cells": notebook.cells(notebook.read(grader.store.notebook(number)), sections),
        "reasons": {one.section: one.reason for one in corrections},
        "submission": submission,
        "grade": grade,
        "points": points,
        "total": round(sum(points.values()), 2),
        "corrections": corrections,
        "runs": grader.store.runs(number),
    }
