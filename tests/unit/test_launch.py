"""Engine command lines and environment."""

from __future__ import annotations

import json
import random
import shlex
import socket
from collections.abc import Mapping
from typing import Any

import pytest
from carryback_server.config import ConfigError, EngineSettings, ServeConfig, load
from carryback_server.launch import (
    EngineCommand,
    Ports,
    check_listeners,
    choose_ports,
    data_parallel_size,
    engine_command,
    engine_commands,
    engine_listeners,
    free_ports,
    has_flag,
    is_free,
    is_on,
    reserved_ports,
    router_listeners,
)
from carryback_server.profiles import Role

PORTS: dict[Role, Ports] = {"prefill": Ports(8100, 8101, 8102), "decode": Ports(8200, 8201, 8202)}


def build(
    device: Any = "cpu", key: str | None = "5ec7e7", environ: Mapping[str, str] | None = None, **flags: object
) -> tuple[EngineCommand, EngineCommand]:
    config = load(ServeConfig, **flags)
    prefill, decode = engine_commands(
        config,
        device=device,
        model_path=config.model or "/models/small",
        ports=PORTS,
        key=key,
        environ=environ or {},
    )
    return prefill, decode


def value(command: EngineCommand, flag: str) -> str:
    assert command.argv.count(flag) == 1, f"{flag} in {command.argv}"
    return command.argv[command.argv.index(flag) + 1]


def kv_transfer(command: EngineCommand) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(value(command, "--kv-transfer-config"))
    return config


def test_the_two_roles() -> None:
    prefill, decode = build()
    assert (kv_transfer(prefill)["kv_role"], kv_transfer(decode)["kv_role"]) == ("kv_producer", "kv_consumer")
    assert kv_transfer(prefill)["kv_load_failure_policy"] == "recompute"
    assert kv_transfer(decode)["kv_load_failure_policy"] == "fail"
    for command, ports in ((prefill, PORTS["prefill"]), (decode, PORTS["decode"])):
        assert value(command, "--port") == str(ports.http)
        assert command.url == f"http://127.0.0.1:{ports.http}"
        extra = kv_transfer(command)["kv_connector_extra_config"]
        assert extra["carryback_events"] == command.events == f"tcp://127.0.0.1:{ports.events}"
        assert command.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(ports.side_channel)
        assert extra["bidirectional_kv_xfer"] is True
        assert command.engine().role == command.role


def test_what_both_must_agree_on() -> None:
    prefill, decode = build()
    for command in (prefill, decode):
        assert value(command, "--prefix-caching-hash-algo") == "sha256_cbor"
        assert command.env["PYTHONHASHSEED"] == "0"
        assert command.env["CARRYBACK_KEY"] == "5ec7e7"


def test_settings_reach_the_connector() -> None:
    for command in build(
        kv_recompute_threshold=0,
        kv_backend="LIBFABRIC",
        hold_s=30.5,
        prefill_lease_s=12,
        prefill_patience_s=7,
    ):
        extra = kv_transfer(command)["kv_connector_extra_config"]
        assert extra["kv_recompute_threshold"] == 0
        assert extra["backends"] == ["LIBFABRIC"]
        assert extra["decoder_kv_blocks_ttl"] == 31
        assert extra["kv_lease_duration"] == 12
        assert extra["carryback_patience_s"] == 7


def test_no_key() -> None:
    for command in build(key=None, insecure_dev=True):
        assert "CARRYBACK_KEY" not in command.env
        assert command.env["CARRYBACK_INSECURE_DEV"] == "1"
    for command in build():
        assert "CARRYBACK_INSECURE_DEV" not in command.env


def test_secrets_are_not_printed() -> None:
    for command in build(engine_api_key="hush", events_key="whisper"):
        assert command.env["VLLM_API_KEY"] == "hush"
        assert command.env["CARRYBACK_EVENTS_KEY"] == "whisper"
        assert "5ec7e7" not in command.shell()
        assert "hush" not in command.shell()
        assert "whisper" not in command.shell()


def test_no_key_for_events_unless_set() -> None:
    for command in build():
        assert "CARRYBACK_EVENTS_KEY" not in command.env


def test_the_printed_command_is_the_command() -> None:
    for command in build(engine_args=["--override-generation-config", '{"a": "it\'s $HOME"}']):
        words = shlex.split(command.shell().replace("\\\n", " "))
        env = dict(word.split("=", 1) for word in words[: words.index(command.argv[0])])
        assert words[len(env) :] == command.argv
        assert env == {name: value for name, value in command.env.items() if name != "CARRYBACK_KEY"}


def test_default_model_calls_tools() -> None:
    for command in build():
        assert value(command, "--tool-call-parser") == "hermes"
        assert "--enable-auto-tool-choice" in command.argv
        assert value(command, "--served-model-name") == "SmolLM2-135M-Instruct"
    for command in build(model="Qwen/Qwen3-32B"):
        assert "--tool-call-parser" not in command.argv
        assert "--chat-template" not in command.argv
        assert value(command, "--served-model-name") == "Qwen/Qwen3-32B"


