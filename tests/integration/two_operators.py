"""Two operators at once, and commands that are killed: how the fleet is left, and whether `disagg status` says so.

    python -m tests.integration.two_operators --out rows.jsonl [--moments 8] [--only pairs|kills] [--commands A,B]
    python -m tests.integration.two_operators --table rows.jsonl

Runs on the bed of four hosts in namespaces, which needs root, with simulated engines. Two operators have a machine, a
checkout and a token file each. Each pair of commands is begun by one after the other, at `--moments` offsets within the
first one's usual time. Each command is killed with SIGKILL at as many moments of it, then run by the other operator,
and unless that succeeds again by the first one. What runs, what is pending and which tokens are valid is read from the
hosts themselves. Every row is appended to the file; those that are there are not run again. Takes hours on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from disagg.token import token_digest
from disagg.version import DIGESTS, RELEASE_VARIABLE
from tests.integration.deployed import ROOT, Operator
from tests.simulated import write_config
from tests.testbed import bed as testbed
from tests.testbed.bed import Bed, BedHost
from tests.testbed.uv import install_uv

COMMANDS: Final[Mapping[str, tuple[object, ...]]] = {
    "deploy": ("deploy", "--yes"),
    "rollout": ("rollout", "--yes", "--timeout", 120),
    "restart": ("restart", "--timeout", 120),
    "stop": ("stop",),
    "token rotate": ("token", "rotate", "--yes"),
}
PATIENCE_S = 400.0
MACHINES = ("desk", "laptop")
_HOST = """
[hosts.{name}]
address = "{address}"
roles = ["{role}"]
model = "m"
port = {port}
{kv_port}connector = "ssh"
service = "process"
hardware = "h200-sxm"
engine = {{name = "simulated"}}
"""


@dataclass(frozen=True, slots=True)
class HostTruth:
    """What a host shows to its own root. runs, current: the code of the release that its server runs ("" if none does),
    and of the one that was deployed last. tokens: digests of those that it accepts."""

    runs: str
    current: str
    tokens: tuple[str, ...]

    @staticmethod
    def of(host: BedHost) -> HostTruth:
        own = host.home / ".disagg/hosts" / host.name
        running = next(filter(None, (_release(process) for process in host.processes())), "")
        return HostTruth(
            _code(own / "releases" / running) if running else "",
            _code(own / "current"),
            tuple(sorted(token_digest(line)[:8] for line in _read(own / "token").split())),
        )


Truth = Mapping[str, HostTruth]


@dataclass(frozen=True, slots=True)
class Command:
    """How one command of one operator ended. code: its exit code. release: the code that it would have deployed, if
    it deploys. touched: hosts that have its release or a line of it in their audit."""

    name: str
    code: int
    said: str
    release: str = ""
    touched: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        if self.code == 0:
            return "done"
        if self.code < 0:
            return "killed"
        return "refused" if "is locked" in self.said else "failed"


@dataclass(frozen=True, slots=True)
class Row:
    """One trial. what: both commands, or the killed one. offset: seconds after the first one began. then: how the fleet
    was left. status: the exit code of `disagg status` there. faults: what must not be."""

    what: str
    moment: int
    offset: float
    outcomes: tuple[str, ...]
    why: tuple[str, ...]
    then: tuple[str, ...]
    status: int
    faults: tuple[str, ...] = ()


def differences(truth: Truth) -> tuple[str, ...]:
    """In what the hosts differ, or are not as a fleet that serves; empty if in nothing."""
    hosts = truth.values()
    running = {one.runs for one in hosts} - {""}
    found = {
        "different code runs": len(running) > 1,
        "different code is pending": len({one.current for one in hosts}) > 1,
        "different tokens": len({one.tokens for one in hosts}) > 1,
        "two tokens": any(len(one.tokens) > 1 for one in hosts),
        "some are down": "" in {one.runs for one in hosts} and bool(running),
        "all are down": not running,
    }
    return tuple(what for what, is_so in found.items() if is_so)


def faults(commands: Sequence[Command], truth: Truth, status: int, said: str) -> tuple[str, ...]:
    """What must not be, whoever comes first: a host that differs unsaid, a loser that has changed something, no winner.
    said: by `disagg status`."""
    left, found = differences(truth), list[str]()
    unsaid = [one for one in left if one != "two tokens"]
    if status == 0 and unsaid:
        found.append(f"status ends with 0, and {', '.join(unsaid)}")
    if "two tokens" in left and status in (0, 1) and "token rotate" not in said:
        found.append("status says nothing about two tokens")
    for one in commands:
        if one.outcome == "refused" and one.touched:
            found.append(f"{one.name} was refused, and has changed {', '.join(one.touched)}")
        if "Traceback" in one.said:
            found.append(f"{one.name} ends in a traceback")
    if len(commands) > 1 and all(one.outcome == "refused" for one in commands):
        found.append("both were refused")
    return tuple(found)


@dataclass
class Person:
    """One operator, on a machine of that name. rounds: how often the code there was changed."""

    machine: str
    operator: Operator
    rounds: int = 0
    home: Path = field(init=False)

    def __post_init__(self) -> None:
        self.home = self.operator.folder / "home"
        shutil.copytree(self.operator.bed.home / ".ssh", self.home / ".ssh")

    @property
    def token_file(self) -> Path:
        return self.operator.folder / "state/disagg/operators/token"

    def change_code(self) -> None:
        """Another version of disagg from now on."""
        self.rounds += 1
        path = Path(self.operator.code, "disagg/units.py")
        text = path.read_text(encoding="utf-8").split("\n# of ")[0]
        path.write_text(f"{text}\n# of {self.machine}, {self.rounds}\n", encoding="utf-8")

    def code(self) -> str:
        """The hash of its code."""
        argv = [sys.executable, "-c", "from disagg.version import code_hash; print(code_hash())"]
        return subprocess.check_output(argv, env=self.environment, text=True, cwd=self.operator.code).strip()

    @property
    def environment(self) -> dict[str, str]:
        return {**self.operator.environment, "HOME": str(self.home), "COLUMNS": "200"}

    def begin(self, *arguments: object) -> Begun:
        """Start `disagg ARGUMENTS` on this operator's machine."""
        inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.machine]
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - Begun.end closes it
        process = subprocess.Popen(
            [*inside, *self.operator.argv(*arguments)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=self.environment,
            cwd=self.operator.code,
        )
        return Begun(self, " ".join(map(str, arguments)), process, output, time.monotonic())

    def run(self, *arguments: object) -> Command:
        return self.begin(*arguments).end()


@dataclass
class Begun:
    """A command that runs."""

    person: Person
    name: str
    process: subprocess.Popen[bytes]
    output: Any
    since: float

    def end(self, name: str = "", release: str = "") -> Command:
        """Wait for its end. name, release: see Command."""
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        with self.output:
            self.output.seek(0)
            said = self.output.read()
        by, pid = f"@{self.person.machine}", self.process.pid
        touched = [
            host.name
            for host in self.person.operator.bed.hosts.values()
            if _in_audit(host, by, pid) or (release and _has_release(host, release))
        ]
        return Command(name or self.name, code, said, release, tuple(touched))


class Trials:
    """The fleet, both operators, and the rows so far. usual: seconds that each command takes alone."""

    def __init__(self, bed: Bed, folder: Path, out: Path, moments: int) -> None:
        self.bed, self.out, self.moments = bed, out, moments
        install_uv(bed)
        self.people = [_person(bed, folder, machine) for machine in MACHINES]
        self.usual: dict[str, float] = {}
        lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
        self.done = {(row["what"], row["moment"]) for row in map(json.loads, lines)}

    @property
    def truth(self) -> dict[str, HostTruth]:
        return {name: HostTruth.of(host) for name, host in self.bed.hosts.items()}

    def even(self) -> None:
        """All hosts serve one code with one token again, and both operators have it."""
        first, other = self.people
        for one in self.people:
            begun = one.token_file.with_name("token.next").exists() or len(_digests(one.token_file)) > 1
            accepted = {token for host in self.truth.values() for token in host.tokens}
            if begun and self.token_files_differ() and _digests(one.token_file) & accepted:
                _expect(one.run("token", "rotate", "--yes", "--break-lock"))
        theirs = next(host for host in self.bed.hosts.values())
        tokens = _read(theirs.home / ".disagg/hosts" / theirs.name / "token")
        for one in self.people:
            if tokens:
                one.token_file.parent.mkdir(parents=True, exist_ok=True)
                one.token_file.write_text(tokens)
                one.token_file.chmod(0o600)
            for left in (*one.token_file.parents[1].rglob("rollout.json"), one.token_file.with_name("token.next")):
                left.unlink(missing_ok=True)
        truth = self.truth
        pending = any(one.runs != one.current for one in truth.values())
        if len({one.current for one in truth.values()}) > 1 or not tokens:
            _expect(first.run("deploy", "--yes", "--break-lock"))
            pending = True
        if not tokens:
            shutil.copytree(first.token_file.parent, other.token_file.parent)
        if differences(self.truth) or pending:
            _expect(first.run("restart", "--all-at-once", "--break-lock", "--timeout", 120))
        left_over = differences(self.truth)
        assert not left_over, f"the fleet cannot be made even: {left_over}"

    def token_files_differ(self) -> bool:
        """Whether a rotation was cut short: on a host or at an operator's there are two tokens, or different ones."""
        truth = self.truth.values()
        begun = any(one.token_file.with_name("token.next").exists() for one in self.people)
        return begun or len({one.tokens for one in truth}) > 1 or any(len(one.tokens) > 1 for one in truth)

    def measure(self, names: Iterable[str]) -> None:
        """How long each command takes alone."""
        for name in names:
            self.even()
            self.people[0].change_code()
            began = time.monotonic()
            _expect(self.people[0].run(*COMMANDS[name]))
            self.usual[name] = time.monotonic() - began
            _print(f"{name}: {self.usual[name]:.1f} s")

    def pair(self, first: str, second: str, moment: int) -> None:
        """The first operator begins `first`, the other one `second` a while later."""
        what = f"{first}, {second}"
        if (what, moment) in self.done:
            return
        self.even()
        offset = self.usual[first] * moment / self.moments
        for one in self.people:
            one.change_code()
        codes = [
            one.code() if name in ("deploy", "rollout") else ""
            for one, name in zip(self.people, (first, second), strict=True)
        ]
        earlier = self.people[0].begin(*COMMANDS[first])
        time.sleep(max(0.0, earlier.since + offset - time.monotonic()))
        later = self.people[1].begin(*COMMANDS[second])
        self.judge(what, moment, offset, [earlier.end(first, codes[0]), later.end(second, codes[1])])

    def killed(self, name: str, moment: int) -> None:
        """The command is killed, then run by the other operator, and unless that succeeds, again by the same one."""
        what = f"{name} killed"
        if (what, moment) in self.done:
            return
        self.even()
        person = self.people[0]
        person.change_code()
        offset = self.usual[name] * (moment + 0.5) / self.moments
        begun = person.begin(*COMMANDS[name])
        time.sleep(offset)
        with suppress(ProcessLookupError):
            os.kill(begun.process.pid, signal.SIGKILL)
        self.judge(what, moment, offset, [begun.end(name)])
        other = self.people[1]
        other.change_code()
        code = other.code() if name in ("deploy", "rollout") else ""
        theirs = other.begin(*COMMANDS[name]).end(name, code)
        self.judge(f"{what}{_OTHER}", moment, offset, [theirs])
        if theirs.code:
            again = person.begin(*COMMANDS[name]).end(name)
            self.judge(f"{what}{_AGAIN}", moment, offset, [again], needs_success=True)

    def judge(
        self, what: str, moment: int, offset: float, commands: list[Command], *, needs_success: bool = False
    ) -> None:
        """Ask `disagg status`, by an operator whose token the hosts have, and write the row."""
        status, truth = self.status()
        found = faults(commands, truth, status.code, status.said)
        if needs_success and commands[0].code:
            found = (*found, f"{commands[0].name} again: {_last(commands[0].said)}")
        row = Row(
            what,
            moment,
            round(offset, 1),
            tuple(one.outcome for one in commands),
            tuple(_last(one.said) if one.code > 0 else "" for one in commands),
            differences(truth),
            status.code,
            found,
        )
        with self.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(row)) + "\n")
        _print(f"{what} {offset:.1f} s: {', '.join(row.outcomes)}; {row.then} status {row.status} {found}")
        if found:
            said = "\n".join(f"--- {one.name}: {one.code}\n{one.said}" for one in (*commands, status))
            with self.out.with_suffix(".faults").open("a", encoding="utf-8") as out:
                out.write(f"=== {what} {moment}: {found}\n{truth}\n{said}\n")

    def status(self) -> tuple[Command, Truth]:
        """`disagg status`, and the truth: read again until it was the same before and after."""
        while True:
            before = self.truth
            accepted = {token for one in before.values() for token in one.tokens}
            person = next((one for one in self.people if _digests(one.token_file) & accepted), self.people[0])
            status = person.run("status")
            if self.truth == before:
                return status, before


