"""The rules of [models."..."] tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from disagg.api.engines import ENGINES
from disagg.config.addresses import is_hub_id, is_label, is_path, resolve
from disagg.config.document import nearest, on_one_line, toml_key
from disagg.config.schema import Model
from disagg.config.table import Table
from disagg.config.tables.engine import read_overrides
from disagg.planning.shapes import SHAPES
from disagg.planning.sizing import SHAPE

MAX_CONTEXT: Final = 1 << 24
_SOURCES: Final = 'sources = {transformers = "owner/model", mlx = "owner/model"}'
_ENGINE: Final = "engine = {mlx = {max_batch = 4}}"
_LABEL_RULE = "printable characters, no blank at either end, at most 200"


def read_models(tables: Table, folder: Path) -> dict[str, Model]:
    """The models by name, in file order. Relative paths start at `folder`."""
    models = {name: _model(name, table, folder) for name, table in tables.tables('[models."qwen3-coder:30b"]')}
    if not models:
        hint = 'add one, as [models."qwen3-coder:30b"]; `disagg init` writes a whole file'
        raise tables.document.fault_at_value(tables.path, "no model is defined", hint)
    taken = {name: f"the name of [models.{toml_key(name)}]" for name in models}
    for name, table in tables.tables(""):
        for index, alias in enumerate(models[name].aliases):
            if alias in taken:
                raise table.fault_at_element(
                    "aliases", index, f'alias "{alias}" is already {taken[alias]}', "choose another alias"
                )
            taken[alias] = f"an alias of [models.{toml_key(name)}]"
    return models


def _model(name: str, table: Table, folder: Path) -> Model:
    _model_name(table, name)
    table.only(("aliases", "context", "sources", "engine"))
    context = table.integer("context", 1, MAX_CONTEXT, "context = 32768")
    aliases = table.strings("aliases", 'aliases = ["qwen"]') if "aliases" in table else ()
    for index, alias in enumerate(aliases):
        if not is_label(alias):
            raise table.fault_at_element("aliases", index, "this alias is not usable", _LABEL_RULE)
    sources = _sources(table, folder) if "sources" in table else {}
    written = {engine: table.data["sources"][engine] for engine in sources}
    return Model(name, sources, context, aliases, written, _overrides(table) if "engine" in table else {})


def _overrides(table: Table) -> dict[str, dict[str, Any]]:
    """The options of the model's engines, by engine."""
    engines = table.table("engine", _ENGINE)
    engines.only(tuple(ENGINES))
    return {engine: read_overrides(options, engine) for engine, options in engines.tables(_ENGINE)}


def require_sources(tables: Table, models: Mapping[str, Model], unmanaged: Collection[str]) -> None:
    """Raise for a model without sources, unless it is one of `unmanaged`, which whole-request hosts serve."""
    for name, table in tables.tables(""):
        if name not in unmanaged and not models[name].sources:
            table.require("sources", f"add {_SOURCES}")


def _sources(table: Table, folder: Path) -> dict[str, str]:
    sources = table.table("sources", _SOURCES)
    sources.only(tuple(ENGINES))
    by_engine: dict[str, str] = {engine: _source(sources, engine, folder) for engine in ENGINES if engine in sources}
    if not by_engine:
        raise table.document.fault_at_value(
            sources.path, f"{sources.title} is empty", 'as in transformers = "owner/model" or mlx = "./models/mine"'
        )
    return by_engine


def _model_name(table: Table, name: str) -> None:
    if not is_label(name):
        raise table.document.fault_at_key(table.path, "this model name is not usable", _LABEL_RULE)


def _source(sources: Table, engine: str, folder: Path) -> str:
    source = sources.value(engine, str, f'{engine} = "owner/model"')
    if ENGINES[engine].simulated:
        return _shape(sources, engine, source, folder)
    if not source.isprintable() or not (is_path(source) or is_hub_id(source)):
        raise sources.fault_at_value(
            engine,
            "this is neither a hub id nor a path",
            'a hub id reads "owner/model"; a path begins with ".", "/", "~" or "package:"',
        )
    return resolved(sources, engine, source, folder)


def _shape(sources: Table, engine: str, source: str, folder: Path) -> str:
    """The source of a simulated engine, which runs no model: the model's size."""
    name = source.removeprefix(SHAPE)
    if name != source and name not in SHAPES:
        hint = nearest(name, SHAPES) or f"there are {', '.join(SHAPES)}"
        raise sources.fault_at_value(engine, f'no model shape "{on_one_line(name)}" is known', hint)
    if name == source and not (source.isprintable() and is_path(source)):
        raise sources.fault_at_value(
            engine, "this is neither a shape nor a path", f'as in "{SHAPE}{next(iter(SHAPES))}" or "./config.json"'
        )
    return source if name != source else resolved(sources, engine, source, folder)


def resolved(table: Table, key: str, source: str, folder: Path) -> str:
    """A source as the engines take it. Raises ConfigError if `~user` has no home folder."""
    try:
        return resolve(source, folder)
    except RuntimeError as error:
        raise table.fault_at_value(key, "this user has no home folder here", "write the path out") from error
