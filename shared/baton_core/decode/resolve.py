"""Which prefill DP rank holds a room, as far as nobody need be asked (S3)."""

from baton_core.errors import ClientError
from baton_core.registration import Layout
from baton_core.request import Bootstrap


def _resolve_prefill_dp_rank(bootstrap: Bootstrap, topology: Layout | None, *, force_query: bool = False) -> int | None:
    """The prefill DP rank of this room, by the first rule that applies; None: the registry must be asked.

    The rank that the request names; none while the topology is unknown; the only one; under follow_bootstrap_room, unless
    a query is forced, room mod dp_size. Raises ClientError where the request names a rank that does not exist.
    """
    named = bootstrap.prefill_dp_rank
    if named is not None:
        if topology is not None and not 0 <= named < topology.dp_size:
            text = (
                f"disagg_prefill_dp_rank is {named}, but the prefill worker has {topology.dp_size} DP ranks (dp_size)"
            )
            raise ClientError(text)
        return named
    if topology is None:
        return None
    if topology.dp_size == 1:
        return 0
    if topology.follow_bootstrap_room and not force_query:
        return bootstrap.room % topology.dp_size
    return None
