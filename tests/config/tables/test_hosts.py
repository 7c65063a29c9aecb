"""Every rule of [hosts.*] tables, broken once: what is said, what is hinted, and where the carets stand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.config import Host, load
from disagg.errors import ConfigError

Expect = Callable[[dict[str, str], str, str], ConfigError]

SPARK = '[hosts.spark]\naddress = "10.0.0.1"'
SPARK_ROLES = 'roles = ["prefill"]\nmodel = "qwen:30b"'
SPARK_REST = '\nroles = ["prefill"]\nmodel = "qwen:30b"\nport = 8000\n\n'
SPARK_ENGINE = 'name = "transformers"'
MAC_ADDRESS = 'address = "10.0.0.2"'
MAC_ROLES = 'roles = ["decode"]\nmodel = "qwen:30b"'
MAC_ENGINE = 'engine.name = "mlx"'
HOST_KEYS = (
    "address, roles, model, port, engine, models, kv_port, data_address, connector, service, python, "
    "site_packages, wired_limit_mb, queue_size, user, ssh_port, key, hardware"
)
ROLES_EXAMPLE = 'roles = ["prefill"]'
MODEL_EXAMPLE = 'model = "qwen3-coder:30b"'
ENGINE_EXAMPLE = 'engine = {name = "transformers"}'
NAME_RULE = 'letters, digits, ".", "_" and "-", beginning with a letter or digit, at most 64'


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        (SPARK, '[hosts.spark]\n«adress» = "10.0.0.1"', 'unknown key "adress" in [hosts.spark]', "address"),
        (SPARK, SPARK + '\n  «"Queue_Size"»= 3', 'unknown key "Queue_Size" in [hosts.spark]', "queue_size"),
        (MAC_ENGINE, 'engine = {name="mlx", «batch»=4}', 'unknown key "batch" in [hosts.mac.engine]', "max_batch"),
        (MAC_ENGINE, MAC_ENGINE + "\nengine . «treads» = 4", 'unknown key "treads" in [hosts.mac.engine]', "threads"),
    ],
)
def test_an_unknown_key_is_pointed_at_and_the_nearest_one_named(
    expect_fault: Expect, old: str, new: str, message: str, hint: str
) -> None:
    expect_fault({old: new}, message, f'did you mean "{hint}"?')


def test_an_unknown_key_that_is_near_no_other_gets_the_list(expect_fault: Expect) -> None:
    expect_fault({SPARK: SPARK + "\n«xyz» = 3"}, 'unknown key "xyz" in [hosts.spark]', f"there are {HOST_KEYS}")


@pytest.mark.parametrize(
    ("old", "new", "message", "other"),
    [
        (MAC_ENGINE, MAC_ENGINE + '\nengine.«attention» = "sdpa"', "attention", "transformers"),
        (MAC_ENGINE, MAC_ENGINE + '\nengine.«quantization» = "int8"', "quantization", "transformers"),
        (SPARK_ENGINE, SPARK_ENGINE + "\n«max_batch» = 3", "max_batch", "mlx"),
        (SPARK_ENGINE, SPARK_ENGINE + "\n«max_kv_bytes» = 3", "max_kv_bytes", "mlx"),
    ],
)
def test_an_option_of_the_other_engine_is_refused_as_that(
    expect_fault: Expect, old: str, new: str, message: str, other: str
) -> None:
    host = "spark" if old is SPARK_ENGINE else "mac"
    expect_fault(
        {old: new},
        f'unknown key "{message}" in [hosts.{host}.engine]',
        f'this is an option of the engine "{other}"',
    )


@pytest.mark.parametrize("option", ['«kv_wire» = "int8"', "«max_held_bytes» = 3", '«layers» = "0:3"'])
def test_an_option_of_the_other_role_is_refused_as_that(expect_fault: Expect, option: str) -> None:
    message = f'unknown key "{option[1 : option.index("»")]}" in [hosts.mac.engine]'
    expect_fault({MAC_ENGINE: f"{MAC_ENGINE}\nengine.{option}"}, message, "this is an option of prefill hosts")


def test_mlx_prefills_and_decodes(host_with: Callable[[str, str, str], Host]) -> None:
    host = host_with("spark", SPARK_ENGINE, 'name = "mlx"\nmax_held_bytes = 3')
    assert (host.engine.kind.extras_for(host.roles), host.engine.kind.memory.kv_of(host.roles)) == (
        ("decode",),
        "max_held_bytes",
    )


def test_a_host_name_with_a_bare_dot_is_explained(expect_fault: Expect) -> None:
    expect_fault(
        {"[hosts.mac]": "[hosts.mac.«lan»]"}, 'unknown key "lan" in [hosts.mac]', "a name that holds a dot needs quotes"
    )


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({SPARK: "«[hosts.spark]» # new"}, 'missing key "address" in [hosts.spark]', 'add address = "10.0.0.1"'),
        (
            {"[hosts.mac]": "«[hosts.mac]»", MAC_ROLES: 'model = "qwen:30b"'},
            'missing key "roles" in [hosts.mac]',
            'add roles = ["prefill"]',
        ),
        (
            {"[hosts.mac]": "«[hosts.mac]»", MAC_ROLES: 'roles = ["decode"]'},
            'missing key "model" in [hosts.mac]',
            f"add {MODEL_EXAMPLE}",
        ),
        (
            {"[hosts.spark]": "«[hosts.spark]»", "port = 8000\n": ""},
            'missing key "port" in [hosts.spark]',
            "add port = 8000",
        ),
        (
            {"[hosts.spark]": "«[hosts.spark]»", "[hosts.spark.engine]\n" + SPARK_ENGINE: ""},
            'missing key "engine" in [hosts.spark]',
            'add engine = {name = "transformers"}',
        ),
        (
            {SPARK + SPARK_REST + "[hosts.spark.engine]": "[hosts.«spark».engine]"},
            'missing key "address" in [hosts.spark]',
            'add address = "10.0.0.1"',
        ),
        (
            {"[hosts.spark.engine]\n" + SPARK_ENGINE: "«[hosts.spark.engine]»"},
            'missing key "name" in [hosts.spark.engine]',
            'add name = "transformers"',
        ),
        (
            {MAC_ENGINE: 'engine = «{dtype = "float32"}»'},
            'missing key "name" in [hosts.mac.engine]',
            'add name = "transformers"',
        ),
        (
            {MAC_ENGINE: '«engine».dtype = "float32"'},
            'missing key "name" in [hosts.mac.engine]',
            'add name = "transformers"',
        ),
        (
            {"[hosts.mac]": "«[hosts.mac]»", "kv_port = 9001\n": ""},
            'missing key "kv_port" in [hosts.mac]',
            "prefill hosts deliver KV to this port of a decode host: add kv_port = 9001",
        ),
    ],
)
def test_a_missing_key_is_reported_at_the_table_that_lacks_it(
    expect_fault: Expect, changes: dict[str, str], message: str, hint: str
) -> None:
    expect_fault(changes, message, hint)


@pytest.mark.parametrize(
    ("old", "new", "message", "example"),
    [
        ("port = 8000", 'port = «"8000"»', "port must be an integer, not a string", "port = 8000"),
        ("port = 8000", "port = «8000.0» # x", "port must be an integer, not a fraction", "port = 8000"),
        ("port = 8000", "port = «true»", "port must be an integer, not true or false", "port = 8000"),
        ("port = 8000", "port = «2020-01-01 10:00:00»", "port must be an integer, not a date", "port = 8000"),
        (SPARK, "[hosts.spark]\naddress = «10»", "address must be a string, not an integer", 'address = "10.0.0.1"'),
        (SPARK_ROLES, 'roles = «"prefill"»\nmodel = "qwen:30b"', "roles must be a list, not a string", ROLES_EXAMPLE),
        (
            SPARK_ROLES,
            'roles = [\n "prefill", «7», ]\nmodel = "qwen:30b"',
            "roles holds strings, not an integer",
            ROLES_EXAMPLE,
        ),
        (
            SPARK_ROLES,
            'roles = ["prefill"]\nmodel = «["qwen:30b"]»',
            "model must be a string, not a list",
            MODEL_EXAMPLE,
        ),
        (MAC_ENGINE, 'engine = «"mlx"»', "engine must be a table, not a string", ENGINE_EXAMPLE),
        (SPARK_ENGINE, "name = «{}»", "name must be a string, not a table", 'name = "transformers"'),
        (SPARK_ENGINE, SPARK_ENGINE + "\nthreads = «'1'»", "threads must be an integer, not a string", "threads = 1"),
        (MAC_ENGINE, MAC_ENGINE + "\nservice = «1»", "service must be a string, not an integer", 'service = "systemd"'),
    ],
)
def test_a_value_of_the_wrong_type_is_pointed_at(
    expect_fault: Expect, old: str, new: str, message: str, example: str
) -> None:
    expect_fault({old: new}, message, f"as in {example}")


def test_a_host_that_is_no_table_is_pointed_at(expect_fault: Expect) -> None:
    expect_fault(
        {SPARK: "[hosts]\n«other» = 3\n" + SPARK}, '"other" in [hosts] is not a table', "as in [hosts.dgx-spark-1]"
    )


def test_a_list_of_host_tables_is_refused(expect_fault: Expect) -> None:
    expect_fault({"[hosts.mac]": "[[hosts.«mac»]]"}, '"mac" in [hosts] is not a table', "as in [hosts.dgx-spark-1]")


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        (
            SPARK_ROLES,
            'roles = [«"prefil"»]',
            '"prefil" is not a value for roles',
            'one of "prefill", "decode", "whole", "gateway"; did you mean "prefill"?',
        ),
        (
            SPARK_ROLES,
            "roles = ['decode', «'x'»]",
            '"x" is not a value for roles',
            'one of "prefill", "decode", "whole", "gateway"',
        ),
        (
            SPARK_ENGINE,
            'name = «"torch"»',
            '"torch" is not a value for name',
            'one of "transformers", "vllm", "vllm-server", "mlx", "simulated", "openai"',
        ),
        (
            SPARK,
            SPARK + "\nconnector = «'shh'»",
            '"shh" is not a value for connector',
            'one of "ssh", "local"; did you mean "ssh"?',
        ),
        (
            MAC_ENGINE,
            MAC_ENGINE + '\nengine.split = «"of"»',
            '"of" is not a value for split',
            'one of "auto", "off", or a number of layers from 0 to 1024; did you mean "off"?',
        ),
        (
            SPARK,
            SPARK + '\nservice = «"init"»',
            '"init" is not a value for service',
            'one of "systemd", "launchd", "process"',
        ),
        (
            SPARK_ENGINE,
            SPARK_ENGINE + '\ndtype = «"bf16"»',
            '"bf16" is not a value for dtype',
            'one of "float32", "float16", "bfloat16"; did you mean "bfloat16"?',
        ),
        (
            SPARK_ENGINE,
            SPARK_ENGINE + '\nquantization = «"int9"»',
            '"int9" is not a value for quantization',
            'one of "int8", "int4", "mxfp4"; did you mean "int8"?',
        ),
        (
            SPARK_ENGINE,
            SPARK_ENGINE + '\nkv_wire = «"int4"»',
            '"int4" is not a value for kv_wire',
            'one of "as-is", "auto", "int8"; did you mean "int8"?',
        ),
        (
            SPARK_ENGINE,
            SPARK_ENGINE + '\ndevice = «"gpu"»',
            '"gpu" is not a value for device',
            'one of "auto", "cuda", "mps", "cpu"; did you mean "cpu"?',
        ),
        (
            SPARK_ENGINE,
            SPARK_ENGINE + '\ndevice = «"cuda:x"»',
            '"cuda:x" is not a value for device',
            'one of "auto", "cuda", "mps", "cpu"; did you mean "cuda"?',
        ),
        (
            MAC_ENGINE,
            MAC_ENGINE + '\nengine.device = «"cuda"»',
            '"cuda" is not a value for device',
            'one of "auto", "gpu", "cpu"',
        ),
        (
            SPARK_ENGINE,
            SPARK_ENGINE + '\nattention = «"sdp"»',
            '"sdp" is not a value for attention',
            'one of "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"; did you mean "sdpa"?',
        ),
    ],
)
def test_a_word_that_is_not_allowed_is_pointed_at(
    expect_fault: Expect, old: str, new: str, message: str, hint: str
) -> None:
    new += '\nmodel = "qwen:30b"' if old is SPARK_ROLES else ""
    expect_fault({old: new}, message, hint)


@pytest.mark.parametrize(
    ("roles", "message", "hint"),
    [
        ("«[]»", "roles is empty", 'one of "prefill", "decode", "whole", "gateway"'),
        ('["prefill", «"prefill"»]', 'roles names "prefill" twice', "keep one"),
        (
            '«["prefill", "decode"]»',
            "one host cannot prefill and decode: the two need different engines",
            "describe the machine as two hosts with the same address and different ports",
        ),
        (
            '«["decode", "gateway"]»',
            "a gateway is a server of its own and runs no model",
            "describe the machine as two hosts with the same address and different ports",
        ),
    ],
)
def test_roles_that_do_not_go_together_are_refused(expect_fault: Expect, roles: str, message: str, hint: str) -> None:
    expect_fault({SPARK_ROLES: f'roles = {roles}\nmodel = "qwen:30b"'}, message, hint)


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("port = 8000", "port = «0»", "port is out of range", "from 1 to 65535"),
        ("port = 8000", "port = «65_536»", "port is out of range", "from 1 to 65535"),
        ("kv_port = 9001", "kv_port = «-1»", "kv_port is out of range", "from 1 to 65535"),
        (SPARK, SPARK + "\nqueue_size = «0»", "queue_size is out of range", "from 1 to 65536"),
        (SPARK, SPARK + "\nqueue_size = «65537»", "queue_size is out of range", "from 1 to 65536"),
        (SPARK_ENGINE, SPARK_ENGINE + "\nchunk_tokens = «0»", "chunk_tokens is out of range", "from 1 to 131072"),
        (SPARK_ENGINE, SPARK_ENGINE + "\nchunk_tokens = «131073»", "chunk_tokens is out of range", "from 1 to 131072"),
        (SPARK_ENGINE, SPARK_ENGINE + "\nthreads = «0x0»", "threads is out of range", "from 1 to 1024"),
        (SPARK_ENGINE, SPARK_ENGINE + "\nthreads = «1025»", "threads is out of range", "from 1 to 1024"),
        (MAC_ENGINE, MAC_ENGINE + "\nengine.max_batch = «0»", "max_batch is out of range", "from 1 to 1024"),
        (MAC_ENGINE, MAC_ENGINE + "\nengine.max_batch = «1025»", "max_batch is out of range", "from 1 to 1024"),
        (
            MAC_ENGINE,
            MAC_ENGINE + "\nengine.max_kv_bytes = «0»",
            "max_kv_bytes is out of range",
            "from 1 to 1125899906842624",
        ),
        (MAC_ENGINE, MAC_ENGINE + "\nengine.kv_audit = «0»", "kv_audit is out of range", "from 1 to 1000"),
        (MAC_ENGINE, MAC_ENGINE + "\nengine.split = «-1»", "split is out of range", "from 0 to 1024"),
        (SPARK_ENGINE, SPARK_ENGINE + '\nlayers = «"24"»', "these are no layers", '"0:24" for the first 24'),
        (SPARK_ENGINE, SPARK_ENGINE + '\nlayers = «"0:-4"»', "these are no layers", '"0:24" for the first 24'),
        (SPARK_ENGINE, SPARK_ENGINE + '\nlayers = «"8:24"»', "a prefill host computes the first layers", '"0:24"'),
        (SPARK_ENGINE, SPARK_ENGINE + '\nlayers = «"8:0"»', "a prefill host computes the first layers", '"0:24"'),
        (SPARK_ENGINE, SPARK_ENGINE + '\nlayers = «"0:0"»', "layers is out of range", 'from "0:1" to "0:1024"'),
        (SPARK_ENGINE, SPARK_ENGINE + '\nlayers = «"0:1025"»', "layers is out of range", 'from "0:1" to "0:1024"'),
        (
            MAC_ENGINE,
            MAC_ENGINE + "\nengine.kv_audit_tolerance = «nan»",
            "kv_audit_tolerance is out of range",
            "from 0.1 to 100",
        ),
        (
            MAC_ENGINE,
            MAC_ENGINE + "\nengine.kv_audit_tolerance = «0»",
            "kv_audit_tolerance is out of range",
            "from 1 to 100",
        ),
    ],
)
def test_a_number_out_of_bounds_is_pointed_at(
    expect_fault: Expect, old: str, new: str, message: str, hint: str
) -> None:
    expect_fault({old: new}, message, hint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {MAC_ADDRESS: 'address = "10.0.0.1"', "port = 8001": "port = «8000»"},
            "port 8000 is already the port of [hosts.spark] on 10.0.0.1",
        ),
        (
            {
                SPARK: '[hosts.spark]\naddress = "Box.lan"',
                MAC_ADDRESS: 'address = "box.LAN."',
                "kv_port = 9001": "kv_port = «8000»",
            },
            "kv_port 8000 is already the port of [hosts.spark] on Box.lan",
        ),
        ({"kv_port = 9001": "kv_port = «8001»"}, "kv_port 8001 is already the port of [hosts.mac] on 10.0.0.2"),
        (
            {MAC_ADDRESS: 'address = "10.0.0.2"\ndata_address = "10.0.0.1"', "kv_port = 9001": "kv_port = «8000»"},
            "kv_port 8000 is already the port of [hosts.spark] on 10.0.0.1",
        ),
        (
            {
                SPARK: '[hosts.spark]\naddress = "::1"',
                MAC_ADDRESS: 'address = "0:0::1"',
                "port = 8001": "port = «8000»",
            },
            "port 8000 is already the port of [hosts.spark] on ::1",
        ),
    ],
)
def test_a_port_that_another_server_has_on_that_machine_is_refused(
    expect_fault: Expect, changes: dict[str, str], message: str
) -> None:
    expect_fault(changes, message, "choose another port")


def test_kv_port_is_refused_where_no_kv_arrives(expect_fault: Expect) -> None:
    expect_fault(
        {"port = 8000": "port = 8000\n«kv_port» = 9001"},
        "kv_port is for decode hosts",
        "only they receive KV: remove this line",
    )


@pytest.mark.parametrize(
    ("model", "message", "hint"),
    [
        ('«"qwen:31b"»', 'no model "qwen:31b"', 'did you mean "qwen:30b"?'),
        ('«"zzz"»', 'no model "zzz"', 'there are "qwen:30b", "plain"'),
        ('«"qwen"»', 'no model "qwen"', 'this is an alias: write "qwen:30b"'),
        (
            '«"plain"»',
            'model "plain" has no source for the engine "transformers" of this host',
            'add transformers = "owner/model" to [models.plain.sources]',
        ),
    ],
)
def test_a_model_that_the_host_cannot_serve_is_pointed_at(
    expect_fault: Expect, model: str, message: str, hint: str
) -> None:
    expect_fault({SPARK_ROLES: f'roles = ["prefill"]\nmodel = {model}'}, message, hint)


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        (
            SPARK_ENGINE,
            'name = «"openai"»',
            'the engine "openai" cannot prefill',
            'prefill needs name = "transformers"',
        ),
        (
            MAC_ENGINE,
            'engine.name = «"transformers"»',
            'the engine "transformers" cannot decode',
            'decode needs name = "mlx"',
        ),
    ],
)
def test_an_engine_that_does_not_fit_the_role_is_pointed_at(
    expect_fault: Expect, old: str, new: str, message: str, hint: str
) -> None:
    expect_fault({old: new}, message, hint)


@pytest.mark.parametrize("name", ['"a b"', "'../etc'", '"-rf"', '"x;y"', '"é"', '""', f'"{"x" * 65}"', "'.hidden'"])
def test_a_host_name_that_is_not_safe_is_pointed_at(expect_fault: Expect, name: str) -> None:
    expect_fault({"[hosts.mac]": f"[hosts.«{name}»]"}, "this host name is not usable", NAME_RULE)


BARE = 'give the bare hostname or IP address, without URL, user, brackets or "%" zone'
HOSTNAME = 'a hostname holds letters, digits, "-" and ".", and no part of it begins or ends with "-"'


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("", HOSTNAME),
        ("two words", HOSTNAME),
        ("a;reboot", HOSTNAME),
        ("$(id)", HOSTNAME),
        ("-oProxyCommand=x", HOSTNAME),
        ("a..b", HOSTNAME),
        ("tail-", HOSTNAME),
        ("x" * 64, HOSTNAME),
        ("http://spark", BARE),
        ("me@spark", BARE),
        ("[::1]", BARE),
        ("fe80::1%en0", BARE),
        ("10.0.0.1:8000", "the port is a key of its own, as in port = 8000"),
        ("10.0.0.300", "this is not a valid IP address"),
        ("10.0.0", "this is not a valid IP address"),
        ("1::2::3", "this is not a valid IP address"),
        ("0.0.0.0", "this address means every interface: give the one that other machines connect to"),
        ("::", "this address means every interface: give the one that other machines connect to"),
    ],
)
@pytest.mark.parametrize("key", ["address", "data_address"])
def test_an_address_that_is_not_one_is_pointed_at(expect_fault: Expect, key: str, address: str, hint: str) -> None:
    line = f'{key} = «"{address}"»'
    new = line if key == "address" else f"{MAC_ADDRESS}\n{line}"
    expect_fault({MAC_ADDRESS: new}, f'"{address}" is not an address', hint)


@pytest.mark.parametrize(
    "address", ["spark", "spark-1.lan", "SPARK_1", "10.0.0.9", "::1", "fd00::12", "localhost", "a.b."]
)
def test_hostnames_and_both_kinds_of_ip_address_are_taken(
    host_with: Callable[[str, str, str], Host], address: str
) -> None:
    assert host_with("mac", MAC_ADDRESS, f'address = "{address}"').address == address


@pytest.mark.parametrize("python", ["python3", "./python", "/opt/\\u001b[31m", ""])
def test_a_python_that_is_no_absolute_path_is_pointed_at(expect_fault: Expect, python: str) -> None:
    expect_fault(
        {SPARK: f'{SPARK}\npython = «"{python}"»'},
        "python is not an absolute path",
        "PATH is short over ssh: begin with / or ~/",
    )


@pytest.mark.parametrize("user", ["", "two words", "a;reboot", "$(id)", "-oProxyCommand=x", "me@spark", "é", "x" * 65])
def test_a_user_that_is_no_account_name_is_pointed_at(expect_fault: Expect, user: str) -> None:
    rule = 'letters, digits, ".", "_" and "-", beginning with a letter, digit or "_", at most 64'
    expect_fault({SPARK: f'{SPARK}\nuser = «"{user}"»'}, f'"{user}" is not a user name', rule)


@pytest.mark.parametrize("key", ["id_ed25519", "./key", "", "/keys/\\u001b[31m"])
def test_a_key_that_is_no_absolute_path_is_pointed_at(expect_fault: Expect, key: str) -> None:
    expect_fault(
        {SPARK: f'{SPARK}\nkey = «"{key}"»'},
        "key is not an absolute path",
        "a private key file on this machine: begin with / or ~/",
    )


def test_a_public_key_is_pointed_at(expect_fault: Expect) -> None:
    expect_fault(
        {SPARK: f'{SPARK}\nkey = «"~/.ssh/id_ed25519.pub"»'},
        "key is a public key",
        "name the private one, without .pub",
    )


@pytest.mark.parametrize("port", ["0", "65_536"])
def test_an_ssh_port_out_of_range_is_pointed_at(expect_fault: Expect, port: str) -> None:
    expect_fault({SPARK: f"{SPARK}\nssh_port = «{port}»"}, "ssh_port is out of range", "from 1 to 65535")


def test_how_ssh_reaches_a_host_arrives_in_it(host_with: Callable[[str, str, str], Host]) -> None:
    host = host_with("spark", SPARK, f'{SPARK}\nuser = "_ci.user-1"\nssh_port = 2222\nkey = "~/.ssh/spark"')
    assert (host.user, host.ssh_port, host.key) == ("_ci.user-1", 2222, "~/.ssh/spark")
    host = host_with("spark", SPARK, SPARK)
    assert (host.user, host.ssh_port, host.key) == (None, None, None)


def test_every_option_arrives_in_the_host(host_with: Callable[[str, str, str], Host], fleet_text: str) -> None:
    hosts = fleet_text[fleet_text.index(SPARK_ENGINE) :]
    options = """\