def test_cpu_settings_are_for_cpus() -> None:
    for command in build("cpu"):
        assert value(command, "--dtype") == "float32"
        assert int(value(command, "--block-size")) % 32 == 0
        assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    prefill, decode = build("cuda", prefill_devices="0,1", decode_devices="2,3")
    for command in (prefill, decode):
        assert "--dtype" not in command.argv
        assert not any("CPU" in name or "OMP" in name for name in command.env)
    assert prefill.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert decode.env["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_the_operators_arguments_win() -> None:
    prefill, decode = build(
        engine_args=["--dtype=bfloat16", "--max_model_len", "1024", "--no-enforce-eager"],
        prefill_args="--no-enable-prefix-caching --block-size 64",
    )
    for command in (prefill, decode):
        assert "--dtype" not in command.argv
        assert "--dtype=bfloat16" in command.argv
        assert "--max-model-len" not in command.argv
        assert "--enforce-eager" not in command.argv
    assert value(prefill, "--block-size") == "64"
    assert "--no-enable-prefix-caching" in prefill.argv
    assert value(decode, "--block-size") == "32"
    assert "--no-enable-prefix-caching" not in decode.argv
    assert "--enable-prefix-caching" not in prefill.argv


def test_a_decode_engine_has_a_prefix_cache_unless_the_operator_says_otherwise() -> None:
    prefill, decode = build()
    assert is_on(decode.argv, "--enable-prefix-caching")
    assert (prefill.warning, decode.warning) == ("", "")
    prefill, decode = build(prefill_args="--no-enable-prefix-caching")
    assert (prefill.warning, decode.warning) == ("", "")
    for args in (
        {"engine_args": ["--no-enable-prefix-caching"]},
        {"decode_args": "--no_enable_prefix_caching"},
        {"engine_args": ["--enable-prefix-caching"], "decode_args": "--no-enable-prefix-caching"},
    ):
        prefill, decode = build(**args)
        assert not is_on(decode.argv, "--enable-prefix-caching")
        assert prefill.warning == ""
        assert "--no-enable-prefix-caching" in decode.warning


def test_a_prefill_engine_knows_whom_to_ask_where_the_router_does_not_say() -> None:
    prefill, decode = build(decode_args="--data-parallel-size 2")
    extra = kv_transfer(prefill)["kv_connector_extra_config"]
    assert extra["carryback_peers"] == [decode.events, "tcp://127.0.0.1:8202"]
    assert "carryback_peers" not in kv_transfer(decode)["kv_connector_extra_config"]
    peers = ["tcp://10.0.0.6:8201", "tcp://[fd00::7]:8201"]
    for role, expected in (("prefill", peers), ("decode", None)):
        settings = load(EngineSettings, decode_peers=",".join(peers))
        command = engine_command(settings, role, model_path="m", address="10.0.0.5", key="k", environ={})  # type: ignore[arg-type]
        assert kv_transfer(command)["kv_connector_extra_config"].get("carryback_peers") == expected
    settings = load(EngineSettings)
    command = engine_command(settings, "prefill", model_path="m", address="10.0.0.5", key="k", environ={})
    assert "carryback_peers" not in kv_transfer(command)["kv_connector_extra_config"]


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        ("10.0.0.6:8201", "want an address such as tcp://127.0.0.1:8101"),
        ("http://10.0.0.6:8200", "want an address such as tcp://127.0.0.1:8101"),
        ("tcp://10.0.0.6", "the port is missing"),
        ("tcp://10.0.0.6:8201,tcp://fd00::7:8201", r"tcp://\[fd00::7\]:8201"),
    ],
)
def test_a_peer_that_is_no_address_is_named(peers: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"setting 'decode_peers'.*{said}"):
        load(EngineSettings, decode_peers=peers)


def test_the_operators_environment_wins() -> None:
    for command in build(environ={"OMP_NUM_THREADS": "7", "PYTHONHASHSEED": "random"}):
        assert command.env["OMP_NUM_THREADS"] == "7"
        assert command.env["PYTHONHASHSEED"] == "0"


@pytest.mark.parametrize("args", [["--port", "1"], ["--model=x"], ["--served_model_name", "x"]])
def test_arguments_that_are_settings_are_refused(args: list[str]) -> None:
    with pytest.raises(ConfigError, match="is a setting of carryback itself"):
        build(engine_args=args)


def test_has_flag() -> None:
    assert has_flag(["--dtype", "float32"], "--dtype")
    assert has_flag(["--block_size=64"], "--block-size")
    assert has_flag(["--no-enforce-eager"], "--enforce-eager")
    assert not has_flag(["--dtype-of-something", "dtype", "x=--dtype"], "--dtype")


def numbers(chosen: Mapping[Role, Ports]) -> list[int]:
    return [port for each in chosen.values() for port in (each.http, each.events, each.side_channel)]


