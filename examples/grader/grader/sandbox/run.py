"""Execute a notebook in the jail, within limits."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from pydantic import ValidationError

from grader.errors import SandboxError
from grader.rubric import Limits
from grader.sandbox import jail, probe
from grader.sandbox.kernel import JailedKernel, check_machine
from grader.sandbox.values import (
    MAX_COLUMNS,
    MAX_ITEMS,
    MAX_TEXT,
    PLOTS,
    VARIABLES,
    CellRun,
    Execution,
    Series,
    Value,
)

START_S: Final = 120
TOTAL_OUTPUT: Final = 8 << 20
"""Characters of all outputs of a notebook, with the data of plots."""
HOSTILE: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError)
"""What nbclient raises if a kernel sends messages that are none."""
COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


def execute(notebook: Any, variables: Sequence[str], limits: Limits, data: Path | None = None) -> Execution:
    """Run its code cells in order. Blocks: call it from a thread, where nbclient leaves signals alone."""
    return asyncio.run(_execute(notebook, variables, limits, data))


async def _execute(notebook: Any, variables: Sequence[str], limits: Limits, data: Path | None) -> Execution:
    check_machine()
    indices = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    with tempfile.TemporaryDirectory(prefix="grader-") as folder:
        first = nbformat.v4.new_code_cell(probe_source(Path(folder) / "shared", variables, limits))
        combined = nbformat.v4.new_notebook(cells=[first, *(_code(notebook.cells[index].source) for index in indices)])
        kernel = JailedKernel(Path(folder), limits, data)
        client = BoundedClient(
            combined,
            km=kernel,
            timeout=START_S,
            interrupt_on_timeout=True,
            allow_errors=True,
            startup_timeout=START_S,
            shutdown_kernel="immediate",
            store_widget_state=False,
        )
        stopped = await _run_cells(client, combined, limits, Path(folder) / "kernel.log")
    runs = [_cell_run(index, cell) for index, cell in zip(indices, combined.cells[1:], strict=True)]
    return Execution(tuple(runs), _variables(combined.cells, variables), stopped)


class BoundedClient(NotebookClient):  # type: ignore[misc,unused-ignore]  # Any, unless it is installed
    """Keeps no more than TOTAL_OUTPUT, and ends the kernel beyond it."""

    kept = 0
    done = 0

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        if msg["msg_type"].startswith("comm") or msg["msg_type"] in ("update_display_data", "clear_output"):
            return None
        if msg["msg_type"] not in ("status", "execute_input"):
            self.kept += len(json.dumps(msg["content"], default=str))
            if self.kept > TOTAL_OUTPUT:
                raise TooMuchOutput
        return super().process_message(msg, cell, cell_index)

    async def end(self) -> None:
        if self.kc is not None:
            self.kc.stop_channels()
        if self.km is not None:
            await self.km.shutdown_kernel(now=True)
            self.km.context.destroy(linger=0)


def last_line(log: Path) -> str:
    """Of what the kernel said: the reason, not a part of a traceback."""
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:500]


class TooMuchOutput(Exception):
    """More than TOTAL_OUTPUT."""


async def _run_cells(client: BoundedClient, combined: Any, limits: Limits, log: Path) -> Any:
    deadline = asyncio.timeout(limits.notebook_seconds)
    try:
        with log.open("wb") as output:
            await client.async_start_new_kernel(stdout=output, stderr=output)
        await client.async_start_new_kernel_client()
        await client.async_execute_cell(combined.cells[0], 0)
        if errors := [_error(output) for output in combined.cells[0].outputs if output.output_type == "error"]:
            raise SandboxError(f"the kernel cannot be watched: {errors[0]}")
        client.done, client.timeout = 1, math.ceil(limits.cell_seconds)
        async with deadline:
            for position in range(1, len(combined.cells)):
                await client.async_execute_cell(combined.cells[position], position)
                client.done = position + 1
    except TimeoutError:
        return "time"
    except (CellTimeoutError, TooMuchOutput):
        return "output"
    except (DeadKernelError, *HOSTILE) as error:
        if client.done == 0:
            raise SandboxError(f"the kernel did not start: {last_line(log) or error}") from error
        if deadline.expired():  # nbclient takes its own cancellation for a kernel that ended
            return "time"
        if await client.km.provisioner.poll() == jail.OUT_OF_BOUNDS:
            return "memory"
        return "output" if client.kept > TOTAL_OUTPUT else "kernel ended"
    finally:
        await client.end()
        for cell in combined.cells[client.done :]:
            cell.metadata["grader"] = "not run"
    return None


def probe_source(shared: Path, variables: Sequence[str], limits: Limits) -> str:
    """The first cell: the probe in a namespace of its own, so that the student's has no names of it."""
    settings = probe.Settings(
        shared=str(shared),
        ready=jail.READY,
        variables=list(variables),
        cell_output=limits.cell_output,
        max_items=MAX_ITEMS,
        max_columns=MAX_COLUMNS,
        max_text=MAX_TEXT,
    )
    load = f"exec(compile({inspect.getsource(probe)!r}, 'probe', 'exec'), (_probe := {{}}))"
    return f"{load}\n_probe['install']({settings!r})\ndel _probe"


def _code(source: str) -> Any:
    return nbformat.v4.new_code_cell(source)


def _cell_run(index: int, cell: Any) -> CellRun:
    texts = [_text(output) for output in cell.outputs]
    errors = [_error(output) for output in cell.outputs if output.output_type == "error"]
    plots = [series for output in cell.outputs for series in _plots(output)]
    state = "failed" if errors else "ran"
    if cell.metadata.get("grader"):
        state = "not run"
    return CellRun(index, state, "".join(texts)[:MAX_TEXT], errors[0] if errors else "", tuple(plots))  # type: ignore[arg-type]  # one of its three states


def _text(output: Any) -> str:
    if output.output_type == "stream" and output.name == "stdout":
        return str(output.text)
    if output.output_type == "execute_result":
        return str(output.data.get("text/plain", "")) + "\n"
    return ""


def _error(output: Any) -> str:
    if output.ename == "KeyboardInterrupt":
        return "the cell reached its time limit"
    return COLOURS.sub("", f"{output.ename}: {output.evalue}")[:300]


def _plots(output: Any) -> list[Series]:
    data = getattr(output, "data", {})
    try:
        return PLOTS.validate_json(data[probe.PLOTS_TYPE])
    except (KeyError, ValidationError):
        return []


def _variables(cells: Sequence[Any], names: Sequence[str]) -> dict[str, Value]:
    """The last value of each, also if the kernel ended later."""
    found: dict[str, Value] = {}
    for output in (output for cell in cells for output in cell.outputs):
        try:
            found |= VARIABLES.validate_json(getattr(output, "data", {})[probe.VARIABLES_TYPE])
        except (KeyError, ValidationError):
            continue
    return {name: value for name, value in found.items() if name in names}
