"""Workers from a Docker engine: running containers with the labels `baton.role` and, if it is not 8000, `baton.port`.

Speaks the Engine API on its socket; labels are all it reads, so any API version since 1.24 does.
"""

import json
from typing import Any

import aiohttp
import msgspec

from baton_router.discovery.source import ROLES, Name, Named, SourceFault

API = "http://docker/v1.41"
ROLE_LABEL = "baton.role"
PORT_LABEL = "baton.port"
NETWORK_LABEL = "baton.network"
DEFAULT_PORT = "8000"
TOTAL_S = 10.0


class DockerContainers:
    """The containers of one engine."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self.name = f"docker {socket}"

    async def follow(self, name: Name) -> None:
        """Ask once. See Source."""
        filters = json.dumps({"label": [ROLE_LABEL], "status": ["running"]})
        timeout = aiohttp.ClientTimeout(total=TOTAL_S)
        connector = aiohttp.UnixConnector(path=self._socket)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.get(f"{API}/containers/json", params={"filters": filters}) as response,
        ):
            if response.status != 200:
                raise SourceFault(f"listing containers: the engine answers {response.status}")
            body = await response.read()
        try:
            containers = msgspec.json.decode(body, type=list[dict[str, Any]])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SourceFault(f"the engine's answer makes no sense ({error})") from error
        name(self.name, [named for container in containers if (named := _named(container)) is not None])


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
