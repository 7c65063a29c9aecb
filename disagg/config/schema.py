"""hosts.toml as frozen values. `load` makes and checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal, get_args

from disagg.api import engines
from disagg.api.engines import Engine
from disagg.api.names import Role, SplitWord
from disagg.config.document import nearest, on_one_line, one_of
from disagg.config.settings import GatewaySettings, KeeperSettings
from disagg.errors import UnknownModel, UsageError

ServiceManager = Literal["systemd", "launchd", "process"]
DType = Literal["float32", "float16", "bfloat16"]
Installer = Literal["auto", "uv", "pip"]
KVAudit = Literal["auto", "always", "off"] | int
Split = SplitWord | int
KVWire = Literal["as-is", "auto", "int8"]
"""What hosts.toml asks for. The form of one transfer is a WireForm."""
HookName = Literal["before_deploy", "after_deploy", "before_restart", "after_restart", "on_failure"]
MIN_TOLERANCE: Final = 0.1
MAX_TOLERANCE: Final = 100
"""The bounds of EngineOptions.kv_audit_tolerance."""
Connector = Literal["ssh", "local"]


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the fleet serves.

    sources: hub id or absolute path by engine; for a simulated engine ``shape:NAME`` or the path of a config.json.
    written: the same as in the file, where "~" and "." refer to whichever machine reads them. context: tokens of the
    longest request, prompt and answer together. engine: by the name of an engine, the options that all its hosts run
    this model with, whatever they run others with.
    """

    name: str
    sources: Mapping[str, str]
    context: int
    aliases: tuple[str, ...] = ()
    written: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def run_by(self, engine: EngineOptions, roles: tuple[Role, ...]) -> EngineOptions:
        """How a host with this engine and these roles runs the model."""
        known = engine.kind.options_for(roles)
        return replace(engine, **{key: it for key, it in self.engine.get(engine.name, {}).items() if key in known})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The [hosts.*.engine] table: how a host runs its model. name: of its engine; `kind` is the Engine of this name,
    with all that is the same on every host. `load` refuses options that this engine does not have."""

    name: str
    dtype: DType = "bfloat16"
    device: str = "auto"  # auto | cpu; transformers: cuda | cuda:N | mps; vllm: cuda; mlx: gpu
    attention: str | None = None  # transformers: attn_implementation
    quantization: str | None = None  # transformers: int8 | int4, or mxfp4: the checkpoint's own, kept
    chunk_tokens: int = 2048  # tokens per prefill chunk; vllm: per step, of all its prompts
    threads: int | None = None  # CPU compute threads
    layers: str | None = None  # prefill: "0:24": only the model's first 24 layers are loaded
    kv_wire: KVWire = (
        "as-is"  # prefill: the form KV is sent in; int8 is not exact, auto takes it if the link is too slow
    )
    max_held_bytes: int = 2 << 30  # prefill: KV of finished prompts, for prompts that begin alike; 0: none is held
    kv_cache_memory_bytes: int = 8 << 30  # vllm: its paged KV cache, taken when it starts; finished prompts stay in it
    enforce_eager: bool = False  # vllm: no CUDA graphs, no compilation
    tensor_parallel: int = 1  # vllm: ranks that share the heads, on as many GPUs
    pipeline_parallel: int = 1  # vllm: stages that share the layers, each with as many ranks
    nnodes: int = 1  # vllm: machines that share the ranks, each a host of its own
    node_rank: int = 0  # vllm: of this host; 0 is the head, which is asked for all of them
    head_address: str | None = None  # vllm: address:port of the head, at which the ranks find each other
    max_batch: int = 16  # decode: requests in the running batch
    max_kv_bytes: int = 8 << 30  # decode: KV bytes, received and in use
    split: Split = "auto"  # decode: layers of a prompt that a prefill host computes, while this one computes the others
    kv_audit: KVAudit = "auto"  # mlx: which hand-offs are audited; a number: one in so many
    kv_audit_tolerance: float = 1.0  # mlx: what received KV may differ by, over the bounds for its dtypes
    url: str | None = None  # openai, vllm-server: without / at its end
    model: str | None = None  # openai, vllm-server: the model's name there
    key_file: str | None = None  # openai, vllm-server: absolute, or below ~ of the machine that asks
    key_variable: str | None = None  # openai, vllm-server: of the environment; one of the two, or none

    @property
    def kind(self) -> Engine:
        """What is known of the engine."""
        return engines.engine(self.name)

    @property
    def first_layers(self) -> int | None:
        """The model's first so many layers are loaded; None: all."""
        return int(self.layers.partition(":")[2]) if self.layers else None

    @property
    def ranks(self) -> int:
        """Ranks of all stages, on all machines."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks_here(self) -> int:
        """Ranks on this machine."""
        return self.ranks // self.nnodes

    @property
    def prompts_kv_bytes(self) -> int:
        """KV of the prompts that a prefill host computes or sends at a time. With vLLM as much as the paged caches of
        all ranks have room for, since it would preempt prompts beyond; a loaded engine states less if ranks hold
        copies."""
        paged = "kv_cache_memory_bytes" in self.kind.options
        return self.kv_cache_memory_bytes * self.ranks if paged else self.max_kv_bytes


@dataclass(frozen=True, slots=True)
class Host:
    """One server of the fleet and the machine it runs on.

    model: empty for a gateway, and for a host with several models. address, port: HTTP; of a whole-request host those
    of its engine's URL. kv_port: KV transfers, decode hosts only. settings: of a gateway. user, ssh_port, key (a
    private key file): None leaves them to ssh_config. hardware: the machine's name in `planning.devices`, for
    predictions and the engine "simulated".
    models: of a host with several, whose server, the keeper, starts a process for each that is asked for; keeping: what
    it goes by. keeper: of the value that stands for one of these models, the name of the host; its ports are 0 until
    the keeper has stated them.
    """

    name: str
    address: str
    roles: tuple[Role, ...]
    model: str
    engine: EngineOptions
    port: int
    kv_port: int | None = None
    data_address: str | None = None
    connector: Connector = "ssh"
    service: ServiceManager = "systemd"
    python: str | None = None
    site_packages: bool = False  # use the packages installed for `python`, such as the vendor's own torch
    wired_limit_mb: int | None = None  # launchd: GPU memory that macOS may wire, set at every boot
    queue_size: int = 32
    user: str | None = None
    ssh_port: int | None = None
    key: str | None = None
    hardware: str | None = None
    settings: GatewaySettings = field(default_factory=GatewaySettings)
    models: tuple[str, ...] = ()
    keeping: KeeperSettings | None = None
    keeper: str = ""

    @property
    def url(self) -> str:
        """Base URL of this host's HTTP server. That of a gateway is for its clients, who do not have the fleet's
        token."""
        if self.whole and self.engine.url:
            return self.engine.url
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{'http' if self.gateway and not self.settings.tls else 'https'}://{host}:{self.port}"

    @property
    def gateway(self) -> bool:
        """Whether this host serves clients, and runs no model."""
        return "gateway" in self.roles

    @property
    def whole(self) -> bool:
        """Whether this is a server of OpenAI's API, which answers whole requests and is not managed by disagg."""
        return "whole" in self.roles

    @property
    def keeps(self) -> bool:
        """Whether this host has several models, and its server is a keeper."""
        return bool(self.models)

    @property
    def all_models(self) -> tuple[str, ...]:
        """The names of its models; none of a gateway."""
        return self.models or ((self.model,) if self.model else ())

    @property
    def table(self) -> str:
        """The name of its table in hosts.toml."""
        return self.keeper or self.name

    @property
    def kv_ports(self) -> range:
        """The ports at which this host may receive KV."""
        if self.keeping is not None:
            return self.keeping.ports if "decode" in self.roles else range(0)
        return range(0) if self.kv_port is None else range(self.kv_port, self.kv_port + 1)

    @property
    def follower(self) -> bool:
        """Whether this host computes a part of what another one, the head of its nodes, is asked for."""
        return self.engine.node_rank > 0

    @property
    def answers(self) -> bool:
        """Whether this host can answer a request alone: it has all layers of its model."""
        return self.engine.first_layers is None

    @property
    def server_kind(self) -> ServerKind:
        """Where its server runs, and what follows from it."""
        return NOT_MANAGED if self.whole else SERVER_KINDS[self.connector]

    @property
    def simulated(self) -> bool:
        """Whether this host runs no model: its times are predicted, its bytes and tokens are noise."""
        return self.engine.kind.simulated

    @property
    def kv_address(self) -> str:
        """The address that prefill hosts deliver KV to: the data address if there is one."""
        return self.data_address or self.address


