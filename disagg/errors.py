"""Every error of disagg, as one tree, with the exit code of the command line and the HTTP status of the servers.

    DisaggError                      exit 1, HTTP 500
    ├── ConfigError                  exit 2            hosts.toml is wrong: file, line, column, caret
    ├── UsageError                   exit 2            the command line cannot be carried out
    ├── RequestError                 exit 2, HTTP 400  the request is wrong
    │   ├── UnknownModel             exit 2, HTTP 404
    │   ├── ContextLengthExceeded    exit 2
    │   ├── KVMemoryExceeded         exit 2
    │   ├── SchemaTooComplex         exit 2            compiling the form of the answer would take too much
    │   ├── RequestEndedHosts        exit 2            servers that computed it have ended: no other one is tried
    │   ├── BodyTooLarge             exit 2, HTTP 413
    │   ├── ModelNotAllowed          exit 2, HTTP 403  the caller's key is not for this model
    │   └── Unauthorized             exit 2, HTTP 401
    ├── Overloaded                   exit 3, HTTP 503  the queue is full; sent with Retry-After
    ├── Cancelled                    exit 130, HTTP 499
    ├── DeadlineExceeded             exit 1, HTTP 504
    ├── ModelError                   exit 3            a model cannot be loaded or served
    │   └── PreflightRefused         exit 3            transformers and mlx-lm disagree about it
    ├── ModelBusy                    exit 3, HTTP 409  requests use the model that is to be unloaded
    ├── CapabilityMissing            exit 3            the host lacks what the request needs
    ├── HandoffError                 exit 1, HTTP 502  a KV transfer failed
    │   ├── TicketRefused            exit 1            unknown, used or expired
    │   ├── LayoutMismatch           exit 1            names the field
    │   ├── FingerprintMismatch      exit 1            names the component
    │   ├── ProtocolError            exit 1            malformed, oversized, out of order, truncated
    │   ├── IntegrityError           exit 1            the digest does not match
    │   ├── SenderTooSlow            exit 1            it sends, and its KV would come sooner from elsewhere
    │   ├── KVRefuted                exit 1            the KV is not that of this prompt and model
    │   └── PeerLost                 exit 1            connect, send or receive failed or timed out
    ├── ServerUnavailable            exit 4, HTTP 502  no server answers
    │   ├── ServerNotRunning         exit 4            nothing listens on its port
    │   ├── ServerSilent             exit 4            it accepts connections and sends no answer, or is stuck
    │   ├── InvalidAnswer            exit 4            what it sends does not fit the request, or contradicts itself
    │   └── ServerRefused            exit 4            a whole-request host: key, URL, certificate or model is wrong
    │       ├── ServerUnproven       exit 4            it does not prove that it has the fleet's token
    │       └── RequestLoop          exit 4, HTTP 508  a whole-request host leads back to a gateway that asks it
    └── FleetError                   exit 1            a command on a host failed
        ├── PortInUse                exit 1            another process listens on a server's port
        ├── StartFailed              exit 1            a server exited while starting
        ├── CommandFailed            exit 1            a program on a host returned an error
        ├── HostLocked               exit 1            another disagg command changes this host
        ├── LockLost                 exit 1            another disagg command has taken this host's lock
        ├── DeployRefused            exit 1            a host lacks what a deployment needs
        └── HostUnreachable          exit 4            SSH: no connection, or it broke
            ├── HostKeyRefused       exit 4            SSH: the host key is unknown or changed
            └── LoginRefused         exit 4            SSH: no key of this user is accepted

`message`: what failed and where. `hint`: how to fix it. `code` is the stable name of an error in JSON; `to_json` and
`from_json` carry an error across HTTP unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

MAX_ERROR_CHARS = 2000
"""The longest message, and the longest hint, of an error that another process states. The rest is dropped."""
MAX_RETRY_AFTER_S = 3600
_MAX_CLIPPED_CHARS = 64
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Partial:
    """What had arrived of an answer when its request failed: the text, and the ids of its tokens."""

    text: str
    token_ids: tuple[int, ...]


class DisaggError(Exception):
    """The root. `message`: what failed and where, one line. `hint`: how to fix it, may be empty. `partial`: what had
    arrived of the answer, None if nothing had."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    may_repeat: ClassVar[bool] = True
    """False if the request must not be sent again: it would cost as much and end in the same way."""
    partial: Partial | None = None

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @classmethod
    def code(cls) -> str:
        """The stable name of this kind of error in JSON: its class name."""
        return cls.__name__

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def to_json(self) -> dict[str, Any]:
        """`{"code", "message", "hint"}`, the body of every error answer."""
        return {"code": self.code(), "message": self.message, "hint": self.hint}

    @staticmethod
    def from_json(body: dict[str, Any]) -> DisaggError:
        """The error that `to_json` described; an unknown code becomes a plain DisaggError. Texts are cut to
        MAX_ERROR_CHARS."""
        kinds = {kind.code(): kind for kind in _family(DisaggError)}
        kind = kinds.get(str(body.get("code")), DisaggError)
        error = kind.__new__(kind)
        message, hint = str(body.get("message", "unknown error")), str(body.get("hint", ""))
        DisaggError.__init__(error, message[:MAX_ERROR_CHARS], hint[:MAX_ERROR_CHARS])
        after = body.get("retry_after_s")
        if isinstance(error, Overloaded) and isinstance(after, int):
            error.retry_after_s = min(max(after, 1), MAX_RETRY_AFTER_S)
        return error


