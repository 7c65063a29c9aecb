"""The hosts.toml that `disagg init` writes."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from disagg.config.addresses import USER_RULE, address_fault, is_loopback, is_user
from disagg.config.document import parse
from disagg.config.hosts_file import build
from disagg.errors import UsageError, clipped
from disagg.files import replace_file

_SPLIT: Final = re.compile(r"(?=^# A (?:prefill|decode) host )", re.MULTILINE)
_TO_FILL_IN: Final = "Fill in your machines' addresses, then run `disagg status`."
_FILLED_IN: Final = "Choose your model and engines, then run `disagg doctor`."


def starter(prefill: Sequence[str] = (), decode: Sequence[str] = ()) -> str:
    """A commented hosts.toml of hosts at these addresses, each ADDRESS or USER@ADDRESS; without any, one example of
    each role. UsageError for what is not an address."""
    template = Path(__file__).with_name("starter.toml").read_text(encoding="utf-8")
    if not prefill and not decode:
        return template
    for role, addresses in (("prefill", prefill), ("decode", decode)):
        if twice := [one for one, count in Counter(addresses).items() if count > 1]:
            raise UsageError(f"--{role} {clipped(twice[0])}: given twice", "a machine has one server of each role")
    head, prefill_table, decode_table = _SPLIT.split(template)
    tables = [
        _host_table(table if number == 1 else _without_comments(table), role, number, given)
        for role, table, addresses in (("prefill", prefill_table, prefill), ("decode", decode_table, decode))
        for number, given in enumerate(addresses, 1)
    ]
    return "\n".join(
        [head.strip().replace(_TO_FILL_IN, _FILLED_IN) + "\n", *(f"{table.strip()}\n" for table in tables)]
    )


def _host_table(table: str, role: str, number: int, given: str) -> str:
    """The table of a role's first host, for another host."""
    user, _, address = given.rpartition("@")
    if hint := address_fault(address):
        raise UsageError(f"--{role} {clipped(given)}: not an address", hint)
    if user and not is_user(user):
        raise UsageError(f"--{role} {clipped(given)}: not a user", f"a user has {USER_RULE}")
    table = table.replace(f"[hosts.{role}-1", f"[hosts.{role}-{number}")
    table = re.sub(r'^address = "[^"]*"', f'address = "{address}"', table, flags=re.MULTILINE)
    if user:
        table = re.sub(r"^(address = .*)", rf'\1\nuser = "{user}"', table, flags=re.MULTILINE)
    if is_loopback(address):
        table = re.sub(r'^connector = "ssh"', 'connector = "local"', table, flags=re.MULTILINE)
        table = re.sub(r'^service = "\w+"', 'service = "process"', table, flags=re.MULTILINE)
    return table


def _without_comments(table: str) -> str:
    lines = [re.sub(r"\s+#.*", "", line) for line in table.splitlines() if not line.startswith("#")]
    return "\n".join(lines)


def write(text: str, path: Path, force: bool = False) -> None:
    """Write a hosts.toml after checking that it loads. Raises UsageError if the file exists, unless `force`."""
    build(parse(text, str(path)), path)
    refuse_to_overwrite(path, force)
    try:
        replace_file(path, text.encode(), mode=0o666)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}", "give another file with --config") from error


def refuse_to_overwrite(path: Path, force: bool) -> None:
    """Raises UsageError for a folder, and for a file that exists, unless `force`."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder", f"name the file in it: --config {path / 'hosts.toml'}")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path}: exists already", "--force overwrites it; --config names another file")
