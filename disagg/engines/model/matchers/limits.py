"""What the form of an answer may cost, and why one was refused. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

MIB: Final = 1 << 20


def _parser() -> dict[str, Any]:
    return {
        "max_items_in_row": 2_000,
        "initial_lexer_fuel": 1_000_000,
        "step_lexer_fuel": 200_000,
        "step_max_items": 50_000,
        "max_lexer_states": 100_000,
        "max_grammar_size": 500_000,
        "precompute_large_lexemes": True,
        "verbose_errors": False,
    }


@dataclass(frozen=True, slots=True)
class FormLimits:
    """Bounds on the processes that compile and follow forms.

    Measured with a schema of 64 KiB, the largest: compiled in at most 0.3 s and 30 MiB unless it was made to be slow,
    with a vocabulary of 150,000 tokens, too; and the slowest mask took 55 ms.

    compile_cpu_s: of the CPU, for compiling one form. step_cpu_s: for one token and the mask after it.
    process_bytes: by which a process may grow. all_bytes: by which all of them may. compiling: forms that are compiled
    at a time. waiting: forms that wait for that, beyond which a request is refused as Overloaded. idle: processes that
    are kept for the next answer of their form. idle_bytes: by which such a process may have grown. refused_s: for so
    long a form that was too much is refused without a second try. watch_s: between two looks at the memory. parser:
    llguidance's own limits. `verbose_errors` would quote the schema in errors.
    """

    compile_cpu_s: float = 3.0
    step_cpu_s: float = 1.0
    process_bytes: int = 256 * MIB
    all_bytes: int = 1024 * MIB
    compiling: int = 4
    waiting: int = 256
    idle: int = 16
    idle_bytes: int = 32 * MIB
    refused_s: float = 60.0
    watch_s: float = 0.05
    parser: dict[str, Any] = field(default_factory=_parser)


STEP_S: Final = 0.5
"""The engine waits for a mask no longer than this after the token before it: all its answers wait meanwhile."""
PATIENCE_S: Final = 2.0
"""The engine waits for the masks of one answer for so long in all, and PATIENCE_TOKEN_S more for each token."""
PATIENCE_TOKEN_S: Final = 0.02
COMPILED_S: Final = 60.0
"""A form that is neither compiled nor refused after so long, with its wait for others: the processes are stuck."""
REBUILDS: Final = 2
"""An answer whose process ended through no fault of its own goes on in a new one, at most so often."""


class Reason(IntEnum):
    """Why a form or its answer cannot go on."""

    NONE = 0
    TIME = 1  # compiling took over compile_cpu_s
    STEP = 2  # a token took over step_cpu_s
    MEMORY = 3  # its process grew by over process_bytes, or all by over all_bytes
    CRASH = 4  # its process ended by itself
    PARSER = 5  # one of llguidance's own limits
    REFUSED = 6  # llguidance cannot follow the schema; its text is in the shared memory
    TOKEN = 7  # a token of the answer is not allowed
    BUSY = 8  # too many forms wait
    LOST = 9  # its process ended for another reason: the answer can go on in a new one


def too_complex(reason: Reason, limits: FormLimits) -> str:
    """The bound that a form is over, for a message."""
    return {
        Reason.TIME: f"it is not compiled after {limits.compile_cpu_s:g} s",
        Reason.STEP: f"the next token is not found within {STEP_S:g} s",
        Reason.MEMORY: f"it takes over {limits.process_bytes // MIB} MiB",
        Reason.CRASH: "it ends the process that compiles it",
        Reason.PARSER: "it has too many ways to go on",
    }[reason]
