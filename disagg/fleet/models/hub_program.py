"""Downloads a model from the hub on a host, in its deployed environment; goes on where an earlier run ended.

    REPOSITORY CACHE   CACHE: the hub's cache, "" for its default

Afterwards every file is compared with the checksum that the hub names it by. Prints the hub's own progress, at last a
JSON line {"folder", "checked"}. Exit code 3 with {"error"} where it fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import NoReturn

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
PIECE = 1 << 20


def check(folder: str) -> tuple[list[str], int]:
    """The names of files whose content is not what the hub says; those are removed."""
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
    """Large files are named by their SHA-256, small ones as git names them."""
    total = (
        hashlib.sha256() if width == 64 else hashlib.sha1(b"blob %d\0" % os.path.getsize(path), usedforsecurity=False)
    )
    with open(path, "rb") as file:
        while True:
            piece = file.read(PIECE)
            if not piece:
                return total.hexdigest()
            total.update(piece)


def main(repository: str, cache: str) -> None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        fail("there is no huggingface_hub in this environment")
    place = os.path.expanduser(cache) if cache else None
    try:  # the hub's errors are OSErrors; a bad id is a ValueError
        for _ in range(2):
            folder = snapshot_download(repository, allow_patterns=PATTERNS, ignore_patterns=["*/*"], cache_dir=place)
            wrong, count = check(folder)
            if not wrong:
                sys.stdout.write("\n" + json.dumps({"folder": folder, "checked": count}) + "\n")
                return
    except (OSError, ValueError, RuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        fail(lines[0] if lines else type(error).__name__)
    fail(f"{wrong[0]} does not have the checksum that the hub says, twice")


def fail(words: str) -> NoReturn:
    sys.stdout.write("\n" + json.dumps({"error": words}) + "\n")
    sys.exit(3)


main(*sys.argv[1:])
