"""What one prompt's road has come to know: for its next attempt, its log line and its deadline."""

import asyncio

import msgspec

from baton_core.routing.pair import Pair
from baton_core.routing.policies import Ask
from baton_io.tracing import Span
from baton_router.exchange import Exchange
from baton_router.journal import Journal
from baton_router.merging import Scores

NO_FACTS = Ask()


class Trip(msgspec.Struct, kw_only=True, eq=False):
    """One prompt, from its first pair to its last."""

    exchange: Exchange
    loop: asyncio.AbstractEventLoop  # to ask for the running one costs a system call
    began_s: float  # times are the monotonic clock's: the loop's own runs by it, but shows whole milliseconds
    deadline_s: float  # by the loop's own clock, which is not the monotonic one where a loop is simulated
    ask: Ask = NO_FACTS
    first_room: int = 0  # of the first attempt, where it is not to be drawn: one of a batch
    sent_s: float = 0.0  # just before the legs of the last attempt went out
    first_byte_s: float | None = None
    heard_s: float | None = None  # when the last piece of a stream came
    room: int = 0
    pair: Pair | None = None
    attempts: int = 0
    migrations: int = 0  # those of the attempts that were to continue a stream
    journal: Journal | None = None  # of a stream that has begun and tells its tokens
    span: Span | None = None  # of the whole request, where it is traced
    scores: Scores | None = None  # prefill's logprobs of the prompt, once they are here
