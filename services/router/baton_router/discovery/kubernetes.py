"""Workers from Kubernetes: the EndpointSlices of Services that carry a role label, listed, then watched.

    LIST -- resourceVersion --> WATCH -- events --> the whole set is named anew
      ^                            |
      +-- resync_ms, 410 Gone, ----+     so that a watch that silently went stale is put right
          a broken connection

An endpoint is named as long as it is not terminating, ready or not: the router's own probes say what it can take.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from baton_core.limits import Millis
from baton_router.config import bracketed
from baton_router.discovery.source import ROLES, Name, Named, SourceFault

CONNECT_S = 5.0
SILENT_S = 10.0
"""A watch may outlive its `timeoutSeconds` by this much before it counts as broken."""
EVENT_BYTES_MAX = 16 << 20
GONE = 410
PORT_NAME = "http"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where the API is and how to speak to it."""

    api: str
    namespace: str
    selector: str  # a label selector for EndpointSlices, e.g. app.kubernetes.io/name=baton
    role_label: str  # the label whose value is prefill or decode
    token_file: Path | None
    ca_file: Path | None
    resync_ms: Millis


class EndpointSlices:
    """The endpoints of one namespace."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._slices: dict[str, list[Named]] = {}
        self._url = f"{cluster.api.rstrip('/')}/apis/discovery.k8s.io/v1/namespaces/{cluster.namespace}/endpointslices"
        self.name = f"kubernetes {cluster.namespace}"

    async def follow(self, name: Name) -> None:
        """List once and watch until it is time to list again. See Source."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=EVENT_BYTES_MAX) as session:
            version = await self._list(session)
            self._tell(name)
            await self._watch(session, version, name)

    async def _list(self, session: aiohttp.ClientSession) -> str:
        async with self._get(session, {}, CONNECT_S + SILENT_S) as response:
            if response.status != 200:
                raise SourceFault(f"listing EndpointSlices: the API answers {response.status}")
            listed = _decoded(await response.read())
        self._slices = {}
        for item in listed.get("items") or ():
            self._put(item)
        return str((listed.get("metadata") or {}).get("resourceVersion", ""))

    async def _watch(self, session: aiohttp.ClientSession, version: str, name: Name) -> None:
        resync_s = max(1, self._cluster.resync_ms // 1000)
        wanted = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(resync_s),
        }
        async with self._get(session, wanted, resync_s + SILENT_S) as response:
            if response.status == GONE:
                return
            if response.status != 200:
                raise SourceFault(f"watching EndpointSlices: the API answers {response.status}")
            async for line in response.content:
                if not self._take(_decoded(line)):
                    return
                self._tell(name)

    def _take(self, event: dict[str, Any]) -> bool:
        """One event; whether the watch is still good."""
        item = event.get("object") or {}
        match event.get("type"):
            case "ADDED" | "MODIFIED":
                self._put(item)
            case "DELETED":
                self._slices.pop(_name_of(item), None)
            case "BOOKMARK":
                pass
            case _:
                return False  # ERROR, mostly 410: what was missed is in the next list
        return True

    def _put(self, item: dict[str, Any]) -> None:
        role = ROLES.get(((item.get("metadata") or {}).get("labels") or {}).get(self._cluster.role_label, ""))
        if role is None:
            self._slices.pop(_name_of(item), None)  # its label changed: it serves neither role now
        else:
            self._slices[_name_of(item)] = [(role, url) for url in _urls(item)]

    def _tell(self, name: Name) -> None:
        name(self.name, [named for several in self._slices.values() for named in several])

    def _get(self, session: aiohttp.ClientSession, query: dict[str, str], total_s: float) -> Any:
        cluster = self._cluster
        headers = {"accept": "application/json"}
        if cluster.token_file is not None:
            headers["authorization"] = f"Bearer {cluster.token_file.read_text().strip()}"  # it is rotated
        tls = ssl.create_default_context(cafile=str(cluster.ca_file)) if cluster.ca_file is not None else True
        return session.get(
            self._url,
            params={"labelSelector": cluster.selector} | query,
            headers=headers,
            ssl=tls,
            timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_S),
        )


def _urls(item: dict[str, Any]) -> list[str]:
    ports = item.get("ports") or []
    port = next((one.get("port") for one in ports if one.get("name") == PORT_NAME), None)
    if port is None and len(ports) == 1:
        port = ports[0].get("port")
    if port is None:
        return []
    return [
        f"http://{bracketed(address)}:{port}"
        for endpoint in item.get("endpoints") or ()
        if not (endpoint.get("conditions") or {}).get("terminating")
        for address in endpoint.get("addresses") or ()
    ]


def _name_of(item: dict[str, Any]) -> str:
    return str((item.get("metadata") or {}).get("name", ""))


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SourceFault(f"the API's answer makes no sense ({error})") from error
