"""Which names, addresses, paths and model sources are valid.

Host and fleet names become file, service and table names; addresses become arguments of ssh and parts of URLs.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from disagg.errors import ConfigError

NAME_RULE = 'letters, digits, ".", "_" and "-", beginning with a letter or digit, at most 64'
USER_RULE = 'letters, digits, ".", "_" and "-", beginning with a letter, digit or "_", at most 64'
PACKAGE = "package:"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")


def is_name(text: str) -> bool:
    """Whether this may name a host or fleet, by NAME_RULE."""
    return _NAME.fullmatch(text) is not None


def is_user(text: str) -> bool:
    """Whether this may be an account on a host, by USER_RULE."""
    return _USER.fullmatch(text) is not None


def is_label(text: str) -> bool:
    """Whether this may name a model: printable, not blank at either end, at most 200 characters."""
    return 0 < len(text) <= 200 and text.isprintable() and text == text.strip()


def is_hub_id(text: str) -> bool:
    """Whether this has the form of a model hub id, `owner/name` or `name`."""
    return _HUB_ID.fullmatch(text) is not None


def is_path(source: str) -> bool:
    """Whether a model source is a path and not a hub id."""
    return source.startswith((".", "/", "~", PACKAGE))


def is_loopback(address: str) -> bool:
    """Whether this is an address of the machine that reads it."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def address_fault(address: str) -> str | None:
    """Why this is not the address of a host (hostname, IPv4 or IPv6 address); None if it is."""
    if any(sign in address for sign in "/@[]%"):
        return 'give the bare hostname or IP address, without URL, user, brackets or "%" zone'
    if address.count(":") == 1:
        return "the port is a key of its own, as in port = 8000"
    if ":" in address or re.fullmatch(r"[0-9.]+", address):
        try:
            unspecified = ipaddress.ip_address(address).is_unspecified
        except ValueError:
            return "this is not a valid IP address"
        return (
            "this address means every interface: give the one that other machines connect to" if unspecified else None
        )
    labels = address.removesuffix(".").split(".")
    if len(address) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        return 'a hostname holds letters, digits, "-" and ".", and no part of it begins or ends with "-"'
    return None


def origin_fault(origin: str) -> str | None:
    """Why this is not the origin of web pages, as browsers write it, or "*"; None if it is."""
    if origin == "*":
        return None
    form = 'scheme, host and, if it is not the usual one, port, in small letters, as in "https://chat.example.org"'
    scheme, _, rest = origin.partition("://")
    host, port = rest, ""
    if not rest.endswith("]") and ":" in rest:
        host, _, port = rest.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) or not bare or origin != origin.lower():
        return form
    if address_fault(bare) or (rest != host and not re.fullmatch(r"[0-9]{1,5}", port)):
        return form
    return "browsers leave out this port" if (scheme, port) in (("https", "443"), ("http", "80")) else None


def url_fault(url: str, password: str, otherwise: str = "") -> tuple[str, str] | None:
    """What is wrong with a URL, and the hint; None if nothing is. URLs appear in logs and in arguments of programs, so
    that a password in one is refused; `password`: where it belongs."""
    hint = f"it begins with https:// or http://{otherwise}"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "this is not a URL", hint
    if not (url.isprintable() and url.isascii()) or " " in url or parts.scheme not in ("http", "https"):
        return "this is not a URL", hint
    if not parts.hostname:
        return "this URL has no host name", 'as in "https://mirror.example/simple"'
    if "@" in parts.netloc:
        return "a password does not belong in this file", password
    return None


def same_machine(address: str) -> str:
    """An address in one canonical spelling, to compare."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address.lower().removesuffix(".")


def resolve(source: str, folder: Path) -> str:
    """A model source as the engines take it: hub ids unchanged, paths absolute.

    Relative paths start at `folder`, `package:` paths at the installed disagg package. Raises RuntimeError for
    `~name` if there is no such user.
    """
    if not is_path(source):
        return source
    package = Path(__file__).parents[1]
    path = package / source.removeprefix(PACKAGE) if source.startswith(PACKAGE) else Path(source).expanduser()
    return os.path.normpath(folder.absolute() / path)


def home() -> Path:
    """The home folder of this program's user. ConfigError if there is none, as in some containers."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError("this user has no home folder", "set HOME to a folder that this user may write") from error


def expanded(path: str) -> Path:
    """A path that may begin with `~` or `~user`. ConfigError if that user has no home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: this user has no home folder here", "write the path out") from error
