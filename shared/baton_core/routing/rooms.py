"""Room numbers: what the two legs of a request share. A router draws them, so that nobody has to agree on them."""

from baton_core.request import ROOM_MAX, Room

ROOM_BITS = 63


def draw_room(bits: int, *, dp_size: int = 1, dp_rank: int | None = None) -> Room:
    """A room from 63 random bits, 1 … 2**63−1 (0 is the fake room).

    With `dp_rank`, a room whose remainder by `dp_size` is that rank: workers that follow the room (SGLang's
    `follow_bootstrap_room`) then run the request there, without any registration.
    """
    assert 0 <= bits < 2**ROOM_BITS, "draw_room wants 63 bits"
    room = 1 + bits % ROOM_MAX
    if dp_rank is None:
        return room
    assert 0 <= dp_rank < dp_size, f"dp_rank {dp_rank} of {dp_size}"
    room += dp_rank - room % dp_size
    if room > ROOM_MAX:
        return room - dp_size
    return room if room >= 1 else room + dp_size
