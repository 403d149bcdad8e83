"""Workers from a Docker engine: running containers with the labels `baton.role` and, if it is not 8000, `baton.port`.

One question of the docker SDK's each time, on a thread, since the SDK waits for its answers; labels are all it reads.
"""

import asyncio
from contextlib import closing
from typing import Any

from baton_router.discovery.source import ROLES, Name, Named, SourceFault

ROLE_LABEL = "baton.role"
PORT_LABEL = "baton.port"
NETWORK_LABEL = "baton.network"
DEFAULT_PORT = "8000"
CALL_S = 10


class DockerContainers:
    """The containers of one engine. Raises ValueError where the SDK is not installed."""

    def __init__(self, socket: str) -> None:
        try:
            import docker
        except ImportError as error:
            raise ValueError(f"docker_socket needs the docker SDK (pip install 'baton[router]'): {error}") from error
        self._docker = docker
        self._socket = socket
        self.name = f"docker {socket}"

    async def follow(self, name: Name) -> None:
        """Ask once. See Source."""
        containers = await asyncio.to_thread(self._list)
        name(self.name, [named for container in containers if (named := _named(container)) is not None])

    def _list(self) -> list[dict[str, Any]]:
        """All that carry the role label, with one GET: the SDK's objects would cost one more for each container."""
        errors = self._docker.errors
        try:
            # Closed each time: an engine that was restarted is met anew, at the version that it speaks now.
            with closing(self._docker.APIClient(f"unix://{self._socket}", version="auto", timeout=CALL_S)) as engine:
                listed = engine.containers(filters={"label": [ROLE_LABEL], "status": ["running"]})
        except (errors.DockerException, OSError, ValueError) as error:
            raise SourceFault(f"listing containers: {error}") from error
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise SourceFault("the engine's answer is no list of containers")
        return listed


def _named(container: dict[str, Any]) -> Named | None:
    labels = container.get("Labels") or {}
    role = ROLES.get(labels.get(ROLE_LABEL, ""))
    networks = (container.get("NetworkSettings") or {}).get("Networks") or {}
    wanted = labels.get(NETWORK_LABEL)
    addresses = [
        network.get("IPAddress")
        for network_name, network in sorted(networks.items())
        if network.get("IPAddress") and wanted in (None, network_name)
    ]
    port = labels.get(PORT_LABEL, DEFAULT_PORT)
    if role is None or not addresses or not port.isdigit():
        return None
    return role, f"http://{addresses[0]}:{port}"