def _person(bed: Bed, folder: Path, machine: str) -> Person:
    own = folder / machine
    code = shutil.copytree(Path(ROOT, "disagg"), own / "code/disagg", ignore=shutil.ignore_patterns("__pycache__"))
    text = '[fleet]\nname = "operators"\n\n[deploy]\ninstaller = "uv"\n'
    text += f'\n[models.m]\ncontext = 4096\nsources = {{simulated = "{write_config(own)}"}}\n'
    for host in bed.hosts.values():
        role = "decode" if host.mac else "prefill"
        port, kv = (8001, "kv_port = 9001\n") if host.mac else (8000, "")
        text += _HOST.format(name=host.name, address=host.address, role=role, port=port, kv_port=kv)
    (own / "hosts.toml").write_text(text, encoding="utf-8")
    return Person(machine, Operator(bed, own / "hosts.toml", own, str(code.parent)))


def _release(process: psutil.Process) -> str:
    """The release that this process serves, if it is a host's server."""
    try:
        if "disagg.servers" not in process.cmdline():
            return ""
        return process.environ().get(RELEASE_VARIABLE, "")
    except psutil.Error:
        return ""


def _code(release: Path) -> str:
    return (_read(release / DIGESTS).split() or [""])[0]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _digests(file: Path) -> set[str]:
    return {token_digest(token)[:8] for token in _read(file).split()}


