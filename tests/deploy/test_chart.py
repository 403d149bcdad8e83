"""The chart through the real helm: what it renders, what it refuses, and whether services and Kubernetes understand it."""

import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml

from baton_bootstrap.config import BootstrapConfig
from baton_io.config import resolve
from baton_router.config import RouterConfig
from baton_worker.config import DecodeConfig, PrefillConfig
from deploy.tools import ROOT, helm, kubernetes_schemas, run

CHART = ROOT / "helm/baton"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
ROLES = ("router", "bootstrap", "prefill", "decode")
CONFIGS: dict[str, type[Any]] = {
    "router": RouterConfig,
    "bootstrap": BootstrapConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
PORTS = {"router": 8000, "bootstrap": 8990, "prefill": 8100, "decode": 8200}
COMPONENT = "app.kubernetes.io/component"


def template(*options: str) -> "tuple[int, str, str]":
    """Exit status, render and complaints of `helm template`."""
    done = run(helm(), "template", "baton", str(CHART), "--namespace", "serving", *options)
    return done.returncode, done.stdout, done.stderr


@cache
def rendered(example: str) -> list[dict[str, Any]]:
    """The objects of an example's golden render."""
    text = (CHART / "golden" / f"{example}.yaml").read_text(encoding="utf-8")
    return [one for one in yaml.safe_load_all(text) if one]


def of_kind(example: str, kind: str) -> list[dict[str, Any]]:
    """Objects of one kind."""
    return [one for one in rendered(example) if one["kind"] == kind]


def pods(example: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(role, pod template) of everything that runs; a follower of a multi-node worker as well."""
    for one in rendered(example):
        spec = one.get("spec", {})
        templates = [spec["template"]] if one["kind"] in ("Deployment", "StatefulSet") else []
        if one["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            templates = [group["leaderTemplate"], group["workerTemplate"]]
        for pod in templates:
            yield pod["metadata"]["labels"][COMPONENT], pod


def serving(example: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(role, pod, container) of every process of ours."""
    for role, pod in pods(example):
        if "baton.dev/rank" not in pod["metadata"]["labels"]:
            yield role, pod, pod["spec"]["containers"][0]


# -- what is checked in is what helm makes


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_golden_render_is_fresh(example: str) -> None:
    status, text, complaint = template("--values", str(CHART / "examples" / f"{example}.yaml"))
    assert status == 0, complaint
    golden = (CHART / "golden" / f"{example}.yaml").read_text(encoding="utf-8")
    assert text == golden, "run helm/baton/regenerate.py and read the difference"


def test_the_schema_is_fresh() -> None:
    code = f"import sys; sys.path.insert(0, {str(CHART)!r}); import json, regenerate; print(json.dumps(regenerate.schema()))"
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


def test_helm_lint_has_no_complaint() -> None:
    for example in EXAMPLES:
        done = run(helm(), "lint", "--strict", str(CHART), "--values", str(CHART / "examples" / f"{example}.yaml"))
        assert done.returncode == 0, done.stdout + done.stderr


def test_kubernetes_knows_every_object_and_every_key() -> None:
    env = dict(os.environ) | {"PYTHONPATH": str(kubernetes_schemas())}
    files = [str(CHART / "golden" / f"{example}.yaml") for example in EXAMPLES]
    done = run(sys.executable, "-m", "kubernetes_validate", "--strict", "-k", "1.31", *files, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout + done.stderr
    unknown = {line.split("kind ")[1].split(" ")[0] for line in text.splitlines() if "Couldn't find schema" in line}
    # Custom resources: their schemas are not part of Kubernetes.
    assert unknown == {"PodMonitor", "ServiceMonitor", "PrometheusRule", "ScaledObject", "LeaderWorkerSet"}


@pytest.mark.parametrize(
    "wrong",
    [
        "decode.replcas=3",
        "decode.settings.chunk_tokns=3",
        "router.settings.kv_tokens=3",
        "defaults.settings.chunk_tokens=3",
        "observabilty.podMonitor.enabled=true",
        "workers.dtype=int4",
        "workers.gpus=-1",
        "bootstrap.replicas=0",
        "bootstrap.redis.url=http://redis",
        "router.redis.url=redis",
        "observability.tracing.ratio=2",
        "image.engine.tag=a b",
        "image.engine.digest=sha256:12",
        "router.service.type=ExternalName",
        'model.name=a"\n- {name: LD_PRELOAD}',
        "tests.prompt=a\nb",
        "router.ingress.host=Up Per",
        "networkPolicy.kvPorts.first=0",
    ],
)
def test_typos_and_hostile_values_are_refused(wrong: str) -> None:
    status, text, complaint = template("--set", wrong.replace(",", "\\,"))
    assert status != 0 and not text
    assert "don't meet the specifications of the schema" in complaint, complaint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("model.claim.enabled=true", "model.cache.enabled=true"), "choose one of existingClaim"),
        (("bootstrap.replicas=2",), "needs bootstrap.redis.url"),
        (("model.prepare.enabled=true", "model.prepare.image=a"), "model.prepare needs a place"),
        (("decode.autoscaling.enabled=true", "decode.autoscaling.kind=keda"), "prometheusAddress is needed"),
        (("router.ingress.enabled=true", "router.ingress.tlsSecret=a"), "ingress.host is needed"),
    ],
)
def test_values_that_do_not_go_together_are_refused_in_words(options: tuple[str, ...], words: str) -> None:
    status, _, complaint = template(*(part for option in options for part in ("--set", option)))
    assert status != 0 and words in complaint, complaint


