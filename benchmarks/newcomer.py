"""From four bare hosts to an answer: every command of a first use, with its time.

    python -m benchmarks.newcomer

The hosts are namespaces of this machine with an sshd, an account and a home each, and nothing but a Python and uv; that
needs root. Two prefill hosts and two decode hosts of the demo's qwen3 model, on CPUs; their environments come from the
index that pip uses here. Prints a Markdown table: times are those of whole `disagg` commands, lines those of their
output.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from uv import find_uv_bin

from tests.integration.deployed import ROOT, Operator
from tests.testbed import bed as testbed
from tests.testbed.bed import Bed
from tests.testbed.index import package_index

MODEL = "qwen3-coder:30b"
PATIENCE_S = 3600.0
FLEET = """\
[fleet]
name = "studio"
{deploy}
[models."{model}"]
context = 2048
[models."{model}".sources]
transformers = "package:demo/models/qwen3-moe-tiny"
mlx = "package:demo/models/qwen3-moe-tiny"
"""
DEPLOY = """
[deploy]
index_url = "{index}"
find_links = ["{index}/torch/"] # which may be torch for CPUs: another file than the lock's
"""
HOST = """
[hosts.{name}]
address = "169.254.150.{octet}"
roles = ["{role}"]
model = "{model}"
port = {port}
connector = "ssh"
service = "{service}"
python = "{python}"
{kv_port}
[hosts.{name}.engine]
name = "{engine}"
dtype = "float32"
device = "cpu"
threads = 1
{limits}"""
COMMANDS: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = (
    (("trust", "--yes"), (0,)),
    (("doctor",), (0, 1)),  # 1: nothing is deployed
    (("deploy", "--dry-run"), (0,)),
    (("deploy", "--yes"), (0,)),
    (("start",), (0,)),
    (("status",), (0,)),
    (("verify", MODEL), (0,)),
    (("generate", MODEL, "def fibonacci(n):", "--max-tokens", "32"), (0,)),
    (("generate", MODEL, "def fibonacci(n):", "--max-tokens", "32"), (0,)),
    (("deploy", "--yes"), (0,)),
    (("uninstall", "--yes", "--models"), (0,)),
)
"""What is called, with the exit codes that are expected. The second answer finds everything warm."""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="disagg-newcomer-") as name:
        folder = Path(name)
        source = folder / "bed.toml"
        source.write_text(hosts_toml("systemd", ""))  # machines that look like Linux
        with testbed.running(folder, source) as bed:
            if not bed.real:
                raise SystemExit("this needs network namespaces: run it as root")
            for host in bed.hosts.values():
                give_uv(host.home)
            (bed.home / ".ssh/known_hosts").write_text("")
            config = folder / "hosts.toml"
            with package_index(bed) as index, bed.entered():
                config.write_text(hosts_toml("process", DEPLOY.format(index=index.url)))
                walk(bed, Operator(bed, config, folder))
                sys.stdout.write(f"\n{index.sent / 1e6:.0f} MB of packages went to the hosts; {os.cpu_count()} cores\n")


def walk(bed: Bed, fleet: Operator) -> None:
    sys.stdout.write("| command | s | lines of output |\n| --- | --- | --- |\n")
    for arguments, codes in COMMANDS:
        began = time.monotonic()
        done = subprocess.run(
            fleet.argv(*arguments),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE_S,
            env=fleet.environment,
            cwd=ROOT,
            check=False,
        )
        seconds = time.monotonic() - began
        words = " ".join(f'"{word}"' if " " in word else word for word in arguments)
        sys.stdout.write(f"| `disagg {words}` | {seconds:.1f} | {len(done.stdout.splitlines())} |\n")
        sys.stdout.flush()
        sys.stderr.write(f"$ disagg {words}\n{done.stdout}{done.stderr}\n")
        if done.returncode not in codes:
            raise SystemExit(f"disagg {words}: exit code {done.returncode}")


def hosts_toml(service: str, deploy: str) -> str:
    python = Path(sys.base_prefix).resolve() / "bin" / "python{}.{}".format(*sys.version_info)
    prefill = {"role": "prefill", "port": 8000, "kv_port": "", "engine": "transformers", "limits": ""}
    decode = {"role": "decode", "port": 8001, "kv_port": "kv_port = 9001\n", "engine": "mlx"}
    decode["limits"] = "max_batch = 4\nmax_kv_bytes = 268_435_456\n"
    hosts = {"spark-1": prefill, "spark-2": prefill, "studio-1": decode, "studio-2": decode}
    parts = [FLEET.format(model=MODEL, deploy=deploy)]
    for octet, (name, options) in enumerate(hosts.items(), 11):
        parts.append(HOST.format(name=name, octet=octet, model=MODEL, service=service, python=python, **options))
    return "".join(parts)


def give_uv(home: Path) -> None:
    """The one program that a bare host needs besides Python, for a build of seconds instead of minutes."""
    (home / ".local/bin").mkdir(parents=True)
    shutil.copy(find_uv_bin(), home / ".local/bin/uv")


if __name__ == "__main__":
    main()