@dataclass(frozen=True, slots=True)
class Deploy:
    """How Python environments are made on the hosts. `wheels`: a local folder, whose wheels are copied to the hosts."""

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    wheels: Path | None = None
    installer: Installer = "auto"  # auto: uv if the host has it, else venv and pip
    cuda_on_cpu: bool = False  # whether hosts whose engine.device is "cpu" may download CUDA's packages


@dataclass(frozen=True, slots=True)
class Hooks:
    """Commands of this machine that run before and after changes of the fleet: lines for sh, in the folder of the file.
    timeout_s: of each."""

    commands: Mapping[HookName, str] = field(default_factory=dict)
    timeout_s: float = 60


@dataclass(frozen=True, slots=True)
class Fleet:
    """All of hosts.toml. `path`: of the file. `token_file`: holds the fleet's shared secret. groups: names of hosts, or
    patterns of names, by the name of their group. default_model: which model a gateway asks for names that no model
    has. hosts: by table. served: what runs a model: hosts with one model as they are, of a host with several a value
    for each model, named HOST/MODEL."""

    name: str
    path: Path
    models: Mapping[str, Model] = field(default_factory=dict)
    hosts: Mapping[str, Host] = field(default_factory=dict)
    token_file: Path | None = None
    deploy: Deploy = Deploy()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hooks: Hooks = Hooks()
    default_model: str | None = None
    served: Mapping[str, Host] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "served", served_hosts(self.hosts, self.models))

    @property
    def engine_hosts(self) -> list[Host]:
        """Of `served`, those that disagg runs: all but whole-request hosts."""
        return [host for host in self.served.values() if not host.whole]

    @property
    def answering_hosts(self) -> list[Host]:
        """Of `served`, those that requests may use: all but followers."""
        return [host for host in self.served.values() if not host.follower]

    @property
    def deployed_hosts(self) -> list[Host]:
        """The hosts that disagg is deployed to: no whole-request hosts, and none that is served from here."""
        return [host for host in self.hosts.values() if host.server_kind.deployed]

    def run_by(self, host: Host) -> list[Host]:
        """What runs a model on this host of hosts.toml: itself, or one for each of its models; none on a gateway."""
        return list(served_hosts({host.name: host}, self.models).values())

    def model(self, name: str) -> Model:
        """The model with this name or alias. Raises UnknownModel, which lists all models and the nearest match."""
        for model in self.models.values():
            if name == model.name or name in model.aliases:
                return model
        known = [word for model in self.models.values() for word in (model.name, *model.aliases)]
        there = ", ".join(
            f"{model.name} ({', '.join(model.aliases)})" if model.aliases else model.name
            for model in self.models.values()
        )
        raise UnknownModel(
            f'no model "{on_one_line(name)}" in this fleet: it has {there}', nearest(name, known) or one_of(known)
        )

    def serving(self, model: str, role: Role) -> list[Host]:
        """The hosts that requests for this model (by canonical name) may use in this role, in file order; may be
        empty."""
        return [host for host in self.answering_hosts if host.model == model and role in host.roles]

    def select(
        self,
        names: Sequence[str] = (),
        *,
        role: str | None = None,
        model: str | None = None,
        groups: Sequence[str] = (),
        exclude: Sequence[str] = (),
        managed: bool = False,
    ) -> list[Host]:
        """The hosts with these names, in one of these groups, with this role and this model (name or alias), without
        those that `exclude` names, in file order; all by default. Names may be patterns such as `mac-*`.

        managed: without whole-request hosts. Raises UsageError for a name, group or role that does not exist, for a
        named host that is not managed, and if no host is left, UnknownModel for a model.
        """
        named = matching(self, names)
        if managed and (whole := [name for name in names if name in self.hosts and self.hosts[name].whole]):
            raise UsageError(
                f'{", ".join(whole)}: the engine is "openai": disagg asks this server and does not manage it',
                "use the tools of that server",
            )
        if role is not None and role not in get_args(Role):
            raise UsageError(f'"{on_one_line(role)}" is not a role', one_of(get_args(Role)))
        if missing := [group for group in groups if group not in self.groups]:
            there = f"it has: {', '.join(self.groups)}" if self.groups else 'write [groups] with rack-1 = ["mac-*"]'
            what = f"group {', '.join(map(on_one_line, missing))}" if self.groups else "groups"
            raise UsageError(f"{self.path} has no {what}", there)
        members = matching(self, [name for group in groups for name in self.groups[group]])
        left_out = matching(self, exclude)
        served = self.model(model).name if model is not None else None
        hosts = [
            host
            for host in self.hosts.values()
            if (not names or host.name in named)
            and (not groups or host.name in members)
            and host.name not in left_out
            and (role is None or role in host.roles)
            and (served is None or served in host.all_models)
            and not (managed and host.whole)
        ]
        if managed and not hosts and self.hosts and all(host.whole for host in self.hosts.values()):
            raise UsageError(f"every host of {self.path} is a whole-request host: disagg manages none of them")
        if not hosts:
            raise UsageError(
                f"no host of {self.path} fits these options",
                "`disagg status` lists hosts, roles and models: give --host, --role or --model less narrowly",
            )
        return hosts