def test_false_zero_and_an_empty_map_of_a_role_win_over_the_defaults() -> None:
    chosen = ("decode.podDisruptionBudget.enabled=false", "prefill.gpus=0", "defaults.nodeSelector.a=b")
    options = [part for one in chosen for part in ("--set", one)]
    status, text, complaint = template(*options, "--set-json", "router.nodeSelector={}")
    assert status == 0, complaint
    objects = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text) if one}
    assert ("PodDisruptionBudget", "baton-prefill") in objects
    assert ("PodDisruptionBudget", "baton-decode") not in objects
    router, prefill, decode = (
        objects[kind, f"baton-{role}"]["spec"]["template"]["spec"]
        for kind, role in (("Deployment", "router"), ("StatefulSet", "prefill"), ("StatefulSet", "decode"))
    )
    assert "nvidia.com/gpu" not in prefill["containers"][0]["resources"]["limits"]
    assert decode["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nodeSelector" not in router and decode["nodeSelector"] == {"a": "b"}


# -- what the renders say


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_process_understands_its_environment(example: str) -> None:
    seen = set()
    for role, _, container in serving(example):
        config = resolve(CONFIGS[role], role, [], environment(container))
        assert container["args"] == [f"baton_{role}"] and config.port == PORTS[role]
        assert container["ports"][0] == {"name": "http", "containerPort": PORTS[role]}
        if role in ("prefill", "decode"):
            assert config.advertise_host == "10.0.0.9" and config.registry == ("http://baton-bootstrap:8990",)
        seen.add(role)
    assert seen == set(ROLES)


def environment(container: dict[str, Any], node: int = 0) -> dict[str, str]:
    """The variables of a container as Kubernetes and the operator of its group would fill them in."""
    filled = {"BATON_HOST": "0.0.0.0", "BATON_NODE_RANK": str(node)}
    given = {one["name"]: str(one.get("value", "10.0.0.9")) for one in container["env"]}
    return {
        name: value.replace("$(LWS_LEADER_ADDRESS)", "baton-prefill-0.baton") for name, value in given.items()
    } | filled


def test_every_node_of_a_worker_runs_the_same_command_and_knows_which_it_is() -> None:
    ((leader, follower),) = [
        [group["leaderTemplate"]["spec"]["containers"][0], group["workerTemplate"]["spec"]["containers"][0]]
        for one in of_kind("multi-node", "LeaderWorkerSet")
        for group in [one["spec"]["leaderWorkerTemplate"]]
    ]
    assert leader["args"] == follower["args"] == ["baton_prefill"] and leader["env"] == follower["env"]
    configs = [
        resolve(PrefillConfig, "prefill", [], environment(container, node))
        for node, container in enumerate((leader, follower))
    ]
    assert [config.local_ranks for config in configs] == [range(8), range(8, 16)]
    assert configs[1].init_address == ("baton-prefill-0.baton", 29500)
    ranks = [one for one in leader["env"] if one["name"] == "BATON_NODE_RANK"]
    field = "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"
    assert ranks == [{"name": "BATON_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": field}}}]
    assert "readinessProbe" not in follower and follower["livenessProbe"] == leader["livenessProbe"]


