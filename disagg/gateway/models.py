"""The models of the fleet as clients list them: what their files say, and on how many hosts they are loaded."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from disagg.api.gateway import LiveHost
from disagg.api.keeper import ModelFacts
from disagg.config import Fleet, Model
from disagg.gateway.clients.access import may_use, require_model
from disagg.gateway.clients.keys import Key
from disagg.gateway.dialects.ollama import timestamp
from disagg.gateway.watch.hosts import SeenModel
from disagg.inference.client import AsyncClient
from disagg.version import VERSION

_NEVER: Final = "9999-12-31T23:59:59Z"
OLLAMA_API: Final = "0.13.5"
"""The version of Ollama whose API is served. Codex refuses any below 0.13.4, VS Code's Copilot below 0.6.4."""
_NO_FACTS: Final = ModelFacts(tools=True, reasons=True)
"""Of a model of which no host states any: a client that believes less asks for less."""


def version() -> dict[str, str]:
    """Ollama's GET /api/version."""
    return {"version": OLLAMA_API, "disagg": VERSION}


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model of hosts.toml, and what its hosts state of it."""

    model: Model
    seen: SeenModel

    @property
    def facts(self) -> ModelFacts:
        return self.seen.facts or _NO_FACTS


class ModelLists:
    """The models that a key is for, in the forms of the APIs. client: has the fleet as it is now. hosts: as
    they are now. started: when the gateway started, in seconds since 1970; a model has no date of its own. The methods
    with a name raise UnknownModel and ModelNotAllowed."""

    def __init__(self, client: AsyncClient, hosts: Callable[[], Sequence[LiveHost]], started: float) -> None:
        self._client, self._hosts, self._started = client, hosts, started

    @property
    def _fleet(self) -> Fleet:
        return self._client.fleet

    def of_openai(self, key: Key | None) -> dict[str, Any]:
        """GET /v1/models."""
        return {"object": "list", "data": [self._described(one) for one in self.visible(key)]}

    def one_of_openai(self, key: Key | None, name: str) -> dict[str, Any]:
        """GET /v1/models/NAME."""
        return self._described(self.one(key, name))

    def of_anthropic(self, key: Key | None) -> dict[str, Any]:
        """GET /v1/models as Anthropic's clients read it."""
        models = [self._of_anthropic(one.model) for one in self.visible(key)]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else _NO_ENDS
        return {"data": models, "has_more": False, **ends}

    def one_of_anthropic(self, key: Key | None, name: str) -> dict[str, Any]:
        """GET /v1/models/NAME as Anthropic's clients read it."""
        return self._of_anthropic(require_model(self._fleet, key, name))

    def tags(self, key: Key | None) -> dict[str, Any]:
        """Ollama's GET /api/tags: each model that a host has under its name and under each alias."""
        found = (one for one in self.visible(key) if one.seen.state != "absent")
        dated = {"modified_at": timestamp(self._started)}
        return {"models": [{**tag, **dated} for one in found for tag in _tagged(one)]}

    def running(self, key: Key | None) -> dict[str, Any]:
        """Ollama's GET /api/ps: those that are loaded, and until when. A host with one model never unloads it."""
        return {"models": [_running(one) for one in self.visible(key) if one.seen.loaded]}

    def shown(self, key: Key | None, name: str) -> dict[str, Any]:
        """Ollama's POST /api/show."""
        one = self.one(key, name)
        facts = one.facts
        architecture = facts.architecture or "disagg"
        info = {
            "general.architecture": architecture,
            "general.basename": one.model.name,
            "general.parameter_count": facts.parameters or None,
            f"{architecture}.context_length": facts.context or one.model.context,
            "disagg.context_length": one.model.context,
        }
        return {
            "modelfile": "",
            "parameters": f"num_ctx {one.model.context}",
            "template": "",
            "details": _details(one),
            "model_info": {name: value for name, value in info.items() if value is not None},
            "capabilities": _capabilities(facts),
            "modified_at": timestamp(self._started),
            "size": one.seen.size_bytes,
        }

    def of_lm_studio(self, key: Key | None) -> dict[str, Any]:
        """LM Studio's GET /api/v1/models."""
        return {"models": [_of_lm_studio(one) for one in self.visible(key) if one.seen.state != "absent"]}

    def visible(self, key: Key | None) -> list[ListedModel]:
        """Those that the key is for."""
        hosts = self._hosts()
        models = (model for model in self._fleet.models.values() if may_use(key, model))
        return [ListedModel(model, SeenModel.of(hosts, model.name)) for model in models]

    def one(self, key: Key | None, name: str) -> ListedModel:
        """That of this name or alias."""
        model = require_model(self._fleet, key, name)
        return ListedModel(model, SeenModel.of(self._hosts(), model.name))

    def _described(self, one: ListedModel) -> dict[str, Any]:
        """max_model_len: as in vLLM; agents read it."""
        return {
            "id": one.model.name,
            "object": "model",
            "created": int(self._started),
            "owned_by": "disagg",
            "aliases": one.model.aliases,
            "max_model_len": one.model.context,
            "state": one.seen.state,
        }

    def _of_anthropic(self, model: Model) -> dict[str, Any]:
        return {
            "type": "model",
            "id": model.name,
            "display_name": model.name,
            "created_at": timestamp(self._started),
            "max_input_tokens": model.context,
            "max_tokens": model.context,
        }


