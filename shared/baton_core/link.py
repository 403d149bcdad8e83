"""A reliable, ordered conversation between two workers over any transport that may drop, repeat or cut.

    decode worker                                      prefill worker
    open(epoch 3) -- DATA seq 1 … ack 0 ------------>  first frame of a new epoch: a new conversation
                  <------------ DATA seq 1, ack 1 ---
                  -- BEAT ack 1 ------------------->   nothing to say for a heartbeat
                  <------------ GONE ----------------   another incarnation lives here, or this epoch is over

Frames carry both incarnations and the epoch, so that a message of an earlier life is recognised, not obeyed. Numbered
messages are kept until acknowledged and sent again (go-back-N, as in HDLC); silence longer than the limit ends the
conversation, which the core hears once, as `PeerGone`. Pure: frames in, frames out.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import IntEnum

from baton_core.limits import Limits, Millis
from baton_core.request import Incarnation

ENDED_MAX = 1_024
"""Peers whose last conversation is remembered as over; frames come late by a round trip or two, not by a thousand peers."""

NAME_CHARS_MAX = 256


class FrameKind(IntEnum):
    """What a frame is for."""

    DATA = 1
    BEAT = 2  # acknowledgement and sign of life
    PING = 4  # say a word: your connection broke
    GONE = 3  # this conversation is over, or never was


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One unit on the wire. `seq` counts DATA from 1; `ack` is the highest number received in order."""

    kind: FrameKind
    source: Incarnation
    target: Incarnation
    epoch: int
    seq: int = 0
    ack: int = 0
    payload: bytes = b""
    text: str = ""

    def __post_init__(self) -> None:
        if self.epoch < 1 or self.seq < 0 or self.ack < 0:
            raise ValueError(f"frame numbers out of range: epoch {self.epoch}, seq {self.seq}, ack {self.ack}")
        # Names are kept beyond the conversation, and answered with: a stranger's must cost no more than one of ours.
        if max(len(self.source), len(self.target)) > NAME_CHARS_MAX:
            raise ValueError(f"a name has at most {NAME_CHARS_MAX} characters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What a frame brought: messages in order, frames to send in answer, and why the link is lost, if it is."""

    payloads: tuple[bytes, ...] = ()
    answers: tuple[Frame, ...] = ()
    lost: str | None = None


class Link:
    """One end of one conversation (own incarnation, peer incarnation, epoch). Mutated by every method."""

    def __init__(self, own: Incarnation, peer: Incarnation, epoch: int, limits: Limits, now: Millis) -> None:
        self.own, self.peer, self.epoch = own, peer, epoch
        self._limits = limits
        self._next_seq = 1
        self._received = 0
        self._unacked: deque[Frame] = deque()
        self._heard_at = now
        self._suspected = False
        self._sent_at = now
        self._resend_at: Millis | None = None
        self.lost: str | None = None

    def send(self, payload: bytes, now: Millis) -> tuple[Frame, ...]:
        """The frame that carries `payload`. A full window means that the peer does not take what it is told: lost."""
        if self.lost is not None:
            return ()
        if len(self._unacked) >= self._limits.link_window:
            self.lost = f"{len(self._unacked)} messages are unacknowledged (link_window)"
            return ()
        frame = self._frame(FrameKind.DATA, seq=self._next_seq, payload=payload)
        self._next_seq += 1
        self._unacked.append(frame)
        self._sent_at = now
        if self._resend_at is None:
            self._resend_at = now + self._limits.link_resend_ms
        return (frame,)

    def receive(self, frame: Frame, now: Millis) -> Received:
        """Take one frame of this very conversation (the caller matched incarnations and epoch)."""
        if self.lost is not None:
            return Received(answers=(self.farewell(),))
        if frame.kind is FrameKind.GONE:
            self.lost = frame.text or "the peer ended the conversation"
            return Received(lost=self.lost)
        self._heard_at, self._suspected = now, False
        self._acknowledge(frame.ack, now)
        if frame.kind is FrameKind.BEAT:
            return Received()
        if frame.kind is FrameKind.PING:
            self._sent_at = now
            return Received(answers=(self._frame(FrameKind.BEAT),))
        fresh = frame.seq == self._received + 1
        if fresh:
            self._received = frame.seq
        # Answer repeats too: the acknowledgement may be what got lost.
        self._sent_at = now
        return Received(payloads=(frame.payload,) if fresh else (), answers=(self._frame(FrameKind.BEAT),))

    def tick(self, now: Millis) -> tuple[Frame, ...]:
        """Heartbeats and repeats that are due. Sets `lost` after too long a silence."""
        if self.lost is not None:
            return ()
        if now - self._heard_at >= self._limits.link_silent_ms:
            self.lost = f"nothing heard for {now - self._heard_at} ms (link_silent_ms {self._limits.link_silent_ms})"
            if self._suspected:
                self.lost = (
                    f"its connection broke; nothing heard since (link_suspect_ms {self._limits.link_suspect_ms})"
                )
            return ()
        if self._resend_at is not None and now >= self._resend_at:
            self._resend_at = now + self._limits.link_resend_ms
            self._sent_at = now
            return tuple(self._refreshed(frame) for frame in self._unacked)
        if now - self._sent_at >= self._limits.heartbeat_ms:
            self._sent_at = now
            return (self._frame(FrameKind.BEAT),)
        return ()

    def suspect(self, now: Millis) -> tuple[Frame, ...]:
        """The connection underneath broke: the peer is lost unless it is heard again soon."""
        if self.lost is not None:
            return ()
        grace_ms = min(self._limits.link_suspect_ms, self._limits.link_silent_ms)
        self._heard_at = min(self._heard_at, now - self._limits.link_silent_ms + grace_ms)
        self._suspected = True
        return (self._frame(FrameKind.PING),)

    def next_due(self) -> Millis:
        """When `tick` has something to do next."""
        if self.lost is not None:
            return self._heard_at  # at once: the loss is still to be reported
        limits, resend = self._limits, self._resend_at
        silent, beat = self._heard_at + limits.link_silent_ms, self._sent_at + limits.heartbeat_ms
        due = silent if silent < beat else beat
        return due if resend is None or due < resend else resend

    def farewell(self) -> Frame:
        """The frame that tells the peer that this conversation is over."""
        return self._frame(FrameKind.GONE, text=self.lost or "closed")

    def _acknowledge(self, ack: int, now: Millis) -> None:
        moved = False
        while self._unacked and self._unacked[0].seq <= ack:
            self._unacked.popleft()
            moved = True
        if not self._unacked:
            self._resend_at = None
        elif moved:
            self._resend_at = now + self._limits.link_resend_ms

    def _frame(self, kind: FrameKind, *, seq: int = 0, payload: bytes = b"", text: str = "") -> Frame:
        return Frame(
            kind=kind,
            source=self.own,
            target=self.peer,
            epoch=self.epoch,
            seq=seq,
            ack=self._received,
            payload=payload,
            text=text,
        )

    def _refreshed(self, frame: Frame) -> Frame:
        return self._frame(FrameKind.DATA, seq=frame.seq, payload=frame.payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a switchboard made of a frame: who spoke, what was said, what to send back, whom it lost by it."""

    peer: Incarnation
    payloads: tuple[bytes, ...] = ()
    answers: tuple[Frame, ...] = ()
    lost: str | None = None


class Switchboard:
    """All conversations of one worker. The decode side dials (`dial`), the prefill side only answers.

    At most one conversation a peer lives at a time; a newer epoch replaces an older one, which counts as lost.
    """

    def __init__(self, own: Incarnation, limits: Limits) -> None:
        self.own = own
        self._limits = limits
        self._links: dict[Incarnation, Link] = {}
        # The newest epoch with each peer that ended here: a late repeat of its first frame must not revive it.
        self._ended: OrderedDict[Incarnation, int] = OrderedDict()
        self._epochs = 0

    @property
    def peers(self) -> tuple[Incarnation, ...]:
        """Peers with a live conversation."""
        return tuple(self._links)

    def knows(self, peer: Incarnation) -> bool:
        """Whether a conversation with `peer` is open."""
        return peer in self._links

    def dial(self, peer: Incarnation, now: Millis) -> None:
        """Open a conversation, unless one is open."""
        if peer not in self._links:
            self._epochs += 1
            self._links[peer] = Link(self.own, peer, self._epochs, self._limits, now)

    def send(self, peer: Incarnation, payload: bytes, now: Millis) -> tuple[Frame, ...]:
        """Frames that carry `payload`; none if there is no conversation (its loss was reported already)."""
        link = self._links.get(peer)
        return () if link is None else link.send(payload, now)

    def receive(self, frame: Frame, now: Millis) -> Heard:
        """Take a frame from the wire, whoever sent it."""
        if frame.target != self.own:
            return Heard(peer=frame.source, answers=self._not_here(frame))
        link = self._links.get(frame.source)
        if link is not None and link.epoch == frame.epoch:
            got = link.receive(frame, now)
            if got.lost is not None:
                self._end(link)
            return Heard(peer=frame.source, payloads=got.payloads, answers=got.answers, lost=got.lost)
        if link is not None and frame.epoch < link.epoch:
            return Heard(peer=frame.source)  # an echo of the past
        if frame.epoch <= self._ended.get(frame.source, 0):
            over = self._gone(frame, "this conversation is over")
            return Heard(peer=frame.source, answers=() if frame.kind is FrameKind.GONE else (over,))
        if frame.kind is not FrameKind.DATA or frame.seq != 1:
            # Either its first frame was lost (it will be repeated) or we ended this epoch and the peer missed it.
            return Heard(peer=frame.source, answers=() if frame.kind is FrameKind.GONE else self._over(frame))
        return self._adopt(frame, link, now)

    def tick(self, now: Millis) -> tuple[tuple[Frame, ...], tuple[tuple[Incarnation, str], ...]]:
        """Frames that are due, and peers lost to silence (with the reason)."""
        frames: list[Frame] = []
        lost: list[tuple[Incarnation, str]] = []
        for peer, link in list(self._links.items()):
            frames += link.tick(now)
            if link.lost is not None:
                lost.append((peer, link.lost))
                frames.append(link.farewell())
                self._end(link)
        return tuple(frames), tuple(lost)

    def suspect(self, peer: Incarnation, now: Millis) -> tuple[Frame, ...]:
        """The connection to `peer` broke: frames that ask whether it lives."""
        link = self._links.get(peer)
        return () if link is None else link.suspect(now)

    def hang_up(self, peer: Incarnation) -> tuple[Frame, ...]:
        """End a conversation politely."""
        link = self._links.get(peer)
        if link is None:
            return ()
        self._end(link)
        return (link.farewell(),)

    def next_due(self) -> Millis | None:
        """When `tick` has something to do next."""
        return min([link.next_due() for link in self._links.values()], default=None)

    def _end(self, link: Link) -> None:
        del self._links[link.peer]
        self._ended.pop(link.peer, None)
        self._ended[link.peer] = link.epoch
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def _adopt(self, frame: Frame, old: Link | None, now: Millis) -> Heard:
        link = Link(self.own, frame.source, frame.epoch, self._limits, now)
        self._links[frame.source] = link
        got = link.receive(frame, now)
        lost = None if old is None else "the peer opened a new conversation"
        return Heard(peer=frame.source, payloads=got.payloads, answers=got.answers, lost=lost)

    def _over(self, frame: Frame) -> tuple[Frame, ...]:
        if frame.kind in (FrameKind.DATA, FrameKind.PING) and frame.ack == 0:
            return ()  # perhaps a young conversation whose first frame is still on its way
        return (self._gone(frame, "this conversation is over"),)

    def _not_here(self, frame: Frame) -> tuple[Frame, ...]:
        if frame.kind is FrameKind.GONE:
            return ()
        return (self._gone(frame, f"incarnation {frame.target} does not live here any more"),)

    def _gone(self, frame: Frame, text: str) -> Frame:
        # Speak in the name the peer dialled, or it could not match the answer to its conversation.
        return Frame(kind=FrameKind.GONE, source=frame.target, target=frame.source, epoch=frame.epoch, text=text)
