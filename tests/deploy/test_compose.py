"""What docker-compose.yml and its CPU overlay promise, asked of the real `docker-compose config` (no engine needed)."""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton_bootstrap.config import BootstrapConfig
from baton_io.config import resolve
from baton_router.config import RouterConfig
from baton_worker.config import DecodeConfig, PrefillConfig
from deploy.tools import compose, run

ROOT = Path(__file__).resolve().parents[2]
BASE, CPU, KEYS = "docker-compose.yml", "deploy/compose/cpu.yaml", "deploy/compose/keys.yaml"
REDIS = "deploy/compose/redis.yaml"
OURS = ("router", "bootstrap", "prefill", "decode", "decode-2")
WORKERS = ("prefill", "decode", "decode-2")
PORTS = {"router": 8000, "bootstrap": 8990, "prefill": 8100, "decode": 8200, "decode-2": 8200}
CONFIGS: dict[str, type[Any]] = {
    "router": RouterConfig,
    "bootstrap": BootstrapConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
SECONDS = {"h": 3600, "m": 60, "s": 1}


@cache
def stack(*overlays: str) -> dict[str, Any]:
    """The merged configuration with every profile on, as Compose itself reads it."""
    files = [part for name in (BASE, *overlays) for part in ("-f", name)]
    # Only defaults: neither a .env file nor variables of this machine.
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    done = run(compose(), "--env-file", "/dev/null", *files, "--profile", "*", "config", env=env)
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = yaml.safe_load(done.stdout)
    return parsed


def seconds(duration: str) -> int:
    """Compose's way to write a duration, in seconds."""
    return sum(int(number) * SECONDS[unit] for number, unit in re.findall(r"(\d+)([hms])", duration))


def test_without_profiles_four_services_run() -> None:
    done = run(compose(), "--env-file", "/dev/null", "-f", BASE, "config", "--services")
    assert sorted(done.stdout.split()) == ["bootstrap", "decode", "prefill", "router"]
    assert {name for name, service in stack()["services"].items() if service.get("profiles")} == {
        *("decode-2", "prometheus", "grafana")
    }


@pytest.mark.parametrize("overlays", [(), (CPU,)], ids=["gpu", "cpu"])
def test_only_the_router_is_published_and_the_kv_network_is_internal(overlays: tuple[str, ...]) -> None:
    config = stack(*overlays)
    published = {name for name, service in config["services"].items() if service.get("ports")}
    assert published == {"router", "prometheus", "grafana"}
    for name in published:
        assert [port["host_ip"] for port in config["services"][name]["ports"]] == ["127.0.0.1"]
    assert config["networks"]["kv"]["internal"] is True
    for name in OURS[1:]:
        assert set(config["services"][name]["networks"]) == {"kv"}
    assert set(config["services"]["router"]["networks"]) == {"edge", "kv"}
    assert "kv" not in config["services"]["grafana"]["networks"]


@pytest.mark.parametrize("overlays", [(), (CPU,)], ids=["gpu", "cpu"])
def test_every_process_is_locked_down_and_its_logs_are_bounded(overlays: tuple[str, ...]) -> None:
    for name in OURS:
        service = stack(*overlays)["services"][name]
        assert service["user"] == "10001:10001" and service["read_only"] is True and service["init"] is True, name
        assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"], name
        assert service["tmpfs"] and service["restart"] == "unless-stopped", name
        assert service["logging"]["options"]["max-size"], name


def test_gpus_are_reserved_by_id_and_no_two_workers_share_one() -> None:
    ids = []
    for name in WORKERS:
        (device,) = stack()["services"][name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"] and "count" not in device
        ids += device["device_ids"]
        assert stack()["services"][name]["environment"]["BATON_DEVICE"] == "cuda"
        assert stack()["services"][name]["ulimits"]["memlock"] == -1
        assert int(stack()["services"][name]["shm_size"]) >= 8 * 1024**3
    assert len(set(ids)) == len(WORKERS)


def test_the_cpu_overlay_takes_every_gpu_part_away() -> None:
    for name in WORKERS:
        service = stack(CPU)["services"][name]
        assert "deploy" not in service and "ulimits" not in service
        assert service["environment"]["BATON_DEVICE"] == "cpu"
        assert service["image"].endswith("-cpu") and service["build"]["args"]["TORCH"].endswith("+cpu")
        gpu = stack()["services"][name]
        assert {key: value for key, value in service["environment"].items() if key != "BATON_DEVICE"} == {
            key: value for key, value in gpu["environment"].items() if key != "BATON_DEVICE"
        }


def test_docker_waits_as_long_as_a_drain_takes() -> None:
    for name in ("router", *WORKERS):
        service = stack()["services"][name]
        drain = int(service["environment"]["BATON_DRAIN_MS"]) / 1000
        # 5 s for the last bytes, 5 s for the scheduler.
        assert seconds(service["stop_grace_period"]) >= drain + 10, name


def test_health_means_ready_and_loading_has_its_time() -> None:
    for name in OURS:
        service = stack()["services"][name]
        assert service["healthcheck"]["test"][-1] == f"http://127.0.0.1:{PORTS[name]}/ready"
        assert "start_period" in service["healthcheck"]
    for name in WORKERS:
        service = stack()["services"][name]
        assert seconds(service["healthcheck"]["start_period"]) > int(service["environment"]["BATON_START_MS"]) / 1000
        assert service["depends_on"]["bootstrap"]["condition"] == "service_healthy"
    assert set(stack()["services"]["router"]["depends_on"]) == {"prefill", "decode"}


def test_workers_meet_at_one_socket_folder_and_one_model_volume() -> None:
    for name in WORKERS:
        service = stack()["services"][name]
        mounts = {mount["target"]: mount for mount in service["volumes"]}
        assert mounts[service["environment"]["BATON_SHM_DIR"]]["source"] == "shm-sockets"
        assert mounts["/models"]["source"] == "models" and mounts["/models"]["read_only"] is True
        assert service["environment"]["BATON_ADVERTISE_HOST"] == name


def test_images_are_pinned_and_secrets_are_files() -> None:
    config = stack()
    for name, service in config["services"].items():
        tag = service["image"].rpartition(":")[2]
        assert re.search(r"\d+\.\d+", tag), f"{name}: {service['image']}"
        assert not [key for key in service.get("environment", {}) if re.search("(PASSWORD|TOKEN|KEY)$", key)]
    assert config["services"]["grafana"]["secrets"][0]["source"] == "grafana_admin_password"
    assert config["secrets"]["grafana_admin_password"]["file"].endswith(".baton/grafana_admin_password")


def test_keys_reach_the_router_as_a_file_and_nobody_else() -> None:
    services = stack(KEYS)["services"]
    environ = {key: str(value) for key, value in services["router"]["environment"].items()}
    config = resolve(RouterConfig, "router", [], environ)
    assert config.keys_file == "/run/secrets/router_keys"
    assert [one["source"] for one in services["router"]["secrets"]] == ["router_keys"]
    assert not [name for name in OURS[1:] if "secrets" in services[name]]


def test_registry_replicas_share_a_redis_and_only_writers_hold_the_token() -> None:
    config = stack(REDIS)
    services = config["services"]
    environ = {key: str(value) for key, value in services["bootstrap"]["environment"].items()}
    registry = resolve(BootstrapConfig, "bootstrap", [], environ)
    assert (registry.redis, registry.token_file) == ("redis://redis:6379/0", "/run/secrets/registry_token")
    environ = {key: str(value) for key, value in services["prefill"]["environment"].items()}
    assert resolve(PrefillConfig, "prefill", [], environ).registry_token_file == registry.token_file
    assert {name for name, one in services.items() if "secrets" in one} == {"bootstrap", "prefill", "grafana"}
    redis = services["redis"]
    assert set(redis["networks"]) == {"kv"} and not redis.get("ports"), "it has no password: nobody else may reach it"
    assert "noeviction" in redis["command"] and redis["volumes"][0]["source"] == "redis-data"
    assert services["bootstrap"]["depends_on"]["redis"]["condition"] == "service_healthy"
    assert "container_name" not in services["bootstrap"] and not services["bootstrap"].get("ports"), "it can be scaled"


def test_the_example_names_every_variable_and_no_other() -> None:
    used: dict[str, str] = {}
    for name in (CPU, KEYS, REDIS, BASE):  # the base last: its defaults are the ones shown
        used |= dict(re.findall(r"\$\{([A-Z0-9_]+):-([^}]*)\}", (ROOT / name).read_text()))
    shown = dict(re.findall(r"^#?([A-Z0-9_]+)=(.*)$", (ROOT / ".env.example").read_text(), flags=re.M))
    assert shown == used


@pytest.mark.parametrize("name", OURS)
def test_each_process_understands_its_environment(name: str) -> None:
    service = stack(CPU)["services"][name]
    role = name.partition("-")[0]
    assert service["command"] == [f"baton_{role}"]
    environ = {key: str(value) for key, value in service["environment"].items()} | {"BATON_HOST": "0.0.0.0"}
    config = resolve(CONFIGS[role], role, [], environ)
    assert config.port == PORTS[name]
    if role == "router":
        assert config.prefill == ("http://prefill:8100",) and config.decode == ("http://decode:8200",)