def test_the_router_knows_every_worker_that_may_ever_run() -> None:
    for example, prefill, decode in (("cpu", 1, 1), ("gpu", 2, 4), ("everything", 8, 8), ("multi-node", 2, 2)):
        ((_, _, router),) = [one for one in serving(example) if one[0] == "router"]
        env = {one["name"]: one["value"] for one in router["env"]}
        for role, count in (("prefill", prefill), ("decode", decode)):
            expected = [f"http://baton-{role}-{index}.baton-{role}:{PORTS[role]}" for index in range(count)]
            assert env[f"BATON_ROUTER_{role.upper()}"].split(",") == expected


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_three_probes_mean_three_things(example: str) -> None:
    for role, _, container in serving(example):
        startup, ready, alive = (container[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800, role
        assert (startup["httpGet"]["path"], ready["httpGet"]["path"], alive["httpGet"]["path"]) == (
            *("/health", "/ready", "/health"),
        )
        # A worker that stalls ends itself after 15 s; one missed probe must never kill it before.
        assert alive["failureThreshold"] > 1 and alive["periodSeconds"] * alive["failureThreshold"] > 15
        assert "initialDelaySeconds" not in startup | alive | ready


@pytest.mark.parametrize("example", EXAMPLES)
def test_kubernetes_waits_as_long_as_a_drain_takes(example: str) -> None:
    for role, pod, container in serving(example):
        env = {one["name"]: one.get("value", "") for one in container["env"]}
        drain = int(env.get("BATON_DRAIN_MS", "5000")) / 1000
        hook = container["lifecycle"]["preStop"]["exec"]["command"]
        pause = float(hook[-1]) if role in ("prefill", "decode") else float(hook[-1].split("(")[1].rstrip(")"))
        assert any("/drain" in word for word in hook) == (role in ("prefill", "decode"))
        assert pod["spec"]["terminationGracePeriodSeconds"] >= pause + drain + 10, role


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_pod_is_locked_down(example: str) -> None:
    everything = [*pods(example), *(("test", one) for one in of_kind(example, "Pod"))]
    assert {role for role, _ in everything} == {*ROLES, "test"}
    for role, pod in everything:
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False and spec["automountServiceAccountToken"] is False, role
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] == 10001
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert not [volume for volume in spec.get("volumes", []) if "hostPath" in volume]
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert ":" in container["image"].rpartition("/")[2] or "@sha256:" in container["image"]


def test_selectors_hold_nothing_that_an_upgrade_changes() -> None:
    for example in EXAMPLES:
        for one in rendered(example):
            if one["kind"] in ("Deployment", "StatefulSet"):
                assert set(one["spec"]["selector"]["matchLabels"]) == {
                    *("app.kubernetes.io/name", "app.kubernetes.io/instance", COMPONENT)
                }


def test_workers_have_gpus_shm_and_a_model_and_replicas_are_spread() -> None:
    for role, pod, container in serving("gpu"):
        spread = pod["spec"]["topologySpreadConstraints"][0]
        assert spread["labelSelector"]["matchLabels"][COMPONENT] == role
        if role not in ("prefill", "decode"):
            assert "nvidia.com/gpu" not in container["resources"]["limits"] and "nodeSelector" not in pod["spec"]
            continue
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
        assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "models"}
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert mounts["shm"]["mountPath"] == "/dev/shm" and mounts["models"]["readOnly"] is True