def served_hosts(hosts: Mapping[str, Host], models: Mapping[str, Model]) -> dict[str, Host]:
    """The hosts that run a model, by name, in file order: see Fleet."""
    return {one.name: one for host in hosts.values() if not host.gateway for one in _running(host, models)}


def _running(host: Host, models: Mapping[str, Model]) -> list[Host]:
    if not host.keeps:
        return [host]
    one = replace(host, models=(), keeper=host.name, port=0, kv_port=0 if "decode" in host.roles else None)
    engines = {name: models[name].run_by(host.engine, host.roles) for name in host.models}
    return [replace(one, name=f"{host.name}/{name}", model=name, engine=engine) for name, engine in engines.items()]


def matching(fleet: Fleet, names: Sequence[str]) -> set[str]:
    """The hosts with these names, which may be patterns. UsageError for one that fits none."""
    fitting = {
        name: [host for host in fleet.hosts if fnmatchcase(host, name)] for name in names if name not in fleet.hosts
    }
    if unknown := [name for name, hosts in fitting.items() if not hosts]:
        raise UsageError(
            f"{fleet.path} has no host {', '.join(map(on_one_line, unknown))}", f"it has: {', '.join(fleet.hosts)}"
        )
    return {host for name in names for host in fitting.get(name, [name])}


@dataclass(frozen=True, slots=True)
class ServerKind:
    """How disagg reaches a host, installs it and runs its server.

    ssh: reached over SSH, so it has an account, a host key and a clock of its own. deployed: `disagg deploy` installs a
    release, an environment, the token and models there; otherwise its server uses this installation and its files.
    spawned: `disagg start` spawns its server as a process of this machine, with a record and a log in the fleet's state
    folder.
    """

    ssh: bool
    deployed: bool
    spawned: bool


SERVER_KINDS: Final[dict[Connector, ServerKind]] = {
    "local": ServerKind(ssh=False, deployed=False, spawned=True),
    "ssh": ServerKind(ssh=True, deployed=True, spawned=False),
}
NOT_MANAGED: Final = ServerKind(ssh=False, deployed=False, spawned=False)
"""The kind of a whole-request host: disagg sends it requests and does nothing else with it."""
