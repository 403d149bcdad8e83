"""Writes what is derived: values.schema.json from values.yaml and the services' options, golden/ from examples/.

`.venv/bin/python helm/baton/regenerate.py` writes both; tests/deploy/test_chart.py fails where they are stale. Needs the
helm binary: `helm` on the PATH or .baton/tools/helm.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import yaml

from baton_bootstrap.config import BootstrapConfig
from baton_router.config import RouterConfig
from baton_worker.config import DecodeConfig, PrefillConfig

CHART = Path(__file__).resolve().parent
ROOT = CHART.parents[1]
CONFIGS = {"router": RouterConfig, "bootstrap": BootstrapConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
OWN = {
    *("port", "bootstrap_port", "token_file", "registry", "prefill", "decode", "advertise_host", "shm_dir"),
    *("keys_file", "worker_key", "workers_file", "docker_socket", "kubernetes_api", "kubernetes_namespace"),
    *("kubernetes_selector", "kubernetes_role_label", "kubernetes_credentials"),
    *("nnodes", "node_rank", "dist_init_addr"),
    *("otlp_endpoint", "trace_ratio", "registry_token_file", "redis", "redis_password_file"),
    *("model", "served_model_name", "dtype", "device", "transfer", "kv_tokens", "log_format", "drain_ms", "start_ms"),
}
"""Options that the chart sets from other values, or that make no sense in a pod."""

TEXT = {"type": "string", "pattern": '^[^\\x00-\\x1f\\x7f"]*$'}  # one line, and nothing that ends a quoted text
REDIS = {"type": "string", "pattern": '^((redis|rediss)://[^\\s"]+)?$'}
QUANTITY = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?([EPTGMk]i?|m)?$"}
NAME = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", "maxLength": 253}
FREE = {"type": "object"}
COUNT = {"type": "integer", "minimum": 0}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
POSITIVE = {"type": "integer", "minimum": 1}
SECRET_KEY = {"type": "string", "pattern": "^[A-Za-z0-9._-]+$"}

BY_KEY: dict[str, dict[str, Any]] = {
    "resources": {
        "type": "object",
        "additionalProperties": False,
        "properties": {"requests": FREE, "limits": FREE, "claims": {"type": "array"}},
    },
    **{
        key: {"type": "object", "additionalProperties": TEXT} for key in ("nodeSelector", "podAnnotations", "podLabels")
    },
    **{key: {"type": "object", "additionalProperties": TEXT} for key in ("annotations", "labels")},
    **{
        key: {"type": "array", "items": FREE}
        for key in ("tolerations", "extraEnv", "clients", "monitoring", "dns", "to")
    },
    "command": {"type": "array", "items": TEXT},
    **dict.fromkeys(
        (
            "existingClaim",
            "storageClassName",
            "tlsSecret",
            "host",
            "className",
            "name",
            "envFromSecret",
            "existingSecret",
        ),
        NAME,
    ),
    **dict.fromkeys(("size", "sizeLimit", "shmSize"), QUANTITY),
    **dict.fromkeys(("port", "first", "last"), PORT),
    **dict.fromkeys(("periodSeconds", "failureThreshold", "timeoutSeconds", "maxReplicas", "maxSkew"), POSITIVE),
    **{key: {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"} for key in ("interval",)},
    "affinity": FREE,
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "repository": {"type": "string", "pattern": "^[a-z0-9][a-z0-9._/:-]*$"},
    "tag": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{0,128}$"},
    "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "pullSecrets": {"type": "array", "items": NAME},
    "accessModes": {"type": "array", "items": {"enum": ["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce"]}},
    "whenUnsatisfiable": {"enum": ["ScheduleAnyway", "DoNotSchedule"]},
    "kind": {"enum": ["hpa", "keda"]},
    "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "dtype": {"enum": ["bfloat16", "float32"]},
    "transfer": {"enum": ["tcp", "auto"]},
    "logFormat": {"enum": ["json", "console"]},
    "maxUnavailable": {"type": ["integer", "string"], "pattern": "^[0-9]+%$", "minimum": 0},
    "target": {"type": "number", "exclusiveMinimum": 0},
    "kvTokens": {"type": "integer", "minimum": 16},
    "metric": {"type": "string", "pattern": "^[a-z0-9_:]*$"},
    "query": {"type": "string"},  # PromQL has quotes
    "prompt": TEXT,
}
BY_PATH: dict[str, dict[str, Any]] = {
    "model.name": TEXT,
    "multinode.size": {"type": "integer", "minimum": 2},
    "apiKeys.file": {"type": "string", "pattern": "^[A-Za-z0-9._-]+$"},
    "tests.apiKey": {
        "type": "object",
        "additionalProperties": False,
        "properties": {"existingSecret": NAME, "key": {"type": "string", "pattern": "^[A-Za-z0-9._-]+$"}},
    },
    "router.replicas": POSITIVE,
    "bootstrap.replicas": POSITIVE,
    "router.redis.key": SECRET_KEY,
    "router.redis.url": REDIS,
    "bootstrap.redis.key": SECRET_KEY,
    "bootstrap.redis.url": REDIS,
    "registryToken.key": SECRET_KEY,
    "observability.tracing.endpoint": {"type": "string", "pattern": '^(https?://[^\\s"]+)?$'},
    "observability.tracing.ratio": {"type": "number", "minimum": 0, "maximum": 1},
}


def schema() -> dict[str, Any]:
    """A schema that knows every key of values.yaml and every option of the services, and refuses all others."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    properties = {key: _of(key, key, value) for key, value in values.items()}
    common = values["defaults"]
    for role in ("workers", *CONFIGS):
        shape = common | ({} if role in ("router", "bootstrap") else values["workers"]) | values[role]
        properties[role] = _of(role, role, shape)
    options = {role: _options(config) for role, config in CONFIGS.items()}
    shared = {"defaults": tuple(CONFIGS), "workers": ("prefill", "decode"), **{role: (role,) for role in CONFIGS}}
    for block, roles in shared.items():
        known = [key for key in options[roles[0]] if all(key in options[role] for role in roles)]
        properties[block]["properties"]["settings"] = {
            "type": "object",
            "additionalProperties": False,
            "properties": {key: options[roles[0]][key] for key in known},
        }
    properties["global"] = {"type": "object"}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the Baton chart; written by regenerate.py",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _of(path: str, key: str, value: object) -> dict[str, Any]:
    known = BY_PATH.get(path) or BY_PATH.get(".".join(path.split(".")[-2:])) or BY_KEY.get(key)
    if known is not None and not (isinstance(value, dict) and known.get("type") != "object"):
        return known
    match value:
        case dict():
            inner = {name: _of(f"{path}.{name}", name, part) for name, part in value.items()}
            return {"type": "object", "additionalProperties": False, "properties": inner}
        case bool():
            return {"type": "boolean"}
        case int():
            return COUNT
        case list():
            return {"type": "array"}
        case _:
            return TEXT


