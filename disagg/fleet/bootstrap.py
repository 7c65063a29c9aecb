"""What a machine needs before it is deployed to: per system, how to see that it is there, and how to get it.

The steps of macOS and of NVIDIA's driver follow the vendors' documentation and have not been run on such machines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from disagg.config import Deploy, Host
from disagg.errors import FleetError
from disagg.fleet.facts.probe import ProbeOutput, number, run_probe
from disagg.fleet.machine.machine import Machine
from disagg.fleet.machine.ssh.settings import ssh_line
from disagg.nvidia import OLDEST_DRIVER
from disagg.version import OLDEST_PYTHON

_STEP_S: Final = 1800.0
_PLAIN: Final = re.compile(r"[\w./ -]+")
"""A line that means the same without a shell."""
_TIMEOUT_S: Final = 60.0


StepState = Literal["in place", "missing", "by hand", "done", "failed"]
"""missing: a command can change that. by hand: only a person can."""


@dataclass(frozen=True, slots=True)
class SetUpStep:
    """check: a line for sh, exit code 0 if it is in place. command: a line for sh that puts it there, "" if only a
    person can. root, root_check: the command, or the check, needs root; other lines are run by the account of the host.
    by_hand: what a person does."""

    name: str
    why: str
    check: str
    command: str = ""
    root: bool = False
    by_hand: str = ""
    root_check: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """found: what the check printed. error: why it could not be put in place."""

    step: SetUpStep
    state: StepState
    found: str = ""
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        step = self.step
        return {
            "name": step.name,
            "state": self.state,
            "found": self.found,
            "why": step.why,
            "command": step.command,
            "root": step.root,
            "by_hand": step.by_hand,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Prepares one host's machine. report: called with (step, line) as a step prints it."""

    host: Host
    deploy: Deploy
    machine: Machine
    report: Callable[[str, str], None] = lambda step, line: None

    def look(self) -> list[StepResult]:
        """What is in place and what is not. Changes nothing."""
        system = run_checks(self.machine, {})
        wanted = steps(self.host, self.deploy, system.os, system.user)
        return judged(wanted, self._checked(wanted, system), self.host)

    def carry_out(self, results: Sequence[StepResult]) -> list[StepResult]:
        """Carry out the steps that are missing. What only a person can do is looked at again once another step is done,
        such as the account, without which no check could be run. The others keep their result, as do all after one
        whose check cannot be run: the machine does not answer."""
        system = run_checks(self.machine, {})
        done = list(results)
        for at, one in enumerate(results):
            changed = any(earlier.state == "done" for earlier in done[:at])
            if one.state == "in place" or (one.state == "by hand" and not changed):
                continue
            try:
                done[at] = self._put_in_place(one, system)
            except FleetError as error:
                done[at] = replace(one, state="failed", error=error.message)
                break
        return done

    def _put_in_place(self, missing: StepResult, system: CheckedMachine) -> StepResult:
        step = missing.step
        if (before := self._checked([step], system).results[step.name]).ok:  # an earlier step has brought it
            return replace(missing, state="in place", found=before.found)
        if missing.state == "by hand":
            return replace(missing, found=before.found)
        try:
            why = self._run(step, system)
        except FleetError as error:
            why = error.message
        after = self._checked([step], system).results[step.name]
        if after.ok and not why:
            return replace(missing, state="done", found=after.found)
        why = why or "its command succeeded, and it is still missing"
        return replace(missing, state="failed", found=after.found, error=why)

    def _run(self, step: SetUpStep, system: CheckedMachine) -> str:
        """Why it failed, "" if it did not."""
        line = as_account(step.command, self._account(system), system, step.root)
        self.report(step.name, f"$ {line}")
        result = self.machine.run(
            ["/bin/sh", "-c", line], timeout=_STEP_S, on_line=lambda text: self.report(step.name, text)
        )
        return "" if result.ok else result.reason(3)

    def _checked(self, wanted: Iterable[SetUpStep], system: CheckedMachine) -> CheckedMachine:
        """The machine with the results of these checks."""
        account = self._account(system)
        return run_checks(self.machine, {step.name: check_line(step, account, system) for step in wanted})

    def _account(self, system: CheckedMachine) -> str:
        return self.host.user or system.user


