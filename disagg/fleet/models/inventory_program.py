"""Lists or removes models on a host. Standard library only; prints one JSON object.

    look CACHE JSON     JSON: the sources, each a hub id or a path. CACHE: the hub's cache, "" for its default
    remove CACHE JSON   removes the files of the sources; prints the freed bytes

A model is "complete" if its configuration and tokenizer exist and every weight file has the length that its own header
states. Only the headers of weight files are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

INDEX = "model.safetensors.index.json"
MAX_JSON, MAX_CONFIG = 64 << 20, 8 << 20


def cache_folder(given: str) -> str:
    if given:
        return os.path.expanduser(given)
    if "HF_HUB_CACHE" in os.environ:
        return os.environ["HF_HUB_CACHE"]
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    return os.path.join(home, "hub")


def repository(cache: str, source: str) -> str:
    return os.path.join(cache, "models--" + source.replace("/", "--"))


def is_path(source: str) -> bool:
    return source.startswith(("/", "~"))


def look(cache: str, source: str) -> dict[str, Any]:
    if is_path(source):
        folder = os.path.expanduser(source)
        found: dict[str, Any] = {"source": source, "folder": folder, "revision": "", "root": folder}
        unfinished_bytes = 0
    else:
        root = repository(cache, source)
        revision = newest(root)
        folder = os.path.join(root, "snapshots", revision) if revision else ""
        found = {"source": source, "folder": folder, "revision": revision, "root": root}
        unfinished_bytes = unfinished(os.path.join(root, "blobs"), not folder)
    if not folder or not os.path.isdir(folder):
        state = "partial" if unfinished_bytes else "absent"
        return dict(found, state=state, bytes=unfinished_bytes, missing_files=[], why="")
    missing, why = faults(folder)
    found["bytes"] = unfinished_bytes + sum(size(os.path.join(folder, name)) for name in listed(folder))
    found["state"] = "complete" if not missing and not why else "partial" if found["bytes"] else "absent"
    return dict(found, missing_files=missing[:8], why=why, **identity(folder))


def newest(root: str) -> str:
    """The revision that `main` names, else the snapshot that was written last."""
    try:
        with open(os.path.join(root, "refs", "main"), encoding="ascii") as file:
            named = file.read().strip()
        if named and os.path.isdir(os.path.join(root, "snapshots", named)):
            return named
    except (OSError, ValueError):
        pass
    try:
        folder = os.path.join(root, "snapshots")
        return max(os.listdir(folder), key=lambda name: os.path.getmtime(os.path.join(folder, name)), default="")
    except OSError:
        return ""


def unfinished(folder: str, all_of_it: bool) -> int:
    try:
        names = [name for name in os.listdir(folder) if all_of_it or name.endswith(("incomplete", ".part"))]
        return sum(size(os.path.join(folder, name)) for name in names)
    except OSError:
        return 0


def listed(folder: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name)))
    except OSError:
        return []


def size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def faults(folder: str) -> tuple[list[str], str]:
    """Missing files, and the first fault of the existing ones."""
    names = listed(folder)
    missing = [name for name in ("config.json",) if name not in names]
    weights = [name for name in names if name.endswith(".safetensors")]
    if not missing and not read(os.path.join(folder, "config.json"), MAX_CONFIG):
        return missing, "config.json: not a JSON object, empty, or larger than that of any model"
    if INDEX in names:
        mapped = read(os.path.join(folder, INDEX)).get("weight_map") or {}
        missing += sorted(set(mapped.values()) - set(names))
    elif not weights:
        missing.append("*.safetensors")
    if not any(name in names for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        missing.append("tokenizer.json")
    for name in weights:
        stated, there = length(os.path.join(folder, name)), size(os.path.join(folder, name))
        if stated != there:
            return missing, f"{name}: {there} bytes, but its header states {stated or 'no length'}"
    return missing, ""


def length(path: str) -> int:
    """The length of a safetensors file by its own header; 0 if it has none."""
    try:
        with open(path, "rb") as file:
            count = int.from_bytes(file.read(8), "little")
            if not 2 <= count <= 100000000:
                return 0
            header = json.loads(file.read(count))
        header.pop("__metadata__", None)
        return 8 + count + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def identity(folder: str) -> dict[str, Any]:
    """What identifies a model: its configuration, and digests of tokenizer and chat template."""
    config = read(os.path.join(folder, "config.json"), MAX_CONFIG)
    tokenizer = read(os.path.join(folder, "tokenizer.json"))
    settings = read(os.path.join(folder, "tokenizer_config.json"))
    template = settings.get("chat_template")
    try:
        with open(os.path.join(folder, "chat_template.jinja"), encoding="utf-8") as file:
            template = file.read()
    except (OSError, ValueError):
        pass
    digests = {"tokenizer": digest(vocabulary(tokenizer)), "chat template": digest(template)}
    return {"config": config, "digests": digests}


def vocabulary(whole: dict[str, Any]) -> list[Any] | None:
    """The parts of tokenizer.json that decide how text becomes ids, in one form for all versions of the file."""
    model = whole.get("model")
    if not isinstance(model, dict):
        return None
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []]
    added = sorted((one["id"], one["content"]) for one in whole.get("added_tokens") or [])
    return [model.get("type"), model.get("vocab"), merges, whole.get("normalizer"), whole.get("pre_tokenizer"), added]


def digest(value: Any) -> str:
    if not value:
        return ""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def read(path: str, largest: int = MAX_JSON) -> dict[str, Any]:
    try:
        if os.path.getsize(path) > largest:
            return {}
        with open(path, encoding="utf-8") as file:
            body = json.load(file)
        return body if isinstance(body, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def remove(cache: str, source: str) -> int:
    found = look(cache, source)
    root = found["root"]
    if found["state"] == "absent" and not os.path.isdir(root):
        return 0
    if os.path.islink(root) or os.path.realpath(root) in ("/", os.path.realpath(os.path.expanduser("~"))):
        raise OSError(f"{root} is not a model folder")
    before = tree_size(root)
    shutil.rmtree(root)
    return before


def tree_size(root: str) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            total += 0 if os.path.islink(path) else size(path)
    return total


def main(verb: str, cache: str, text: str) -> None:
    sources = json.loads(text)
    cache = cache_folder(cache)
    action: Callable[[str, str], Any] = {"look": look, "remove": remove}[verb]
    try:
        body = {source: action(cache, source) for source in sources}
    except OSError as error:
        sys.exit(f"{error.filename or verb}: {error.strerror or error}")
    sys.stdout.write(json.dumps(body) + "\n")


main(*sys.argv[1:])
