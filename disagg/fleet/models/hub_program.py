"""Downloads a model from the hub on a host, in its deployed environment; resumes an earlier download.

    REPOSITORY CACHE [config]   CACHE: the hub's cache, "" for its default. config: of all files only config.json

Then compares every file with the checksum that is its name in the hub's cache. Prints a JSON line {"blobs", "files"}
if the hub lists them, with the folder of the cache and [name there, bytes] of each file; then the hub's own progress,
at the end a JSON line {"folder", "checked"}; of config.json alone {"config"}. Exits with code 3 and {"error"} if it
fails.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import sys
from typing import Any, NoReturn

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
PIECE = 1 << 20
MAX_CONFIG = 8 << 20


def check(folder: str) -> tuple[list[str], int]:
    """Remove files whose content does not match the hub's checksum. Returns their names, and the number of checked
    files."""
    wrong: list[str] = []
    count = 0
    for name in sorted(os.listdir(folder)):
        path = os.path.realpath(os.path.join(folder, name))
        blob = os.path.basename(path)
        if len(blob) in (40, 64) and set(blob) <= set("0123456789abcdef"):
            count += 1
            if digest(path, len(blob)) != blob:
                wrong.append(name)
                os.unlink(path)
                os.unlink(os.path.join(folder, name))
    return wrong, count


def digest(path: str, width: int) -> str:
    """The checksum of a file: SHA-256 for large files, git's blob SHA-1 for small ones."""
    total = (
        hashlib.sha256() if width == 64 else hashlib.sha1(b"blob %d\0" % os.path.getsize(path), usedforsecurity=False)
    )
    with open(path, "rb") as file:
        while True:
            piece = file.read(PIECE)
            if not piece:
                return total.hexdigest()
            total.update(piece)


def main(repository: str, cache: str, only: str = "") -> None:
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError:
        fail("huggingface_hub is not installed in this environment")
    place = os.path.expanduser(cache) if cache else None
    if not only:
        announce(repository, place)
    try:  # the hub's errors are OSErrors; a bad id is a ValueError
        if only:
            config = read(hf_hub_download(repository, "config.json", cache_dir=place))
            sys.stdout.write("\n" + json.dumps({"config": config}) + "\n")
            return
        for _ in range(2):
            folder = snapshot_download(repository, allow_patterns=PATTERNS, ignore_patterns=["*/*"], cache_dir=place)
            wrong, count = check(folder)
            if not wrong:
                sys.stdout.write("\n" + json.dumps({"folder": folder, "checked": count}) + "\n")
                return
    except EntryNotFoundError:
        fail("it has no config.json: a model in another form, as of GGUF, is not read")
    except (OSError, ValueError, RuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        fail(lines[0] if lines else type(error).__name__)
    fail(f"{wrong[0]} does not match the hub's checksum after two downloads")


def read(path: str) -> dict[str, Any]:
    if os.path.getsize(path) > MAX_CONFIG:
        fail(f"config.json has {os.path.getsize(path)} bytes, more than that of any model")
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (ValueError, RecursionError) as error:
        fail(f"config.json is not JSON: {error}")
    return found if isinstance(found, dict) else fail("config.json is not a JSON object")


def announce(repository: str, place: str | None) -> None:
    """Print what will be downloaded. Hubs that do not list it are asked for the files all the same."""
    from huggingface_hub import HfApi, constants

    try:
        listed = HfApi().model_info(repository, files_metadata=True).siblings or []
    except (OSError, ValueError, RuntimeError):
        return
    wanted = [one for one in listed if any(fnmatch.fnmatch(one.rfilename, it) for it in PATTERNS)]
    files = [
        [one.lfs.sha256 if one.lfs else one.blob_id, one.size or 0]
        for one in wanted
        if "/" not in one.rfilename and (one.lfs or one.blob_id)
    ]
    blobs = os.path.join(place or constants.HF_HUB_CACHE, "models--" + repository.replace("/", "--"), "blobs")
    sys.stdout.write(json.dumps({"blobs": blobs, "files": files}) + "\n")
    sys.stdout.flush()


def fail(words: str) -> NoReturn:
    sys.stdout.write("\n" + json.dumps({"error": words}) + "\n")
    sys.exit(3)


main(*sys.argv[1:])
