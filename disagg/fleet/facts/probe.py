"""Run a probe: a POSIX script that prints lines of tab-separated fields, the first the line's kind, "end" last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from disagg.errors import FleetError
from disagg.fleet.machine.machine import Machine, script


def run_probe(
    machine: Machine,
    name: str,
    argv: Sequence[str],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> ProbeOutput:
    """Run a probe, a file of scripts/, on a machine. Raises HostUnreachable, or FleetError if it does not reach its
    end."""
    result = machine.run(argv, script=script("probe.sh", name), environment=environment, timeout=timeout)
    if not result.ok:
        raise FleetError(f"{machine.name}: {name} failed there: {result.reason(3)}", f"disagg ssh {machine.name}")
    return ProbeOutput.parse(machine.name, result.stdout)


@dataclass(frozen=True, slots=True)
class ProbeOutput:
    """A probe's lines, split into fields. Kinds that the caller does not read are ignored."""

    lines: tuple[tuple[str, ...], ...]

    @staticmethod
    def parse(host: str, text: str) -> ProbeOutput:
        """Raises FleetError if the "end" line is missing."""
        lines = tuple(tuple(line.split("\t")) for line in text.split("\n"))
        if ("end",) not in lines:
            raise FleetError(
                f"{host}: its facts cannot be read: the probe ended early",
                "a login script on that machine may print or exit: look at its ~/.profile, ~/.bashrc, ~/.zshenv",
            )
        return ProbeOutput(lines)

    def all(self, kind: str, width: int) -> Iterator[tuple[str, ...]]:
        """The first `width` fields of all lines of a kind; shorter lines are skipped."""
        return (line[1 : width + 1] for line in self.lines if line[0] == kind and len(line) > width)

    def first(self, kind: str, width: int) -> tuple[str, ...]:
        """The first such line, or empty fields if there is none."""
        return next(self.all(kind, width), ("",) * width)

    def text(self, kind: str) -> str:
        """The field of the first line of a kind, "" if there is none."""
        return self.first(kind, 1)[0]

    def has(self, kind: str) -> bool:
        """Whether there is a line of this kind."""
        return any(line[0] == kind for line in self.lines)


def number(text: str) -> int | None:
    """A decimal number, None for anything else."""
    return int(text) if text.isascii() and text.isdigit() else None


def kib(text: str) -> int | None:
    """KiB as bytes."""
    return None if (value := number(text)) is None else value << 10
