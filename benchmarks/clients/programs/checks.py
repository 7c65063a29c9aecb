"""What the programs share. They run in the environments of their clients: the standard library only.

A program gives `run` one function for each feature. What came of each is a line of JSON on stdout, at once, so that a
program which is ended has reported what it had tried.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import traceback
from collections.abc import Callable, Sequence
from typing import Any

URL = os.environ.get("GATEWAY_URL", "")
"""Without /v1."""
V1 = f"{URL}/v1"
MODEL = os.environ.get("GATEWAY_MODEL", "")
KEY = "unused"
PET = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"type": "string", "enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
QUESTION = "What is 6 * 7?"


def need(holds: object, what: str) -> None:
    """Fail if what a feature needs does not hold."""
    if not holds:
        raise AssertionError(what)


def is_pet(value: Any) -> bool:
    """Whether a value, or its JSON, has the form PET."""
    found = json.loads(value) if isinstance(value, str) else value
    return set(found) == {"name", "age"} and isinstance(found["age"], int) and 0 <= found["age"] <= 99


def refused(call: Callable[[], object], *named: str) -> str:
    """The error that a call raises, which must name all of these. Fails if there is none."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - each client has errors of its own
        text = f"{type(error).__name__}: {error}"
        need(all(name.lower() in text.lower() for name in named), f"the error does not name {named}: {text}")
        return text
    raise AssertionError("it was not refused")


def run(**features: Callable[[], Any]) -> None:
    """Try every feature, print what came of it, and end. Threads that a client has left would keep the program."""
    report(**features)
    os._exit(0)


def report(**features: Callable[[], Any]) -> None:
    """Try every feature and print what came of it."""
    for name, call in features.items():
        try:
            result = call()
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            line = {"feature": name, "works": True, "note": result if isinstance(result, str) else ""}
        except BaseException as error:
            if os.environ.get("TRACEBACKS"):
                traceback.print_exc()
            line = {"feature": name, "works": False, "note": cause(error)}
            if isinstance(error, KeyboardInterrupt):
                raise
        print(json.dumps(line), flush=True)


def cause(error: BaseException) -> str:
    """An error in one line: that of the gateway, if there is one below those that the client has put around it."""
    chain, seen = [error], {id(error)}
    while (below := chain[-1].__cause__ or chain[-1].__context__) is not None and id(below) not in seen:
        seen.add(id(below))
        chain.append(below)
    best = next((one for one in chain if "Error code" in str(one)), error)
    return " ".join(f"{type(best).__name__}: {best}".split())[:300]


def ended(command: Sequence[str], *, input: str | None = None, seconds: float = 150.0, **variables: str) -> str:
    """What a command prints. Fails if it does not end well in time."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        command, input=input, capture_output=True, text=True, timeout=seconds, env=environment, check=False
    )
    text = done.stdout + done.stderr
    need(done.returncode == 0, f"exit code {done.returncode}: {' '.join(text.split())[-250:]}")
    return done.stdout


async def _awaited(result: Any) -> Any:
    return await result