data_address = "10.1.0.2"
connector = "local"
service = "launchd"
python = "~/venv/bin/python"
queue_size = 5
[hosts.mac.engine]
name = "mlx"
dtype = "float16"
device = "gpu"
chunk_tokens = 7
threads = 2
max_batch = 3
max_kv_bytes = 1_000
split = 12
kv_audit = 4
kv_audit_tolerance = 2.5
"""
    same_dtype = hosts.replace(SPARK_ENGINE, f'{SPARK_ENGINE}\ndtype = "float16"')
    host = host_with("mac", hosts, same_dtype.replace(MAC_ENGINE, options))
    assert (host.connector, host.service, host.python, host.queue_size) == ("local", "launchd", "~/venv/bin/python", 5)
    assert (host.address, host.data_address, host.kv_address) == ("10.0.0.2", "10.1.0.2", "10.1.0.2")
    engine = host.engine
    assert (engine.dtype, engine.device, engine.chunk_tokens, engine.threads) == ("float16", "gpu", 7, 2)
    assert (engine.max_batch, engine.max_kv_bytes) == (3, 1000)
    assert (engine.split, engine.kv_audit, engine.kv_audit_tolerance) == (12, 4, 2.5)


@pytest.mark.parametrize("setting", ["auto", "always", "off"])
def test_which_hand_offs_are_audited_can_be_a_word(host_with: Callable[[str, str, str], Host], setting: str) -> None:
    assert host_with("mac", MAC_ENGINE, f'{MAC_ENGINE}\nengine.kv_audit = "{setting}"').engine.kv_audit == setting


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_whether_prompts_are_divided_can_be_a_word(host_with: Callable[[str, str, str], Host], setting: str) -> None:
    assert host_with("mac", MAC_ENGINE, f'{MAC_ENGINE}\nengine.split = "{setting}"').engine.split == setting


@pytest.mark.parametrize(("layers", "first"), [("0:24", 24), ("0:024", 24), ("0:1", 1)])
def test_a_prefill_host_may_load_the_first_layers_only(
    host_with: Callable[[str, str, str], Host], layers: str, first: int
) -> None:
    engine = host_with("spark", SPARK_ENGINE, f'{SPARK_ENGINE}\nlayers = "{layers}"').engine
    assert (engine.layers, engine.first_layers) == (f"0:{first}", first)
    assert host_with("mac", MAC_ADDRESS, MAC_ADDRESS).engine.first_layers is None


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1", "mps", "cpu"])
def test_torch_devices_are_taken(host_with: Callable[[str, str, str], Host], device: str) -> None:
    assert host_with("spark", SPARK_ENGINE, f'{SPARK_ENGINE}\ndevice = "{device}"').engine.device == device


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2", "kernels-community/vllm-flash-attn3"])
def test_attention_is_one_of_the_frameworks_own_or_a_kernel_from_the_hub(
    host_with: Callable[[str, str, str], Host], attention: str
) -> None:
    assert host_with("spark", SPARK_ENGINE, f'{SPARK_ENGINE}\nattention = "{attention}"').engine.attention == attention


def test_two_hosts_may_share_an_address_with_different_ports(host_with: Callable[[str, str, str], Host]) -> None:
    assert host_with("mac", MAC_ADDRESS, 'address = "10.0.0.1"').port == 8001


@pytest.fixture
def host_with(tmp_path: Path, fleet_text: str) -> Callable[[str, str, str], Host]:
    """The host `name` of the test fleet with `old` replaced by `new`."""

    def read(name: str, old: str, new: str) -> Host:
        assert fleet_text.count(old) == 1
        path = tmp_path / "hosts.toml"
        path.write_text(fleet_text.replace(old, new), encoding="utf-8")
        return load(path).hosts[name]

    return read
