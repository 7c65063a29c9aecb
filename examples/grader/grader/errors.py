"""Errors that a teacher can correct.

GraderError
├── AssignmentError   the assignment's folder is wrong
├── NotebookError     a notebook cannot be read or is too large
├── SandboxError      this machine cannot isolate student code
└── ModelError        the gateway gave no usable answer
"""

from __future__ import annotations


class GraderError(Exception):
    """What failed, and what to do about it."""


class AssignmentError(GraderError):
    """rubric.toml or solution.ipynb is missing or wrong."""


class NotebookError(GraderError):
    """Not a notebook, or outside the bounds."""


class SandboxError(GraderError):
    """No namespaces here, or the kernel did not start."""


class ModelError(GraderError):
    """The gateway refused a request, or did not answer in time."""