@dataclass(frozen=True, slots=True)
class CheckResult:
    """found: the first line that the check printed."""

    ok: bool
    found: str = ""


@dataclass(frozen=True, slots=True)
class CheckedMachine:
    """os: Linux or Darwin. user, uid: of the account that is logged in. sudo: without a password."""

    os: str
    user: str
    uid: int = 1000
    sudo: bool = False
    results: Mapping[str, CheckResult] = field(default_factory=dict)

    @property
    def root(self) -> bool:
        """Whether the account is root, or may become it."""
        return self.sudo or self.uid == 0


def run_checks(machine: Machine, checks: Mapping[str, str]) -> CheckedMachine:
    """The results of these checks by name. Raises HostUnreachable, or FleetError if they cannot be run."""
    argv = [word for pair in checks.items() for word in pair]
    return parse(run_probe(machine, "checks.sh", argv, timeout=_TIMEOUT_S))


def parse(probe: ProbeOutput) -> CheckedMachine:
    """The results in what the probe printed."""
    os, user, uid, sudo = probe.first("system", 4)
    results = {name: CheckResult(code == "0", found) for name, code, found in probe.all("check", 3)}
    return CheckedMachine(os, user, number(uid) or 0, sudo == "1", results)


_PYTHON: Final = SetUpStep(
    "python",
    "environments are built with it",
    "for python in python3.14 python3.13 python3.12 python3.11 python3; do "
    f'"$python" -I -c "import sys, venv, ensurepip; assert sys.version_info >= {OLDEST_PYTHON}; print(sys.executable)" '
    "2>/dev/null && exit 0; done; exit 1",
    "apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y python3 python3-venv",
    root=True,
)


_UV: Final = SetUpStep(
    "uv",
    "builds environments in seconds, and brings a Python if there is none",
    'command -v uv && exit; for uv in "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do '  # where a deployment looks
    'test -x "$uv" && echo "$uv" && exit 0; done; exit 1',
    'script=$(curl -LsSf https://astral.sh/uv/install.sh) && printf %s "$script" | env UV_NO_MODIFY_PATH=1 sh',
)


_LINUX_CLOCK: Final = SetUpStep(
    "clock",
    "times of hosts are compared: their clocks must agree within a second",
    'test "$(timedatectl show -p NTP --value)" = yes && echo "set by NTP"',
    "timedatectl set-ntp true",
    root=True,
)


_MAC_CLOCK: Final = SetUpStep(
    "clock",
    _LINUX_CLOCK.why,
    "systemsetup -getusingnetworktime | grep ': On'",
    "systemsetup -setusingnetworktime on",
    root=True,
    root_check=True,
)


_MAC_SLEEP: Final = SetUpStep(
    "sleep",
    "a Mac that sleeps serves nothing, and one that lost its power stays off",
    'pmset -g custom | awk \'$1 == "sleep" && $2 != 0 { print "sleeps after " $2 " min"; sleeps = 1 } '
    '$1 == "autorestart" && $2 == 0 { print "stays off after a power failure"; sleeps = 1 } END { exit sleeps }\'',
    "pmset -a sleep 0 disksleep 0 autorestart 1",
    root=True,
)


_DRIVER: Final = SetUpStep(
    "driver",
    f"CUDA 13 needs driver {OLDEST_DRIVER}",
    "version=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1) && "
    f'echo "driver $version" && test "${{version%%.*}}" -ge {OLDEST_DRIVER}',
    by_hand=f"sudo apt install nvidia-driver-{OLDEST_DRIVER}-open; then restart the machine",
)


def steps(host: Host, deploy: Deploy, os: str, login: str) -> tuple[SetUpStep, ...]:
    """What this host needs, in order. os: Linux or Darwin. login: the account that is logged in, which may be another
    than the host's own."""
    return tuple(_steps(host, deploy, os, login))


def _steps(host: Host, deploy: Deploy, os: str, login: str) -> Iterator[SetUpStep]:
    account, linux = host.user or login, os != "Darwin"
    if account != login:
        yield _account(host, account, login, linux)
    if deploy.installer != "pip":
        yield _UV
    if host.python is not None:
        path = _path(host.python)
        hint = "install it, or leave out python in hosts.toml"
        yield SetUpStep("python", "hosts.toml names it", f"test -x {path} && echo {path}", by_hand=hint)
    elif linux or deploy.installer == "pip":
        yield _PYTHON if linux else _by_hand(_PYTHON, "brew install python@3.12")
    yield _LINUX_CLOCK if linux else _MAC_CLOCK
    if linux and host.service == "systemd":
        yield _linger(account)
    if not linux:
        yield _MAC_SLEEP
    if linux and host.engine.device.startswith("cuda"):
        yield _DRIVER