def _family(kind: type[DisaggError]) -> list[type[DisaggError]]:
    return [kind, *(grandchild for child in kind.__subclasses__() for grandchild in _family(child))]


class ConfigError(DisaggError):
    """hosts.toml cannot be read. `message` already holds file, line, column and the caret lines."""

    exit_code = 2


class UsageError(DisaggError):
    """A command line that cannot be carried out."""

    exit_code = 2


class RequestError(DisaggError):
    """The caller's request is wrong: nothing was started."""

    exit_code = 2
    http_status = 400


class UnknownModel(RequestError):
    """No host serves the named model."""

    http_status = 404


class ContextLengthExceeded(RequestError):
    """prompt tokens + max_tokens do not fit the model's context."""


class KVMemoryExceeded(RequestError):
    """The KV of prompt and answer is larger than all KV memory of the decode host: it never fits there."""


class SchemaTooComplex(RequestError):
    """The form that the answer must have takes more time or memory than one request may have, or ends what compiles
    it. The message has no text of the schema."""

    may_repeat = False


class RequestEndedHosts(RequestError):
    """The processes of hosts ended while they computed this request. It is tried on no other host, and refused for a
    while."""

    may_repeat = False

    def __init__(self, message: str, hint: str = "change it; `disagg logs` of the hosts shows how they ended") -> None:
        super().__init__(message, hint)


class BodyTooLarge(RequestError):
    """The HTTP body is over the server's bound."""

    http_status = 413


class ModelNotAllowed(RequestError):
    """The caller's key of the gateway is not for this model."""

    http_status = 403


class Unauthorized(RequestError):
    """The fleet token is missing or wrong."""

    http_status = 401


class Overloaded(DisaggError):
    """The server's queue is full. `retry_after_s` goes out as the Retry-After header."""

    exit_code = 3
    http_status = 503
    retry_after_s: int = 1


class Cancelled(DisaggError):
    """The caller disconnected, or interrupted the request."""

    exit_code = 130
    http_status = 499


class DeadlineExceeded(DisaggError):
    """The request's deadline passed."""

    http_status = 504


class ModelError(DisaggError):
    """A model cannot be loaded or served: missing, corrupt, unsupported."""

    exit_code = 3


class PreflightRefused(ModelError):
    """transformers and mlx-lm disagree about the model, and disagg cannot patch the difference."""


class ModelBusy(DisaggError):
    """Requests use a model that is to be unloaded, or its files that are to be removed. Nothing was done."""

    exit_code = 3
    http_status = 409


class CapabilityMissing(DisaggError):
    """The host lacks a package or an ability that this request needs. It serves others, and another host may serve this
    one."""

    exit_code = 3


class HandoffError(DisaggError):
    """A KV transfer failed."""

    http_status = 502


class TicketRefused(HandoffError):
    """The transfer's ticket is unknown, already used or expired."""


class LayoutMismatch(HandoffError):
    """The two hosts lay out the KV cache differently; the message names the field."""


class FingerprintMismatch(HandoffError):
    """The two hosts hold different models or tokenizers; the message names the component."""


class ProtocolError(HandoffError):
    """The peer broke the wire protocol: malformed, oversized, out of order or truncated."""


