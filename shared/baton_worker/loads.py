"""How loaded a worker is, in other projects' words: SGLang's `/v1/loads`, vLLM's gauges for Kubernetes' inference gateway.

Both come from the last snapshots of the units' leaders, so they are about a second old.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest

from baton_worker.worker import Worker

QUEUES_OF_LOAD = {
    "num_running_reqs": ("running", "computing", "forwarding"),
    "num_waiting_reqs": (
        *("bootstrapping", "accepted", "queued"),
        *("resolving", "greeting", "prealloc", "transferring", "arrived", "local"),
    ),
    "prefill_bootstrap_queue_reqs": ("bootstrapping", "accepted"),
    "prefill_inflight_queue_reqs": ("inflight",),
    "decode_prealloc_queue_reqs": ("resolving", "greeting", "prealloc"),
    "decode_transfer_queue_reqs": ("transferring",),
    "decode_retracted_queue_reqs": ("backing_up", "retracted", "restoring"),
}
"""SGLang's names in `/v1/loads`, and the scheduler's phases that they count."""

GATEWAY_GAUGES = {
    "num_requests_running": "Requests in forwards, of all DP ranks.",
    "num_requests_waiting": "Requests that are here and not in forwards yet, of all DP ranks.",
    "kv_cache_usage_perc": "Share of KV pages that requests hold, 0 to 1; what only the prefix cache holds is free.",
    "cache_config_info": "Always 1; the labels say how many tokens a page has, and how many pages there are.",
}
"""vLLM's names, behind `vllm:`, which the endpoint picker of the Gateway API Inference Extension asks for."""


def load_of(worker: Worker, dp_rank: int, now_s: float) -> dict[str, object]:
    """SGLang's load report of one unit."""
    counts = _counts(worker, dp_rank)
    pages, spare = _pages(worker, dp_rank)
    used_tokens = (pages - spare) * worker.config.page_tokens
    return {
        "timestamp": now_s,
        "dp_rank": dp_rank,
        "num_running_reqs": counts.pop("num_running_reqs"),
        "num_waiting_reqs": counts.pop("num_waiting_reqs"),
        "num_used_tokens": used_tokens,
        "num_total_tokens": used_tokens,
        "max_total_num_tokens": pages * worker.config.page_tokens,
        "max_running_requests": worker.limits.running_max,
        "token_usage": (pages - spare) / pages if pages else 0.0,
        "disaggregation": {"mode": worker.role.value} | counts,
    }


class GatewayGauges:
    """vLLM's gauges over one worker. One series each: a gateway picks workers and knows no DP ranks."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All families, for `CollectorRegistry`."""
        worker = self._worker
        units = range(worker.parallel.dp)
        counts = [_counts(worker, dp_rank) for dp_rank in units]
        pools = [_pages(worker, dp_rank) for dp_rank in units]
        pages = sum(pool[0] for pool in pools)
        spare = sum(pool[1] for pool in pools)
        # The operator's name of the model, never a client's.
        model = {"model_name": worker.model.name}
        config = {"block_size": str(worker.config.page_tokens), "num_gpu_blocks": str(pages)}
        values: dict[str, tuple[float, dict[str, str]]] = {
            "num_requests_running": (sum(one["num_running_reqs"] for one in counts), model),
            "num_requests_waiting": (sum(one["num_waiting_reqs"] for one in counts), model),
            "kv_cache_usage_perc": ((pages - spare) / pages if pages else 0.0, model),
            "cache_config_info": (1.0, model | config),
        }
        for name, (value, labels) in values.items():
            family = Metric(f"vllm:{name}", GATEWAY_GAUGES[name], "gauge")
            family.add_sample(f"vllm:{name}", labels, value)
            yield family


def _counts(worker: Worker, dp_rank: int) -> dict[str, int]:
    gauges = _gauges(worker, dp_rank)
    return {
        name: int(sum(gauges.get(f"queue_requests{{queue={queue}}}", 0) for queue in queues))
        for name, queues in QUEUES_OF_LOAD.items()
    }


def _pages(worker: Worker, dp_rank: int) -> tuple[int, int]:
    """Pages of the unit's pool, and those that may be taken: what is cached and nobody reads is as good as free."""
    gauges = _gauges(worker, dp_rank)
    ready = worker.units[dp_rank].leader.heard.ready
    pages = int(gauges.get("pages", 0 if ready is None else ready.kv_pages))  # before its first snapshot, all free
    return pages, int(gauges.get("pages_spare", gauges.get("pages_free", pages)))


def _gauges(worker: Worker, dp_rank: int) -> dict[str, float]:
    snapshot = worker.metrics.snapshots.get(dp_rank)
    return {} if snapshot is None else snapshot.gauges