def _path(text: str) -> str:
    """A path as a word for sh; one below ~/ is below the account's home."""
    return f'"$HOME"/{shlex.quote(text[2:])}' if text.startswith("~/") else shlex.quote(text)


def _by_hand(step: SetUpStep, how: str) -> SetUpStep:
    return replace(step, command="", by_hand=how)


def _linger(account: str) -> SetUpStep:
    return SetUpStep(
        "linger",
        "services start at boot, before anyone logs in",
        f"test -e /var/lib/systemd/linger/{account} && echo {account} lingers",
        f"loginctl enable-linger {account}",
        root=True,
    )


def _account(host: Host, account: str, login: str, linux: bool) -> SetUpStep:
    """The account that serves. It is there if someone can log in: it has a key. Its password is none, but not locked:
    without PAM, sshd refuses an account that is. Names of accounts have no characters that a shell interprets:
    `config.addresses.is_user`."""
    there = f"id -u {account} >/dev/null"
    check, why = f'{there} && test -s "$HOME/.ssh/authorized_keys" && echo {account}', "hosts.toml names it"
    if not linux:
        hint = f"System Settings > Users & Groups: add {account}; then: ssh-copy-id {account}@{host.address}"
        return SetUpStep("account", why, check, by_hand=hint)
    home = f"$(getent passwd {account} | cut -d: -f6)/.ssh"
    keys = f"$(getent passwd {login} | cut -d: -f6)/.ssh/authorized_keys"
    owner = f'-o {account} -g "$(id -gn {account})"'
    command = (
        f'if ! test -s "{keys}"; then echo "no keys to copy: {keys}" >&2; false; fi && '
        f"{{ {there} 2>&1 || useradd --create-home --shell /bin/bash --password '*' {account}; }} && "
        f'install -d -m 700 {owner} "{home}" && '
        f'{{ test -s "{home}/authorized_keys" || install -m 600 {owner} "{keys}" "{home}/authorized_keys"; }}'
    )
    return SetUpStep("account", why, check, command, root=True)


def as_account(line: str, account: str, there: CheckedMachine, root: bool = False, ask: str = "-n ") -> str:
    """A line for sh that runs this one as root, or as this account. ask: "" lets sudo ask for a password."""
    program = line if _PLAIN.fullmatch(line) else f"/bin/sh -c {shlex.quote(line)}"
    if root and there.uid != 0:
        return f"sudo {ask}{program}"
    if root or account == there.user:
        return line
    if there.uid == 0 and there.os == "Linux":  # which may have no sudo
        return f"su -s /bin/sh -c {shlex.quote(line)} {account}"
    return f"sudo {ask}-H -u {account} {program}"


def check_line(step: SetUpStep, account: str, there: CheckedMachine) -> str:
    """The line for sh that checks a step for this account."""
    return as_account(step.check, account, there, step.root_check)


def judged(wanted: tuple[SetUpStep, ...], there: CheckedMachine, host: Host) -> list[StepResult]:
    """What is in place, what is missing, and what only a person can put there."""
    return [_judged(step, there.results.get(step.name, CheckResult(False)), there, host) for step in wanted]


def _judged(step: SetUpStep, result: CheckResult, there: CheckedMachine, host: Host) -> StepResult:
    if result.ok:
        return StepResult(step, "in place", result.found)
    if not step.command:
        return StepResult(step, "by hand", result.found)
    account = host.user or there.user
    line = as_account(step.command, account, there, step.root, ask="")
    if there.root or not line.startswith("sudo "):
        return StepResult(step, "missing", result.found)
    own = account == there.user
    where = f"disagg ssh {host.name} --" if own else ssh_line(replace(host, user=there.user))
    typed = replace(step, command="", by_hand=f"sudo asks for a password there: {where} {shlex.quote(line)}")
    return StepResult(typed, "by hand", result.found)
