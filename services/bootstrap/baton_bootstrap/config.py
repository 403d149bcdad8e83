"""Configuration of the bootstrap registry."""

from dataclasses import dataclass
from typing import Literal

from baton_core.limits import RegistryLimits
from baton_io.config import option
from baton_io.logs import LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapConfig:
    """Everything an operator can set. Raises ValueError naming the setting that is wrong."""

    host: str = option("127.0.0.1", "address to listen on; anything but loopback should come with a token")
    port: int = option(8990, "port to listen on")
    token_file: str | None = option(None, "file with the token that writes must carry (authorization: Bearer …)")
    redis: str | None = option(
        None,
        "URL of the Redis that all replicas of this registry share, such as redis://redis:6379/0; none: it is alone",
    )
    redis_password_file: str | None = option(None, "file with the password of that Redis")
    ranks_max: int = option(10_000, "prefill ranks held, over all workers; more are refused with 503")
    rooms_max: int = option(1_000_000, "rooms held; more are refused with 503")
    room_ms: int = option(120_000, "how long the DP rank of a room is kept, unless it is registered again")
    log_format: Literal["console", "json"] = option("console", "how log lines look")
    log_level: str = option("info", "least severe lines that are logged", choices=tuple(LEVELS))

    def __post_init__(self) -> None:
        if not 0 < self.port < 65_536:
            raise ValueError(f"port must be between 1 and 65535, not {self.port}")
        if self.redis is not None and not self.redis.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(f"redis must be a URL such as redis://redis:6379/0, not {self.redis!r}")
        RegistryLimits(ranks_max=self.ranks_max, rooms_max=self.rooms_max, room_ms=self.room_ms)

    @property
    def limits(self) -> RegistryLimits:
        """The bounds of the table."""
        return RegistryLimits(ranks_max=self.ranks_max, rooms_max=self.rooms_max, room_ms=self.room_ms)
