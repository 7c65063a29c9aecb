"""In place of what is behind a test: a gateway with answers that fit the schemas, or with failures; a kernel that runs
nothing, and has results for the solution."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from grader import notebook, rubric
from grader.models import Gateway
from grader.sandbox import CellRun, Execution, Series, Value
from grader.sandbox.values import Number, Table, Text

SAMPLE: Final = rubric.load(Path(__file__).parents[1] / "assignments" / "sample")
SOLUTION: Final = notebook.read(SAMPLE.solution)
RESULTS: Final[dict[str, Value]] = {
    "mean": Number(kind="number", value=14),
    "by_city": Table(kind="table", columns={"city": ["Rome"], "lowest": [8.0], "highest": [26.0]}),
    "warmest": Text(kind="text", value="Lima"),
}


def run_nothing(content: Any, *_: object) -> Execution:
    """In place of `sandbox.execute`."""
    code = [index for index, cell in enumerate(content.cells) if cell.cell_type == "code"]
    if content.cells == SOLUTION.cells:
        return ran(code)
    return Execution(tuple(CellRun(index, "not run") for index in code))


def ran(code: Sequence[int]) -> Execution:
    """What the sample's solution leaves, in its code cells."""
    line = Series(kind="line", x=[1.0], y=[8.0])
    return Execution(tuple(CellRun(index, "ran", "14", plots=(line,)) for index in code), RESULTS)


class FakeGateway(Gateway):
    """failures: statuses of the next requests, in order, before they are answered. It counts what it answers."""

    def __init__(self, failures: Sequence[int] = (), *, deadline: float = 300.0, points: int = 2) -> None:
        super().__init__("http://127.0.0.1:9/v1", deadline=deadline)
        self._failures = [*failures]
        self._points = points
        self.answered: list[str] = []
        self.prompts: list[str] = []

    async def check(self) -> None:
        """It answers."""

    async def rooms(self, models: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(models, 4000)

    async def _wait(self, attempt: int, began: float, reason: str) -> None:
        """No pause between tries."""

    async def _send(self, requests: Sequence[Any], began: float) -> tuple[dict[str, Any], str]:
        results = [self._result(index, request) for index, request in enumerate(requests)]
        return {"results": results, "disagg": {"efficiency": 0.75}}, ""

    def _result(self, index: int, request: Any) -> dict[str, Any]:
        if self._failures and (status := self._failures.pop(0)) != 200:
            return {"index": index, "status": status, "seconds": 0.1, "body": {"error": {"message": "no host"}}}
        self.answered.append(request["id"])
        self.prompts.append(json.dumps(request["messages"]))
        schema = request["response_format"]["json_schema"]["schema"]
        choice = {
            "finish_reason": "stop",
            "message": {"content": json.dumps(self._content(schema))},
            "disagg": {"method": "disaggregated", "prefill_server": "p", "decode_server": "d", "ttft": 0.5},
        }
        body = {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 5}}
        return {"index": index, "status": 200, "seconds": 0.1, "body": body}

    def _content(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "summary" in schema["properties"]:
            return {"summary": "=1+1", "strengths": ["s"], "improvements": []}
        sections = schema["properties"]["sections"]["properties"]
        judgements = {name: {"points": self._points, "comment": "c"} for name in sections}
        return {"sections": judgements, "total": self._points * len(sections)}
