"""Prefill workers from the bootstrap registry, which knows all that registered there; asked again and again."""

import msgspec

from baton_core.limits import Millis
from baton_core.routing.workers import Role
from baton_router.config import bracketed
from baton_router.discovery.source import Name, Named, SourceFault
from baton_router.upstream import Upstream, UpstreamError


class _Instance(msgspec.Struct, frozen=True):
    http_host: str | None = None
    http_port: int | None = None


class _Instances(msgspec.Struct, frozen=True):
    instances: list[_Instance] = []


class RegistryInstances:
    """`GET /v1/instances` of one registry."""

    def __init__(self, address: tuple[str, int], upstream: Upstream, timeout_ms: Millis) -> None:
        self._url = f"http://{address[0]}:{address[1]}/v1/instances"
        self._upstream = upstream
        self._timeout_ms = timeout_ms
        self.name = f"registry {address[0]}:{address[1]}"

    async def follow(self, name: Name) -> None:
        """Ask once. See Source."""
        try:
            status, body = await self._upstream.get(self._url, self._timeout_ms)
            told = msgspec.json.decode(body, type=_Instances) if status == 200 else None
        except UpstreamError as error:
            raise SourceFault(error.text) from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SourceFault(f"/v1/instances makes no sense ({error})") from error
        if told is None:
            raise SourceFault(f"/v1/instances answers {status}")
        found: list[Named] = [
            (Role.PREFILL, f"http://{bracketed(one.http_host)}:{one.http_port}")
            for one in told.instances
            if one.http_host and one.http_port
        ]
        name(self.name, found)