def _options(config: type[Any]) -> dict[str, dict[str, Any]]:
    """The options of a service that a value may set, by key."""
    found: dict[str, dict[str, Any]] = {}
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            found |= _options(typing.cast(type[Any], hint))
        elif field.name not in OWN:
            choices = (
                typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else field.metadata.get("choices")
            )
            kind = {int: "integer", float: "number", bool: "boolean"}.get(hint, "string")
            found[field.name] = (
                {"enum": list(choices)} if choices else {"type": kind} | (TEXT if kind == "string" else {})
            )
    return found


def helm() -> str:
    """The helm binary. SystemExit without one."""
    for candidate in (str(ROOT / ".baton/tools/helm"), shutil.which("helm")):
        if candidate and Path(candidate).exists():
            return candidate
    sys.exit("helm is needed: put it on the PATH, or run tests/deploy once, which fetches it into .baton/tools")


def render(example: Path, binary: str) -> str:
    """What `helm template` makes of an example."""
    argv = [binary, "template", "baton", str(CHART), "--namespace", "serving", "--values", str(example)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{example.name}: {done.stderr}")
    return done.stdout


def main() -> None:
    """Write the schema, then the renders, which it validates."""
    (CHART / "values.schema.json").write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")
    for example in sorted((CHART / "examples").glob("*.yaml")):
        (CHART / "golden" / example.name).write_text(render(example, helm()), encoding="utf-8")


if __name__ == "__main__":
    main()