def test_keys_come_from_existing_secrets_and_reach_the_router_alone() -> None:
    mounted = {role for role, pod, _ in serving("everything") if "api-keys" in str(pod["spec"]["volumes"])}
    assert mounted == {"router"}
    ((_, _, router),) = [one for one in serving("everything") if one[0] == "router"]
    env = {one["name"]: one.get("value") for one in router["env"]}
    assert env["BATON_ROUTER_KEYS_FILE"] == "/run/baton-keys/keys.toml"
    (test,) = of_kind("everything", "Pod")
    keys = [one for one in test["spec"]["containers"][0]["env"] if one["name"] == "BATON_SMOKE_KEY"]
    assert keys[0]["valueFrom"] == {"secretKeyRef": {"name": "test-key", "key": "api-key"}}
    assert not of_kind("everything", "Secret"), "the chart makes no secret: values end up in the release"


def test_router_and_registry_hold_the_password_of_their_redis_and_workers_do_not() -> None:
    found = {}
    for role, pod, container in serving("everything"):
        env = {one["name"]: one.get("value") for one in container["env"]}
        if "redis-password" in str(pod["spec"]["volumes"]):
            prefix = f"BATON_{role.upper()}_REDIS"
            found[role] = (env[prefix], env[f"{prefix}_PASSWORD_FILE"])
    password = "/run/baton-redis/password"
    assert found == {
        "router": ("redis://redis.data:6379/1", password),
        "bootstrap": ("redis://redis.data:6379/0", password),
    }


def test_each_role_has_a_budget_and_may_scale() -> None:
    budgets = {one["metadata"]["name"] for one in of_kind("everything", "PodDisruptionBudget")}
    assert budgets == {"baton-router", "baton-prefill", "baton-decode"}
    scaled = {one["spec"]["scaleTargetRef"]["name"]: one for one in of_kind("everything", "HorizontalPodAutoscaler")}
    assert set(scaled) == {"baton-router", "baton-decode"}
    (keda,) = of_kind("everything", "ScaledObject")
    assert keda["spec"]["triggers"][0]["metadata"]["query"].endswith("or vector(0)")
    assert 'namespace="serving"' in keda["spec"]["triggers"][0]["metadata"]["query"]
    for one in rendered("everything"):
        if one["metadata"]["name"] in budgets and one["kind"] in ("Deployment", "StatefulSet"):
            assert "replicas" not in one["spec"], "an upgrade would undo what the autoscaler did"


def test_metrics_are_scraped_from_every_role_and_rules_and_dashboards_come_along() -> None:
    services = {one["metadata"]["labels"][COMPONENT] for one in of_kind("everything", "ServiceMonitor")}
    workers = {one["metadata"]["labels"][COMPONENT] for one in of_kind("everything", "PodMonitor")}
    assert (services, workers) == ({"router", "bootstrap"}, {"prefill", "decode"})
    (rule,) = of_kind("everything", "PrometheusRule")
    ours = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    assert len(rule["spec"]["groups"][1]["rules"]) == len(ours["groups"][1]["rules"])
    links = {one["annotations"]["runbook_url"].partition("#")[0] for one in rule["spec"]["groups"][1]["rules"]}
    assert links == {"https://runbooks.example/baton"}
    maps = of_kind("everything", "ConfigMap")
    assert {name for one in maps for name in one["data"]} == {
        path.name for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")
    }
    assert all(json.loads(text)["panels"] for one in maps for text in one["data"].values())


