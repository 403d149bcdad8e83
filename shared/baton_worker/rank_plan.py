"""What each rank process of one node is told, from the worker's options and the node's cores."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_core.ranks import Parallel, share
from baton_core.request import Incarnation
from baton_io.registry_client import url_of
from baton_worker.config import RankConfig, Role, WorkerConfig, parse_cores
from baton_worker.materials import Materials

NODES_PORT_OFFSET = 1
"""The apps of several nodes meet at node 0, this far above the port of `dist_init_addr`."""

LOGS_PORT_OFFSET = 2
"""The log of unit d of a worker on several nodes listens d + this far above that port, on its leader's node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What the ranks of one life of one worker have in common, on one node."""

    config: WorkerConfig
    role: Role
    incarnation: Incarnation
    model_path: str
    model_name: str
    run_dir: str
    cores_available: int  # that this process may use

    @staticmethod
    def of(config: WorkerConfig, materials: Materials, *, incarnation: Incarnation, run_dir: Path) -> "RankPlan":
        """The plan of one life of the worker that `materials` describe, on this machine."""
        return RankPlan(
            config=config,
            role=materials.role,
            incarnation=incarnation,
            model_path=str(materials.model.path),
            model_name=materials.model.name,
            run_dir=str(run_dir),
            cores_available=len(os.sched_getaffinity(0)),
        )

    def ipc_address(self, rank: int) -> str:
        """Where the app of this node waits for a rank."""
        return f"ipc://{self.run_dir}/rank{rank}.ipc"

    def rank_config(self, rank: int, hosts: Sequence[str] = ()) -> RankConfig:
        """What a rank of this node is told. `hosts`: where each node is reached, with several nodes."""
        config = self.config
        local_rank, count = rank - config.local_ranks.start, len(config.local_ranks)
        threads = config.threads
        if not threads and not config.cores and count > 1:
            threads = max(1, self.cores_available // count)
        return RankConfig(
            role=self.role,
            rank=rank,
            local_rank=local_rank,
            parallel=config.parallel,
            incarnation=self.incarnation,
            ipc_address=self.ipc_address(rank),
            rendezvous=self._rendezvous(),
            log_address=self._log_address(config.parallel.place(rank).dp_rank, hosts),
            run_dir=self.run_dir,
            control=config.control,
            load_balance_method=config.load_balance_method,
            force_query_prefill_dp_rank=config.force_query_prefill_dp_rank,
            model_path=self.model_path,
            model_name=self.model_name,
            dtype=config.dtype,
            device=f"cuda:{local_rank}" if config.device == "cuda" and count > 1 else config.device,
            transfer=config.transfer,
            transfer_staging=config.transfer_staging,
            kv_checksum=config.kv_checksum,
            shm_dir=config.shm_dir,
            host=config.host,
            advertise_host=config.reachable_host,
            page_tokens=config.page_tokens,
            kv_tokens=config.kv_tokens,
            prefix_cache=config.prefix_cache,
            threads=threads,
            cores=split_cores(parse_cores(config.cores), count)[local_rank],
            log_format=config.log_format,
            log_level=config.log_level,
            limits=config.limits,
            traces=config.otlp_endpoint is not None,
        )

    def _rendezvous(self) -> str:
        if self.config.nnodes == 1:
            return f"file://{self.run_dir}/rendezvous"
        return f"tcp://{_bracketed(*self.config.init_address)}"

    def _log_address(self, dp_rank: int, hosts: Sequence[str]) -> str:
        nodes = nodes_of(self.config.parallel, dp_rank, self.config.nnodes)
        if len(nodes) == 1:
            return f"ipc://{self.run_dir}/unit{dp_rank}.log"
        _, port = self.config.init_address
        return f"tcp://{_bracketed(hosts[nodes[0]], port + LOGS_PORT_OFFSET + dp_rank)}"


def nodes_of(parallel: Parallel, dp_rank: int, nnodes: int) -> list[int]:
    """The nodes that a unit's ranks are on; its leader is on the first."""
    first, last = parallel.rank_of(dp_rank, 0), parallel.rank_of(dp_rank, parallel.members - 1)
    spans = [share(parallel.ranks, node, nnodes) for node in range(nnodes)]
    return [node for node, span in enumerate(spans) if first < span.stop and last >= span.start]


def split_cores(cores: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Cores of each rank: disjoint while there are enough, shared in order when not; empty where none are given."""
    if not cores:
        return [()] * ranks
    parts = [share(len(cores), part, ranks) for part in range(ranks)]
    return [tuple(cores[part.start : max(part.stop, part.start + 1)]) for part in parts]


def _bracketed(host: str, port: int) -> str:
    return url_of(host, port).removeprefix("http://")