_NO_ENDS: Final = {"first_id": None, "last_id": None}


def _tagged(one: ListedModel) -> Iterator[dict[str, Any]]:
    """The entries of one model, that of its name first. Clients take names of the same digest for aliases of one
    model."""
    model, details = one.model, _details(one)
    digest = hashlib.sha256(msgspec.json.encode([model.name, sorted(model.sources.items())])).hexdigest()
    for name in (model.name, *model.aliases):
        yield {"name": name, "model": name, "size": one.seen.size_bytes, "digest": digest, "details": details}


def _running(one: ListedModel) -> dict[str, Any]:
    seen = one.seen
    gone = _NEVER if seen.expires_s is None else timestamp(time.time() + seen.expires_s)
    more = {"size": seen.memory_bytes, "size_vram": seen.memory_bytes, "expires_at": gone}
    return {**next(_tagged(one)), **more, "context_length": one.model.context}


def _capabilities(facts: ModelFacts) -> list[str]:
    """As Ollama names them."""
    return ["completion", *(["tools"] if facts.tools else []), *(["thinking"] if facts.reasons else [])]


def _details(one: ListedModel) -> dict[str, Any]:
    facts = one.facts
    return {
        "parent_model": "",
        "format": "safetensors" if facts.form else "",
        "family": facts.architecture,
        "families": [facts.architecture] if facts.architecture else [],
        "parameter_size": parameters(facts.parameters),
        "quantization_level": facts.form,
    }


def _of_lm_studio(one: ListedModel) -> dict[str, Any]:
    facts = one.facts
    bits = round(8 * facts.size_bytes / facts.parameters, 2) if facts.parameters else None
    config = {"context_length": one.model.context}
    return {
        "type": "llm",
        "publisher": "disagg",
        "key": one.model.name,
        "display_name": one.model.name,
        "architecture": facts.architecture or None,
        "quantization": {"name": facts.form or None, "bits_per_weight": bits},
        "size_bytes": one.seen.size_bytes,
        "params_string": parameters(facts.parameters) or None,
        "loaded_instances": [{"id": one.model.name, "config": config}] if one.seen.loaded else [],
        "max_context_length": one.model.context,
        "format": None,
        "capabilities": {"vision": False, "trained_for_tool_use": facts.tools},
        "description": None,
    }


def parameters(count: int) -> str:
    """494M, 30.5B; empty if their number is not known."""
    if not count:
        return ""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            value = count / size
            return f"{value:.1f}{unit}" if value < 100 and unit == "B" else f"{value:.0f}{unit}"
    return str(count)
