"""Why a prefill unit refuses: what is wrong with a request alone, and what is wrong with the two legs of a room together."""

from dataclasses import dataclass

from baton_core.admission import capacity_verdict
from baton_core.errors import Reason, Verdict
from baton_core.fingerprint import mismatches
from baton_core.kv_layout import UnitLayout, require_translatable
from baton_core.limits import Limits
from baton_core.messages import TOKEN_MAX, Hello
from baton_core.registration import FOLLOW
from baton_core.request import FAKE_HOST, Bootstrap, Request, prompt_digest

FORCE_QUERY = "BATON_FORCE_QUERY_PREFILL_DP_RANK"
"""The switch under which every room's DP rank is registered, whatever the balance method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """A request on a DP rank where decode would not look for its room.

    Decode asks `looked_for_on`, so that unit must hear of the refusal; None where decode refuses by itself.
    """

    verdict: Verdict
    looked_for_on: int | None


def misplaced(bootstrap: Bootstrap, *, dp_rank: int, dp_size: int, registers: bool) -> Misplaced | None:
    """Why a request sent to `dp_rank` must fail at once (S3), or None.

    `registers`: rooms are registered, so that decode finds whatever rank it is.
    """
    room, named, implied = bootstrap.room, bootstrap.prefill_dp_rank, bootstrap.room % dp_size
    if bootstrap.host == FAKE_HOST:
        return None
    if named is not None and not 0 <= named < dp_size:
        text = f"disagg_prefill_dp_rank is {named}, but this prefill worker has {dp_size} DP ranks (dp_size)"
        return Misplaced(verdict=Verdict(reason=Reason.INVALID_REQUEST, text=text), looked_for_on=None)
    if named is not None and named != dp_rank:
        text = (
            f"disagg_prefill_dp_rank sends decode to DP rank {named} for room {room}, but the request was sent to "
            f"prefill DP rank {dp_rank}; give both legs the same rank (routed_dp_rank)"
        )
        return Misplaced(verdict=Verdict(reason=Reason.DP_CONFLICT, text=text), looked_for_on=named)
    if dp_size > 1 and named is None and not registers and implied != dp_rank:
        text = (
            f"{FOLLOW} conflict: room {room} was sent to prefill DP rank {dp_rank}, but it implies DP rank {implied} "
            f"(room mod {dp_size}), where decode would look for it. Send disagg_prefill_dp_rank along, or set "
            f"{FORCE_QUERY}=1 on the prefill worker to allow mixed routing."
        )
        return Misplaced(verdict=Verdict(reason=Reason.DP_CONFLICT, text=text), looked_for_on=implied)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRules:
    """What this unit is, and so whom it can serve."""

    layout: UnitLayout
    fingerprint: str
    context_tokens: int
    pool_pages: int
    vocab_size: int = TOKEN_MAX + 1
    dp_rank: int = 0
    dp_size: int = 1
    load_balance_method: str = FOLLOW
    force_query_dp_rank: bool = False

    @property
    def registers(self) -> bool:
        """Whether decode can know a room's DP rank only if it is registered (S3)."""
        return self.dp_size > 1 and (self.force_query_dp_rank or self.load_balance_method != FOLLOW)

    def refusal(self, request: Request) -> Verdict | None:
        """Why this unit cannot serve the request, whatever decode says."""
        bootstrap = request.bootstrap
        if bootstrap is None:
            text = "this is a prefill worker: the request needs bootstrap_host, bootstrap_port and bootstrap_room"
            return Verdict(reason=Reason.INVALID_REQUEST, text=text)
        found = misplaced(bootstrap, dp_rank=self.dp_rank, dp_size=self.dp_size, registers=self.registers)
        if found is not None:
            return found.verdict
        return capacity_verdict(
            request,
            context_tokens=self.context_tokens,
            pool_pages=self.pool_pages,
            page_tokens=self.layout.page_tokens,
        )

    def refusal_again(self, request: Request, limits: Limits) -> Verdict | None:
        """Likewise of a request that comes from decode: no app of this worker has looked at it."""
        stops = request.sampling.stop_token_ids
        stops_most = 2 * limits.stop_ids_max  # the client's, and the model's own
        if max(request.prompt) >= self.vocab_size:
            text = f"decode names token {max(request.prompt)}; the model has {self.vocab_size} (vocab_size)"
        elif len(stops) > stops_most or min(stops, default=0) < 0:
            least = min(stops, default=0)
            text = f"decode names {len(stops)} stop token ids, from {least}; at most {stops_most} from 0"
        else:
            return self.refusal(request)
        return Verdict(reason=Reason.INVALID_REQUEST, text=text)

    def conflict(self, request: Request, hello: Hello) -> Verdict | None:
        """Why the two legs cannot be joined, naming both values."""
        unlike = [*mismatches(self.fingerprint, hello.fingerprint), *self._untranslatable(hello.layout)]
        if unlike:
            text = f"prefill and decode cannot share KV: {'; '.join(unlike)}. Start both with the same settings."
            return Verdict(reason=Reason.LAYOUT_MISMATCH, text=text)
        digest = prompt_digest(request.prompt)
        if (len(request.prompt), digest) != (hello.prompt_tokens, hello.digest):
            text = (
                f"the legs of room {hello.room} hold different prompts: {len(request.prompt)} tokens "
                f"(digest {digest:016x}) on prefill, {hello.prompt_tokens} (digest {hello.digest:016x}) on decode"
            )
            return Verdict(reason=Reason.PROMPT_MISMATCH, text=text)
        if hello.dp_rank != self.dp_rank:
            text = f"room {hello.room} runs on prefill DP rank {self.dp_rank}, decode asked rank {hello.dp_rank}"
            return Verdict(reason=Reason.DP_CONFLICT, text=text)
        return None

    def _untranslatable(self, layout: str) -> tuple[str, ...]:
        try:
            require_translatable(self.layout, UnitLayout.from_text(layout))
        except ValueError as error:
            return (str(error),)
        return ()