def test_ports_never_collide() -> None:
    (given,) = free_ports(1)
    config = load(ServeConfig, port=0, prefill_port=given)
    with reserved_ports(config) as ours, reserved_ports(load(ServeConfig, port=0)) as theirs:
        assert ours["prefill"].http == given
        assert len({*numbers(ours), *numbers(theirs)}) == 12
        with pytest.raises(ConfigError, match=f"port {given} is in use"), reserved_ports(config):
            pass


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        draw = random.sample
        monkeypatch.setattr(random, "sample", lambda among, k: [port, *draw(among, k)])
        assert port not in free_ports(6)
        with reserved_ports(load(ServeConfig, port=0)) as ports:
            assert port not in {
                each for one in ports.values() for each in (one.http, one.events, one.side_channel)
            }


@pytest.mark.parametrize(
    "flags",
    [
        {"port": 8100},
        {"port": 8099},  # and so 8100 for operators
        {"port": 8000, "admin_port": 8201},
        {"port": 8000, "prefill_port": 8200},
        {"port": 8000, "decode_port": 8101},
        {"port": 9001, "prefill_port": 9000},
        {"port": 0, "engine_args": ["--data-parallel-size", "3"]},
        {"port": 0, "prefill_args": "--data_parallel_size=3", "decode_args": "-dp 2"},
    ],
)
def test_no_port_is_chosen_twice(flags: dict[str, Any]) -> None:
    config = load(ServeConfig, **flags)
    chosen = choose_ports(config)
    taken = [port for each in router_listeners(config) for port in each.ports]
    for role, args in (("prefill", config.prefill_args), ("decode", config.decode_args)):
        each, ranks = chosen[role], data_parallel_size([*config.engine_args, *args])  # type: ignore[index]
        taken += [each.http, *range(each.events, each.events + ranks)]
        taken += range(each.side_channel, each.side_channel + ranks)
    assert len(taken) == len({*taken}), taken
    for role in ("prefill", "decode"):
        assert flags.get(f"{role}_port", chosen[role].http) == chosen[role].http  # type: ignore[index]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"port": 8000, "admin_port": 8000}, "--port and --admin-port both mean port 8000"),
        ({"port": 9000, "prefill_port": 9000}, "--port and --prefill-port both mean port 9000"),
        ({"port": 9000, "decode_port": 9001}, "--admin-port and --decode-port both mean port 9001"),
        ({"prefill_port": 9000, "decode_port": 9000}, "--prefill-port and --decode-port both mean port 9000"),
        ({"host": "0.0.0.0", "port": 9000, "decode_port": 9000}, "--port and --decode-port both"),
        ({"host": "localhost", "port": 9000, "decode_port": 9000}, "--port and --decode-port both"),
        ({"port": 65535}, "--admin-port: 65536 is no port"),
    ],
)
def test_ports_that_are_one(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        choose_ports(load(ServeConfig, **flags))


def test_one_port_at_two_addresses() -> None:
    config = load(ServeConfig, host="10.0.0.5", port=8000, admin_port=8000)
    assert numbers(choose_ports(config)) == [8100, 8101, 8102, 8200, 8201, 8202]


def test_the_routers_ports_are_kept_while_engines_start() -> None:
    # Its own `listen` comes a minute later, when another run has long chosen its engines' ports.
    port, other = free_ports(2)
    with reserved_ports(load(ServeConfig, port=port, admin_port=other)):
        for name, flags in {"port": {"port": port}, "admin-port": {"port": 0, "admin_port": other}}.items():
            with (
                pytest.raises(ConfigError, match=f"give another --{name}"),
                reserved_ports(load(ServeConfig, **flags)),
            ):
                pass
        with (
            pytest.raises(ConfigError, match="leave --decode-port"),
            reserved_ports(load(ServeConfig, port=0, decode_port=port)),
        ):
            pass


def test_ranks_of_an_engine_have_ports_of_their_own() -> None:
    config = load(EngineSettings, port=9000, engine_args=["--data-parallel-size=4"])
    listeners = engine_listeners(config, "decode", "10.0.0.5")
    assert [[*each.ports] for each in listeners] == [
        [9000],
        [9001, 9002, 9003, 9004],
        [9005, 9006, 9007, 9008],
    ]
    config = load(EngineSettings, port=9000, side_channel_port=9003, engine_args=["--data-parallel-size=4"])
    with pytest.raises(ConfigError, match="--events-port and --side-channel-port both mean port 9003"):
        check_listeners(engine_listeners(config, "decode", "10.0.0.5"), are_here=False)


@pytest.mark.parametrize(
    ("args", "size"),
    [
        ([], 1),
        (["--data-parallel-size", "4"], 4),
        (["--data_parallel_size=4"], 4),
        (["-dp", "2", "--dtype", "float32"], 2),
        (["--data-parallel-size"], 1),
        (["--data-parallel-size", "many"], 1),
        (["--data-parallel-size-local", "4"], 1),
    ],
)
def test_data_parallel_size(args: list[str], size: int) -> None:
    assert data_parallel_size(args) == size