def _in_audit(host: BedHost, by: str, pid: int) -> bool:
    for line in _read(host.home / ".disagg/hosts" / host.name / "logs/audit.log").splitlines():
        entry = json.loads(line)
        if str(entry.get("by", "")).endswith(by) and entry.get("pid") == pid:
            return True
    return False


def _has_release(host: BedHost, code: str) -> bool:
    return any(_code(path) == code for path in (host.home / ".disagg/hosts" / host.name / "releases").glob("*"))


def _last(said: str) -> str:
    """The first line that is an error, else the last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error")), lines[-1] if lines else "")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _expect(done: Command) -> None:
    if done.code:
        raise SystemExit(f"disagg {done.name}: exit code {done.code}\n{done.said}")


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: who of two had the locks, and how killed commands left the fleet. Then the faults, if any."""
    lines = [f"| first, then | {' | '.join(COMMANDS)} |", f"| --- |{' --- |' * len(COMMANDS)}"]
    for first in COMMANDS:
        cells = [
            _counted(
                _WINNER.get(tuple(row["outcomes"]), " / ".join(row["outcomes"]))
                for row in _of(rows, f"{first}, {second}")
            )
            for second in COMMANDS
        ]
        lines.append(f"| {first} | {' | '.join(cells)} |")
    heads = ("killed", "the hosts then", "`status`", "another operator runs it", "run again", "the hosts then")
    lines += ["", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for name in COMMANDS:
        killed, other, again = (_of(rows, f"{name} killed{after}") for after in ("", _OTHER, _AGAIN))
        cells = [name, _left(killed), _counted(row["status"] for row in killed)]
        cells += [_counted(row["outcomes"][0] for row in one) for one in (other, again)]
        lines.append(f"| {' | '.join([*cells, _left(again)])} |")
    found = [f"{row['what']}, {row['offset']} s: {fault}" for row in rows for fault in row["faults"]]
    return "\n".join([*lines, "", f"{len(rows)} trials, {len(found)} faults", *found])


_OTHER, _AGAIN = ", then another operator", ", and again"
_WINNER: Final = {
    ("done", "refused"): "first",
    ("refused", "done"): "second",
    ("done", "done"): "both",
}


def _of(rows: Sequence[Mapping[str, Any]], what: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["what"] == what]


def _left(rows: Sequence[Mapping[str, Any]]) -> str:
    return _counted(", ".join(row["then"]) or "alike" for row in rows)


def _reversed_bits(number: int) -> str:
    """Orders numbers so that the first few are far apart: what is cut short has all pairs at some offsets."""
    return f"{number:016b}"[::-1]


def _counted(values: Iterable[object]) -> str:
    return ", ".join(f"{count} {value}" for value, count in Counter(values).most_common())


@contextmanager
def fleet(out: Path, moments: int) -> Iterator[Trials]:
    """The bed with the fleet on it."""
    with tempfile.TemporaryDirectory(prefix="disagg-operators-") as name, testbed.running(Path(name)) as bed:
        if not bed.real:
            raise SystemExit("this needs network namespaces: run it as root")
        with bed.entered():
            trials = Trials(bed, Path(name), out, moments)
            try:
                yield trials
            finally:
                bed.empty()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, help="append a JSON line for each trial")
    options.add_argument("--moments", type=int, default=8)
    options.add_argument("--only", choices=("pairs", "kills"))
    options.add_argument("--commands", default=",".join(COMMANDS))
    options.add_argument("--table", type=Path, help="print the tables of such a file, and run nothing")
    args = options.parse_args()
    if args.table is not None:
        _print(tables([json.loads(line) for line in args.table.read_text(encoding="utf-8").splitlines()]))
        return
    if args.out is None:
        options.error("--out or --table")
    names = args.commands.split(",")
    with fleet(args.out, args.moments) as trials:
        trials.measure(names)
        for moment in sorted(range(args.moments), key=_reversed_bits):
            for name in names if args.only != "pairs" else ():
                trials.killed(name, moment)
            for first in names if args.only != "kills" else ():
                for second in names:
                    trials.pair(first, second, moment)


if __name__ == "__main__":
    main()
