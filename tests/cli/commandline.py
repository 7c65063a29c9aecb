"""hosts.toml files for tests of commands, and running a command line in this process."""

from pathlib import Path

import pytest

import disagg
from disagg.cli.app import main
from tests.ports import free_ports

ROOT = str(Path(disagg.__file__).parents[1])
"""For PYTHONPATH of subprocesses: they run this very package."""

HOST = """
[hosts.{name}]
address = "127.0.0.1"
roles = ["{role}"]
model = "{model}"
port = {port}
connector = "{connector}"
service = "process"
{kv}
[hosts.{name}.engine]
name = "{engine}"
dtype = "float32"
device = "cpu"
"""
MODEL = """
[models.{name}]
aliases = ["{name}-alias"]
context = 2048
[models.{name}.sources]
transformers = "./weights"
mlx = "./weights"
"""


def write_fleet(folder: Path, models: tuple[str, ...] = ("tiny",), connector: str = "local") -> Path:
    """A fleet with a prefill and a decode host per model."""
    ports = iter(free_ports(3 * len(models)))
    parts = ['[fleet]\nname = "test"\n', *(MODEL.format(name=model) for model in models)]
    for number, model in enumerate(models, 1):
        prefill = {"name": f"prefill-{number}", "role": "prefill", "engine": "transformers", "kv": ""}
        decode = {"name": f"decode-{number}", "role": "decode", "engine": "mlx", "kv": f"kv_port = {next(ports)}"}
        parts += [HOST.format(**h, model=model, port=next(ports), connector=connector) for h in (prefill, decode)]
    path = folder / "hosts.toml"
    path.write_text("".join(parts))
    return path


def write_simulated_fleet(folder: Path) -> Path:
    """That fleet with simulated engines, behind SSH."""
    path = write_fleet(folder, connector="ssh")
    text = path.read_text().replace('service = "process"', 'service = "process"\nhardware = "dgx-spark"')
    for engine in ("transformers", "mlx"):
        text = text.replace(f'name = "{engine}"\ndtype = "float32"\ndevice = "cpu"', 'name = "simulated"')
        text = text.replace(f'{engine} = "./weights"\n', 'simulated = "shape:qwen3-8b"\n' if engine == "mlx" else "")
    path.write_text(text)
    return path


def run(*arguments: object) -> int:
    """Run `disagg ARGUMENTS` here; its exit code."""
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    code = exit_info.value.code
    return int(code or 0)
