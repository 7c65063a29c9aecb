"""Who may use the gateway, and which models."""

from __future__ import annotations

import logging
import math
import shlex
from dataclasses import replace

from starlette.requests import Request

from disagg.config import Fleet, Model
from disagg.config.addresses import is_loopback
from disagg.config.document import on_one_line
from disagg.errors import ConfigError, DisaggError, ModelNotAllowed, Unauthorized, UnknownModel, UsageError
from disagg.gateway.clients.keys import Key, KeyRing
from disagg.gateway.clients.origins import Origins
from disagg.http.arrival import host_name
from disagg.http.protocol import connection_of
from disagg.http.requests import bearer

log = logging.getLogger("disagg.gateway")

_ADD_ONE = "add a key with `disagg keys add NAME`"


class Access:
    """Decides by key. Until the first key is added, programs of this machine need none.

    public: whether other machines can reach the gateway; they always need a key. origins: of the pages that may ask.
    """

    def __init__(self, ring: KeyRing, *, public: bool, origins: Origins = Origins()) -> None:  # noqa: B008 - never changes
        self.origins = origins
        self._ring = ring
        self._public = public
        self._logged: str | None = None  # why the keys cannot be read

    def key(self, request: Request) -> Key | None:
        """The key of the request, None if none is needed. Raises Unauthorized."""
        secret = _secret(request)
        try:
            if not self._public and self._ring.empty:
                _require_local(request, self.origins)
                _prove(request)
                return None
            key = self._ring.find(secret)
        except ConfigError as error:
            if str(error) != self._logged:  # once, not for every request
                self._logged = str(error)
                log.error("%s", error)
            raise DisaggError("the gateway cannot read its keys", "its log says why") from error
        self._logged = None
        if key is None:
            raise _refusal(secret)
        _prove(request)
        return key

    @property
    def keyless(self) -> bool:
        """Whether programs of this machine need no key now."""
        try:
            return not self._public and self._ring.empty
        except ConfigError:
            return False

    def still(self, request: Request, key: Key | None) -> bool:
        """Whether this request, which had this key, would be accepted with it now."""
        try:
            return self.key(request) == key
        except DisaggError:
            return False


def chosen_model(fleet: Fleet, key: Key | None, name: str) -> tuple[str, str | None]:
    """The name under which the fleet has the model that a request names, and a warning if that is not what it names:
    the fleet's default model answers for names that no model has, if the key is for it. Raises UnknownModel and
    ModelNotAllowed."""
    try:
        require_model(fleet, key, name)
        return _untagged(fleet, name), None
    except UnknownModel:
        default = fleet.default_model
        if default is None or not may_use(key, fleet.models[default]):
            raise
    return default, f'model: no model is named "{on_one_line(name)}", and {default} answers, by default_model'


def require_model(fleet: Fleet, key: Key | None, name: str) -> Model:
    """The model of this name or alias. Raises UnknownModel, which names the models that the key is for, and
    ModelNotAllowed if it is for another one."""
    try:
        model = fleet.model(_untagged(fleet, name))
    except UnknownModel:
        replace(fleet, models={one.name: one for one in fleet.models.values() if may_use(key, one)}).model(name)
        raise
    if not may_use(key, model):
        raise ModelNotAllowed(f"this key is not for the model {model.name}", "see /v1/models for those that it is for")
    return model


def _untagged(fleet: Fleet, name: str) -> str:
    """The name without the tag that Ollama's clients give to a name without one."""
    known = {word for model in fleet.models.values() for word in (model.name, *model.aliases)}
    return name if name in known else name.removesuffix(":latest")


def may_use(key: Key | None, model: Model) -> bool:
    """Whether the key is for this model. Without keys, all are."""
    return key is None or key.models is None or model.name in key.models


def require_admin(key: Key | None, deed: str) -> None:
    """Raises ModelNotAllowed unless the key may change which models there are. Without keys, all callers may. deed:
    what is asked for, such as "pull models"."""
    if key is not None and not key.admin:
        raise ModelNotAllowed(f"the key {key.name} may not {deed}", f"disagg keys edit {shlex.quote(key.name)} --admin")


def require_load(key: Key | None, model: Model, deed: str) -> None:
    """Raises ModelNotAllowed unless the key may load and unload models. deed: such as "load"."""
    if not may_load(key):
        assert key is not None, "without keys, all callers may"
        hint = f"ask for one that is loaded (`state` in /v1/models), or disagg keys edit {shlex.quote(key.name)} --load"
        raise ModelNotAllowed(f"the key {key.name} may not {deed} {model.name}", hint)


def may_load(key: Key | None) -> bool:
    """Whether the key may load and unload models, and say how long they stay."""
    return key is None or key.load or key.admin


def kept_alive(key: Key | None, seconds: float | None) -> tuple[float | None, str | None]:
    """How long a model stays loaded after an answer, of what the request asks for, and a warning if that is less.
    None: as its hosts are configured."""
    if seconds is None or key is None:
        return seconds, None
    if not may_load(key):
        return None, f"keep_alive: left out, since the key {key.name} may not load models"
    if key.keep_alive_s is not None and seconds > key.keep_alive_s:
        asked = "for ever" if math.isinf(seconds) else f"{seconds:g} s"
        return key.keep_alive_s, f"keep_alive: {asked} was lowered to the {key.keep_alive_s:g} s of the key {key.name}"
    return seconds, None


def require_keys_if_public(address: str, ring: KeyRing) -> None:
    """Raises UsageError if other machines can reach the address and there is no key that they could use."""
    if not is_loopback(address) and not ring.usable:
        raise UsageError(f"--host {address}: other machines can reach it, and there is no key", _ADD_ONE)


def _prove(request: Request) -> None:
    """The connection of this request is worth more than those whose callers have shown no key."""
    if (connection := connection_of(request.scope)) is not None:
        connection.proven = True


def _secret(request: Request) -> str:
    """The key of a request, as OpenAI's clients send it, or as Anthropic's do."""
    return bearer(request) or request.headers.get("x-api-key", "")


def _refusal(secret: str) -> Unauthorized:
    """Keys are shown once: who has lost one needs another."""
    if not secret:
        return Unauthorized("no API key was sent", f"send it as a Bearer token; {_ADD_ONE} if you have none")
    return Unauthorized("the API key is wrong or revoked", f"keys are shown only once: {_ADD_ONE}")


def _require_local(request: Request, origins: Origins) -> None:
    """Raises Unauthorized if a web page asks whose origin is not listed. A browser lets every page send requests to
    this machine, under a name of the page's own that leads here, or with its Origin."""
    # a page of elsewhere sends no Origin for what it only embeds
    embedded = "origin" not in request.headers and request.headers.get("sec-fetch-site") == "cross-site"
    foreign = any(_is_foreign(one) and not origins.names(one) for one in request.headers.getlist("origin"))
    if embedded or foreign or not is_loopback(host_name(request.headers.get("host", "")) or ""):
        raise Unauthorized("without keys, the gateway is for programs of this machine only", _ADD_ONE)


def _is_foreign(origin: str) -> bool:
    """Whether this is the Origin of a page of another machine, or of one that hides where it is from. Programs that are
    made of pages have schemes of their own."""
    scheme, _, rest = origin.partition(":")
    if scheme.lower() not in ("http", "https"):
        return origin == "null"
    return not is_loopback(host_name(rest.removeprefix("//")) or "")
