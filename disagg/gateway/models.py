"""The models of the fleet as clients list them."""

from __future__ import annotations

from typing import Any

from disagg.config import Fleet, Model


def listed(fleet: Fleet, created: float) -> dict[str, Any]:
    """GET /v1/models. created: when the gateway started, in seconds since 1970; a model has no date of its own."""
    return {"object": "list", "data": [_described(model, created) for model in fleet.models.values()]}


def described(fleet: Fleet, name: str, created: float) -> dict[str, Any]:
    """GET /v1/models/NAME. Raises UnknownModel."""
    return _described(fleet.model(name), created)


def _described(model: Model, created: float) -> dict[str, Any]:
    """max_model_len: as in vLLM; agents read it."""
    return {
        "id": model.name,
        "object": "model",
        "created": int(created),
        "owned_by": "disagg",
        "aliases": model.aliases,
        "max_model_len": model.context,
    }