class IntegrityError(HandoffError):
    """The bytes arrived, but their digest is not the sender's."""


class SenderTooSlow(HandoffError):
    """A prefill host sends next to nothing, while its KV could come sooner in another way. It is the sender that is to
    blame: a link that is merely slow is waited for."""


class KVRefuted(HandoffError):
    """The KV arrived whole, and is not what this model computes from the prompt. The message states by how much it
    differs. of_received: the KV that was received is wrong for certain; else held KV before it may be. audited_tokens:
    that ran to find it out. Neither crosses HTTP."""

    of_received: bool = False
    audited_tokens: int = 0


class PeerLost(HandoffError):
    """The KV peer could not be reached, stopped sending, or closed the connection."""


class ServerUnavailable(DisaggError):
    """No server answers for this step of the request."""

    exit_code = 4
    http_status = 502


class ServerNotRunning(ServerUnavailable):
    """Nothing listens on the server's port: its machine refuses the connection."""


class ServerSilent(ServerUnavailable):
    """A server accepts connections and sent nothing in time, or its engine makes no progress. It is not tried again:
    that would take as long again."""


class InvalidAnswer(ServerUnavailable):
    """What a host sends does not fit the request, or contradicts itself: a token that the model does not have, more
    tokens than asked for, counts that do not add up. Another host may answer."""


class ServerRefused(ServerUnavailable):
    """A server does not serve this client, until hosts.toml, key or token is corrected. A whole-request host refuses
    the key, lacks the model, has no trusted certificate, or is another kind of server."""


class ServerUnproven(ServerRefused):
    """What answers on a server's port does not prove that it has the fleet's token: it is sent nothing. Its token is
    another one, or it is another program."""


class RequestLoop(ServerRefused):
    """A request came back to a gateway that had sent it on, or has passed through too many gateways."""

    http_status = 508


class FleetError(DisaggError):
    """A command on a host of the fleet failed."""


class PortInUse(FleetError):
    """Another process listens on a server's port."""


class StartFailed(FleetError):
    """A server was started and exited, or cannot serve. `log`: the last lines of its log."""

    log: tuple[str, ...] = ()

    def __init__(self, message: str, hint: str = "", *, log: Sequence[str] = ()) -> None:
        super().__init__(message, hint)
        self.log = tuple(log)


class CommandFailed(FleetError):
    """A program ran on a host and failed. `exit_status` and `stdout`: of the program; None and "" if they are not
    known, as in an error that arrived as JSON."""

    exit_status: int | None = None
    stdout: str = ""

    def __init__(self, message: str, hint: str = "", *, exit_status: int | None = None, stdout: str = "") -> None:
        super().__init__(message, hint)
        self.exit_status = exit_status
        self.stdout = stdout


class HostLocked(FleetError):
    """Another command changes this host. Nothing was changed."""


class LockLost(FleetError):
    """Another command has taken the host's lock. What this one had changed until then stays."""


class DeployRefused(FleetError):
    """A host lacks what a deployment needs. Nothing was changed on it."""


class HostUnreachable(FleetError):
    """No SSH connection to the host, or it broke: refused, timed out, no route, lost."""

    exit_code = 4


class HostKeyRefused(HostUnreachable):
    """The host's SSH key is unknown, changed or revoked."""


class LoginRefused(HostUnreachable):
    """The host's sshd accepts none of this user's keys."""


def exit_code_of_all(codes: Iterable[int]) -> int:
    """The exit code of a command on several hosts, from theirs: 4 if one cannot be reached, else 1 if one failed, else
    0."""
    failed = set(codes) - {0}
    return HostUnreachable.exit_code if HostUnreachable.exit_code in failed else int(bool(failed))


def first_line(error: BaseException) -> str:
    """The first line of the text of another library's exception; its repr if it has none."""
    return next(iter(str(error).strip().splitlines()), repr(error))


def printable(text: str) -> str:
    """Text of elsewhere without control characters, which could drive the terminal; newlines and tabs stay."""
    return _CONTROL.sub("\ufffd", text)


def clipped(value: object) -> str:
    """Text from a peer for a message, printable and at most 64 characters. An unauthenticated peer must not fill the
    log."""
    text = printable(str(value))
    return text if len(text) <= _MAX_CLIPPED_CHARS else text[: _MAX_CLIPPED_CHARS - 1] + "…"
