"""The sources of workers that a configuration names."""

from pathlib import Path

from baton_router.config import RouterConfig, parse_address
from baton_router.discovery.docker import DockerContainers
from baton_router.discovery.kubernetes import Cluster, EndpointSlices
from baton_router.discovery.registry import RegistryInstances
from baton_router.discovery.source import Source
from baton_router.discovery.workers_file import WorkersFile
from baton_router.upstream import Upstream


def configured_sources(config: RouterConfig, upstream: Upstream) -> list[Source]:
    """All but the fixed lists, which nobody needs to follow."""
    sources: list[Source] = []
    if config.workers_file is not None:
        sources.append(WorkersFile(Path(config.workers_file), config.discovery_interval_ms))
    if config.registry is not None and config.registry_discovery:
        sources.append(RegistryInstances(parse_address(config.registry), upstream, config.connect_timeout_ms))
    if config.kubernetes_api is not None:
        sources.append(EndpointSlices(_cluster(config, config.kubernetes_api)))
    if config.docker_socket is not None:
        sources.append(DockerContainers(config.docker_socket))
    return sources


def _cluster(config: RouterConfig, api: str) -> Cluster:
    folder = None if config.kubernetes_credentials is None else Path(config.kubernetes_credentials)
    return Cluster(
        api=api,
        namespace=config.kubernetes_namespace,
        selector=config.kubernetes_selector,
        role_label=config.kubernetes_role_label,
        token_file=None if folder is None else folder / "token",
        ca_file=None if folder is None else folder / "ca.crt",
        resync_ms=config.kubernetes_resync_ms,
    )
