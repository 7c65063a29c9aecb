"""Runs a notebook in a Jupyter kernel without network and without the grader's files.

jail     namespaces, a read-only file system, limits; then the kernel
kernel   the kernel in the jail, over Unix sockets
probe    inside the kernel: variables and the data of plots
run      cell by cell, within time and output limits
values   what comes out, validated
"""

from __future__ import annotations

from grader.sandbox.run import execute
from grader.sandbox.values import CellRun, Execution, Series, Value

__all__ = ["CellRun", "Execution", "Series", "Value", "execute"]
