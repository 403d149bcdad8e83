"""How fast first tokens come, and so how long one more request would wait for its own. Pure.

The router counts who waits for a first token, and what came through lately; by Little's law their quotient is the wait.
Whatever is short, prefill's time or decode's pages, shows in it. Requests and prompt tokens are counted apart, and the
shorter of the two waits is believed: a few long prompts among short ones must not look like a fleet that stands still.
A request that would wait too long is better told so at once than served when nobody listens any more.
"""

from baton_core.limits import Millis

HALF_LIFE_MS: Millis = 15_000
"""Of what is remembered about the rate."""
KNOWN_FIRST_TOKENS = 8
"""Of late: with fewer there is too little to judge by."""
FREE_WAITERS_UNKNOWN = 8
"""So few may always wait as long as there is too little to judge by, as in a fleet that stands still."""
FREE_WAITERS = 2
"""So few may always wait. More would themselves be too long a line where a request takes half a second."""


class Pace:
    """Of one router. Times are of any one clock that never goes back; `longest_ms` 0 refuses nobody."""

    def __init__(self, *, longest_ms: Millis) -> None:
        self.longest_ms = longest_ms
        self._at_ms = 0.0
        self._busy_ms = 0.0  # of late, while somebody waited
        self._came = 0.0  # of late: requests whose first token came
        self._came_tokens = 0.0  # likewise, of their prompts
        self.waiting = 0
        self._waiting_tokens = 0

    def begin(self, prompt_tokens: int, now_ms: float) -> "Waiter":
        """A request goes to its workers. A prompt of unknown length (0) counts as one token, like all others then."""
        self._advance(now_ms)
        waiter = Waiter(self, max(1, prompt_tokens))
        self.waiting += 1
        self._waiting_tokens += waiter.tokens
        return waiter

    def expected_ms(self, now_ms: float) -> float:
        """How long one more request would wait for its first token behind those that do; 0 while too few are known.

        Its own turn counts, too; it is taken for one like those that wait.
        """
        self._advance(now_ms)
        free = FREE_WAITERS if self._came >= KNOWN_FIRST_TOKENS else FREE_WAITERS_UNKNOWN
        if self.waiting <= free or not self._came:
            return 0.0
        before = min(self.waiting / self._came, self._waiting_tokens / self._came_tokens)
        return self._busy_ms * before * (self.waiting + 1) / self.waiting

    def too_long_by_ms(self, now_ms: float) -> float:
        """By how much that is beyond what anybody should wait: above 0 a new request is refused."""
        return max(0.0, self.expected_ms(now_ms) - self.longest_ms) if self.longest_ms else 0.0

    def leave(self, tokens: int, now_ms: float, *, came: bool) -> None:
        """A waiter's own call."""
        self._advance(now_ms)
        self.waiting -= 1
        self._waiting_tokens -= tokens
        if came:
            self._came += 1
            self._came_tokens += tokens

    def _advance(self, now_ms: float) -> None:
        """Time passes; it counts only while somebody waits."""
        passed_ms = now_ms - self._at_ms
        if passed_ms <= 0:
            return
        self._at_ms = now_ms
        if self.waiting:
            kept: float = 0.5 ** (passed_ms / HALF_LIFE_MS)
            self._busy_ms = self._busy_ms * kept + passed_ms
            self._came *= kept
            self._came_tokens *= kept


class Waiter:
    """One request that waits for its first token. `came`, `refused` or `gave_up` must follow; later words change nothing."""

    def __init__(self, pace: Pace, tokens: int) -> None:
        self._pace: Pace | None = pace
        self.tokens = tokens

    def came(self, now_ms: float) -> None:
        """The first token came."""
        self._leave(now_ms, came=True)

    def refused(self, now_ms: float) -> None:
        """Its workers said what is wrong with it: it is dealt with, and says nothing against their pace.

        Else whoever sends enough nonsense would have the fleet look like one that stands still.
        """
        self._leave(now_ms, came=True)

    def gave_up(self, now_ms: float) -> None:
        """It ended without one."""
        self._leave(now_ms, came=False)

    def _leave(self, now_ms: float, *, came: bool) -> None:
        if self._pace is not None:
            self._pace.leave(self.tokens, now_ms, came=came)
            self._pace = None