def test_the_readme_explains_every_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    readme = (CHART / "README.md").read_text()
    names = [f"{block}.{key}" for block, part in values.items() if isinstance(part, dict) for key in part]
    names += [block for block, part in values.items() if not isinstance(part, dict)]
    names = [name for name in names if name.split(".")[0] not in ("router", "bootstrap", "prefill", "decode")]
    names += ["router.service", "router.ingress", "multinode"]
    assert [name for name in names if f"`{name}`" not in readme] == []


# -- who may talk to whom


def allowed(example: str) -> set[tuple[str, str, int, int]]:
    """(from, to, first port, last port) that both ends allow, between pods of ours."""
    policies = {one["metadata"]["labels"][COMPONENT]: one["spec"] for one in of_kind(example, "NetworkPolicy")}

    def rules(role: str, way: str, peers: str) -> set[tuple[str, int, int]]:
        found = set()
        for rule in policies[role][way] or []:
            for peer in rule.get(peers) or []:
                other = peer.get("podSelector", {}).get("matchLabels", {}).get(COMPONENT)
                if other is not None:
                    found |= {(other, port["port"], port.get("endPort", port["port"])) for port in rule["ports"]}
        return found

    roles = [role for role in policies if role != "network"]
    out = {(role, *rest) for role in roles for rest in rules(role, "egress", "to")}
    into = {(other, role, *ports) for role in roles for other, *ports in rules(role, "ingress", "from")}
    return out & into


ARCHITECTURE = {
    ("router", "prefill", 8100, 8100),
    ("router", "decode", 8200, 8200),
    ("prefill", "bootstrap", 8990, 8990),  # registers
    ("decode", "bootstrap", 8990, 8990),  # looks up
    ("bootstrap", "prefill", 8100, 8100),  # is a superseded worker still there?
    ("decode", "prefill", 49152, 65535),  # control links
    ("prefill", "decode", 32768, 60999),  # KV pages
    ("test", "router", 8000, 8000),
    ("test", "prefill", 8100, 8100),
}


def test_pods_may_talk_exactly_as_the_architecture_says() -> None:
    for example in ("cpu", "gpu", "everything"):
        assert allowed(example) == ARCHITECTURE
    assert allowed("multi-node") == ARCHITECTURE | {("prefill", "prefill", 1024, 65535)}


@pytest.mark.parametrize("example", EXAMPLES)
def test_nothing_else_comes_in_or_goes_out(example: str) -> None:
    policies = {one["metadata"]["labels"][COMPONENT]: one["spec"] for one in of_kind(example, "NetworkPolicy")}
    assert set(policies) == {*ROLES, "test", "network"}
    deny = policies["network"]
    assert set(deny) == {"podSelector", "policyTypes"} and deny["policyTypes"] == ["Ingress", "Egress"]
    assert COMPONENT not in deny["podSelector"]["matchLabels"], "it must select every pod of the installation"
    for role in (*ROLES, "test"):
        spec = policies[role]
        assert spec["podSelector"]["matchLabels"][COMPONENT] == role
        for rule in spec["egress"]:
            to_others = any("namespaceSelector" in peer for peer in rule["to"])
            ports = {port["port"] for port in rule["ports"]}
            asked = {53, *{"bootstrap": (6379,), "router": (4318, 6379), "test": ()}.get(role, (4318,))}
            assert not to_others or (ports <= asked and len(rule["to"]) == 1), "only names, traces, a Redis of its own"
        for rule in spec["ingress"] or []:
            open_to_all = "from" not in rule
            assert not open_to_all or (role == "router" and rule["ports"] == [{"protocol": "TCP", "port": 8000}])
            if any("namespaceSelector" in peer for peer in rule.get("from", [])):
                assert rule["ports"] == [{"protocol": "TCP", "port": PORTS[role]}]
