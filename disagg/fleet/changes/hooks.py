"""Hooks: commands of this machine that run before and after a change of the fleet, as [hooks] in hosts.toml names them.

before_deploy, before_restart    if one fails, the change does not begin
after_deploy, after_restart      once it has ended, however it ended
on_failure                       after these, if it failed or was interrupted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Literal

from disagg.config import Fleet, HookName
from disagg.errors import Cancelled, CommandFailed, DisaggError, FleetError
from disagg.fleet.changes.audit import Caller, append_here, audit_file
from disagg.fleet.changes.locks import FleetLocks
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import last_lines, script
from disagg.token import state_folder

ChangeKind = Literal["deploy", "restart"]
ChangeResult = Literal["planned", "done", "failed", "interrupted"]
_BEFORE: Final[Mapping[ChangeKind, HookName]] = {"deploy": "before_deploy", "restart": "before_restart"}
_AFTER: Final[Mapping[ChangeKind, HookName]] = {"deploy": "after_deploy", "restart": "after_restart"}
_FAILURE: Final[HookName] = "on_failure"


@dataclass(slots=True)
class Change:
    """What is changed, and how it ended. hosts: that it changes. releases: that they are to have, by host, if known.
    failed: hosts on which it failed. error: why."""

    kind: ChangeKind
    hosts: Sequence[str]
    releases: Mapping[str, str] = field(default_factory=dict)
    result: ChangeResult = "planned"
    failed: Sequence[str] = ()
    error: str = ""

    def end(self, errors: Mapping[str, DisaggError], ok: bool = True) -> None:
        """It has ended, with these errors by host. ok: False if it failed though no host has an error."""
        self.result = "failed" if errors or not ok else "done"
        self.failed = [name for name in self.hosts if name in errors]
        self.error = next((error.message for error in errors.values()), "")

    def break_off(self, error: BaseException) -> None:
        """An exception has ended it."""
        self.result = "interrupted" if isinstance(error, (KeyboardInterrupt, Cancelled)) else "failed"
        self.error = error.message if isinstance(error, DisaggError) else self.error


def variables(fleet: Fleet, command: str, hook: HookName, change: Change) -> dict[str, str]:
    """The environment variables of a hook. command: of disagg, such as "rollout"."""
    return {
        "DISAGG_HOOK": hook,
        "DISAGG_COMMAND": command,
        "DISAGG_FLEET": fleet.name,
        "DISAGG_CONFIG": str(fleet.path),
        "DISAGG_HOSTS": " ".join(change.hosts),
        "DISAGG_RELEASES": " ".join(f"{host}={release}" for host, release in change.releases.items()),
        "DISAGG_RESULT": change.result,
        "DISAGG_FAILED": " ".join(change.failed),
        "DISAGG_ERROR": change.error,
    }


@dataclass(slots=True)
class HookRunner:
    """Runs the hooks of one command. report: called with (hook, line) for what they print."""

    fleet: Fleet
    command: str
    report: Callable[[str, str], None] = lambda hook, line: None
    _audited: list[str] = field(default_factory=list)

    def planned(self, *kinds: ChangeKind) -> dict[str, str]:
        """The hooks that these changes run, in their order; on_failure last."""
        names: list[HookName] = [name for kind in kinds for name in (_BEFORE[kind], _AFTER[kind])]
        commands = self.fleet.hooks.commands
        return {name: commands[name] for name in (*names, _FAILURE) if name in commands}

    @contextmanager
    def around(
        self,
        kind: ChangeKind,
        hosts: Sequence[str],
        releases: Mapping[str, str] | None = None,
        locks: FleetLocks | None = None,
    ) -> Iterator[Change]:
        """Run hooks before and after the block, which calls `Change.end`. CommandFailed if the one before fails. locks:
        of the hosts; what has run is written to their audits."""
        change = Change(kind, hosts, releases or {})
        try:
            if (refusal := self._run(_BEFORE[kind], change)) is not None:
                raise refusal
            try:
                yield change
            except BaseException as error:  # also Ctrl-C: the change has begun
                change.break_off(error)
                self._after(change)
                raise
            self._after(change)
        finally:
            self._audit(change, locks)

    def _after(self, change: Change) -> None:
        """Their failures are reported only: the change is over."""
        names: list[HookName] = [_AFTER[change.kind]]
        if change.result != "done":
            names.append(_FAILURE)
        for name in names:
            if (error := self._run(name, change)) is not None:
                self.report(name, error.message)

    def _run(self, name: HookName, change: Change) -> CommandFailed | None:
        """Run a hook, if there is one; why it failed."""
        line, hooks = self.fleet.hooks.commands.get(name), self.fleet.hooks
        if line is None:
            return None
        caller = Caller.this_process(f"hook {name}")
        self.report(name, f"$ {line}")
        environment = variables(self.fleet, self.command, name, change)
        audited: BaseException | None = None
        try:
            failure = run_line(
                self.fleet,
                name,
                line,
                environment,
                timeout_s=hooks.timeout_s,
                on_line=lambda text: self.report(name, text),
            )
            audited = _failed(failure.ended, name) if failure else None
        except BaseException as error:  # also Ctrl-C: the hook has run
            audited = error
            raise
        finally:
            self._audited.append(caller.ended(audited))
        return _failed(failure.message, name) if failure else None

    def _audit(self, change: Change, locks: FleetLocks | None) -> None:
        """Write to the audit of each host of a change which hooks ran."""
        lines, self._audited = self._audited, []
        if not lines:
            return
        hosts = [self.fleet.hosts[name] for name in change.hosts]
        for host in hosts:
            if host.server_kind.spawned:
                append_here(audit_file(state_folder(self.fleet), host.name), *lines)
        if locks is not None:
            locks.note([host for host in hosts if host.server_kind.deployed], lines)


@dataclass(frozen=True, slots=True)
class LineFailure:
    """Why a line for sh failed. ended: without what it printed, which may be a secret. message: with its last lines."""

    ended: str
    message: str


def run_line(
    fleet: Fleet,
    name: str,
    line: str,
    environment: Mapping[str, str],
    *,
    timeout_s: float,
    on_line: Callable[[str], None] = lambda text: None,
) -> LineFailure | None:
    """Run a line for sh in the folder of hosts.toml; None if it succeeds. name: of the hook. environment: variables
    beside those of this process."""
    machine = LocalMachine(name)
    own = {**environment, "DISAGG_FOLDER": str(fleet.path.parent)}
    try:
        result = machine.run([line], script=script("hook.sh"), environment=own, timeout=timeout_s, on_line=on_line)
    except FleetError as error:
        return LineFailure("no exit code", error.message.removeprefix(f"{name}: "))
    if result.ok:
        return None
    ended, words = f"exit code {result.code}", last_lines(result.stderr.strip() or result.stdout, 3)
    return LineFailure(ended, f"{ended}: {words}" if words else ended)


def around(
    hooks: HookRunner | None,
    kind: ChangeKind,
    hosts: Sequence[str],
    releases: Mapping[str, str],
    locks: FleetLocks | None,
) -> AbstractContextManager[Change]:
    """`HookRunner.around`; without hooks nothing runs."""
    return nullcontext(Change(kind, hosts)) if hooks is None else hooks.around(kind, hosts, releases, locks)


def _failed(why: str, name: HookName) -> CommandFailed:
    hint = f"what it runs before has not begun; {name} in [hooks] of hosts.toml names the command"
    return CommandFailed(f"the hook {name} failed: {why}", hint if name.startswith("before") else "", exit_status=1)
