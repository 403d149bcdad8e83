"""What is said to the ports between ranks and apps: frames built by the project's own encoders, then bent or damaged."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import msgspec

from baton_core import events
from baton_core.agreement import KVPoll
from baton_core.errors import Reason, Verdict
from baton_core.kv_layout import UnitLayout
from baton_core.link import Frame, FrameKind
from baton_core.messages import ROW_BYTES, Accepted, Hello, MetadataRow, NotYet, PageOrder, Rejected, RoomFailed
from baton_core.request import Request, Sampling, prompt_digest
from baton_core.unit_log import Done, Idled, Report
from baton_engine.transfer import shm_wire, tcp_wire
from baton_io import ipc
from baton_io.codec import Codec
from baton_io.links import FRAMES, PAYLOADS
from baton_io.unit_channel import _NOTES, Join, Nudge
from baton_worker import nodes
from fuzz.dice import SIZES, bent, damaged, hostile

Multipart = list[bytes]


def encoded(dice: Random, codec: Codec, message: object) -> bytes:
    """A frame of `codec`: rarely as it should be, mostly with a field that is odd, often damaged."""
    good = codec.encode(message)
    kind = dice.random()
    if kind < 0.1:
        return good
    if kind < 0.6:
        plain = bent(dice, msgspec.msgpack.decode(good[1:]))
        try:
            good = good[:1] + msgspec.msgpack.encode(plain)
        except (OverflowError, UnicodeEncodeError, RecursionError, TypeError):
            return damaged(dice, good)  # what msgpack has no form for
        return good if dice.random() < 0.8 else damaged(dice, good)
    if kind < 0.93:
        return damaged(dice, good)
    return dice.choice((b"", b"\0", good[:1], bytes((dice.randrange(256),)) + good[1:], good[:1] + _depths(dice)))


def _depths(dice: Random) -> bytes:
    """msgpack that goes deep, or claims to be long."""
    long = dice.choice(
        (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff")
    )
    return dice.choice((b"\x91" * 60_000, b"\x81\xa1a" * 5_000, long, long + b"\xa1a" * 50))


def parts(dice: Random, frame: bytes, *others: bytes) -> Multipart:
    """The message around a frame, now and then of too few parts or too many."""
    kind = dice.random()
    if kind < 0.94:
        return [*others, frame]
    return dice.choice(([], [b""], [b"", *others, frame], [*others, frame, b""], [*others, frame, frame], [frame] * 40))


# -- links between leaders


@dataclass(frozen=True, slots=True, kw_only=True)
class Bait:
    """A room whose leg waits at prefill, so that a hello for it is not in vain."""

    room: int
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Whom a link leads to: the name of the leader that listens, and what it wants to hear."""

    name: str
    fingerprint: str
    layout: UnitLayout


def hello_of(peer: Peer, bait: Bait, attempt: int = 1) -> Hello:
    """The hello that fits."""
    return Hello(
        room=bait.room,
        attempt=attempt,
        prompt_tokens=len(bait.prompt),
        digest=prompt_digest(bait.prompt),
        fingerprint=peer.fingerprint,
        dp_rank=0,
        layout=peer.layout.to_text(),
    )


ODD_TEXTS = (
    '{"\\ud800":1}', "[" * 5_000, "{}", "[1]", "null", '"x"', "1e999", '{"layers":1e999}', "x" * 100_000,
    '{"layers":2147483648,"kv_heads":1,"head_dim":1,"element_bytes":1,"page_tokens":1}', "9" * 6_000, "\ufffe", "",
)  # fmt: skip


def payload(dice: Random, peer: Peer, bait: Bait, own: str) -> bytes:
    """Something to say, on the face of it right; the texts inside are another language, and may be odd."""
    attempt = dice.choice((1, 1, 1, 2, 2**31, 2**32, 2**63))
    hello = hello_of(peer, bait)
    kind = dice.random()
    if kind < 0.2:
        return as_if(PAYLOADS, hello, attempt=attempt)
    if kind < 0.5:
        odd = dice.choice((*ODD_TEXTS, peer.layout.to_text()[: dice.randrange(60)]))
        return as_if(PAYLOADS, hello, attempt=attempt, **{dice.choice(("layout", "fingerprint")): odd})
    if kind < 0.75:
        return _order(dice, peer, bait, own, attempt)
    room, text = bait.room, dice.choice(("", "gone", "\U0001f600" * 500, "z" * 100_000))
    reason = dice.choice(tuple(Reason))
    message = dice.choice(
        (
            Accepted(room=room, attempt=1, dp_rank=0, layout=peer.layout.to_text()),
            NotYet(room=room, attempt=1),
            Rejected(room=room, attempt=1, reason=reason, text=text),
            RoomFailed(room=room, attempt=1, reason=reason, text=text, greeted=dice.random() < 0.5),
        )
    )
    return as_if(PAYLOADS, message, attempt=attempt)


def _order(dice: Random, peer: Peer, bait: Bait, own: str, attempt: int) -> bytes:
    pages = dice.choices((0, 1, 7, 2**31, 2**40, 2**63), k=dice.choice((0, 1, 2, 2, 1_000)))
    address = dice.choice(("127.0.0.1:9", "x", "[::1]:9", "127.0.0.1:99999", "{}", "/tmp/nowhere.kv", "a" * 9_000))
    order = PageOrder(
        room=bait.room, attempt=1, incarnation=own, pages=(0,), row=0, backend="tcp", address=address, layout=""
    )
    return as_if(
        PAYLOADS,
        order,
        attempt=attempt,
        pages=pages,
        row=dice.choice((0, 1, 2**31, 2**63)),
        backend=dice.choice(("tcp", "tcp", "auto", "shm", "fake", "x")),
        layout=dice.choice((peer.layout.to_text(), dice.choice(ODD_TEXTS))),
    )


def as_if(codec: Codec, message: object, **changes: object) -> bytes:
    """`message` encoded with fields that it could not be made with."""
    good = codec.encode(message)
    return good[:1] + msgspec.msgpack.encode(msgspec.msgpack.decode(good[1:]) | changes)


def link_case(dice: Random, peer: Peer, bait: Bait, number: int) -> list[Multipart]:
    """A short conversation of a decode leader that nobody knows: good frames and bad, in order, repeated, or reordered."""
    own = dice.choice(
        (f"fuzz{number}/0.0", f"fuzz{number % 50}/0.0", "x", f"y/0.{'9' * 5_000}", "\u0660/0.\u0661", "n" * 5_000)
    )
    said = []
    for seq in range(1, dice.choice((2, 3, 4))):
        raw = payload(dice, peer, bait, own)
        if dice.random() < 0.4:
            raw = damaged(dice, raw) if dice.random() < 0.5 else encoded(dice, PAYLOADS, hello_of(peer, bait))
        frame = Frame(kind=FrameKind.DATA, source="x", target=peer.name, epoch=1, seq=seq, payload=raw)
        good = as_if(
            FRAMES,
            frame,
            kind=dice.choice((FrameKind.DATA, FrameKind.DATA, FrameKind.DATA, *FrameKind)),
            source=own,
            target=dice.choice((peer.name,) * 9 + ("other", "")),
            epoch=dice.choice((1, 1, 1, 2, 2**63, 0)),
            seq=dice.choice((seq, seq, seq, 0, 2**63)),
            ack=dice.choice((0, 0, seq, 2**63)),
            text=dice.choice(("", "bye", "\0")),
        )
        said.append(parts(dice, good if dice.random() < 0.6 else encoded(dice, FRAMES, frame)))
    if dice.random() < 0.2:
        said += said[:1]
    if dice.random() < 0.1:
        said.reverse()
    return said


# -- the page streams


def kv_case(dice: Random, writer: str, attempts: Sequence[tuple[int, int]], page_bytes: int, pages: int) -> list[bytes]:
    """What a prefill rank called `writer` may send for these (room, attempt): a greeting and some frames, in pieces.

    A frame of pages that is right writes 0xEE, which the test knows.
    """
    name = dice.choice((writer.encode(),) * 9 + (b"stranger/0.0", b"\xff", b"n" * 256))
    said = [tcp_wire.GREETING.pack(tcp_wire.MAGIC, tcp_wire.VERSION, len(name)) + name]
    for _ in range(dice.choice((1, 1, 2, 4))):
        room, attempt = dice.choice(attempts)
        said.append(_kv_frame(dice, room, attempt, page_bytes, pages))
    if dice.random() < 0.5:
        where = dice.randrange(len(said))
        said[where] = damaged(dice, said[where])
    if dice.random() < 0.1:
        said.append(said[-1])
    return said


def _kv_frame(dice: Random, room: int, attempt: int, page_bytes: int, pages: int) -> bytes:
    kind = dice.choice(tuple(tcp_wire.FrameKind))
    pieces: list[tuple[int, int, int]] = []
    body = b""
    if kind is tcp_wire.FrameKind.PAGES:
        for _ in range(dice.choice((1, 1, 2, 3))):
            offset = dice.randrange(0, page_bytes, 16)
            pieces.append(
                (dice.randrange(pages + 1), offset, min(page_bytes - offset, dice.choice((16, 64, page_bytes))))
            )
        body = b"\xee" * sum(piece[2] for piece in pieces)
    elif kind is tcp_wire.FrameKind.STAGED:
        count = dice.choice((0, 1, 1, 2, pages, 2**31))
        pieces, body = [(dice.choice((0, 1, pages, 2**31)), count, 0)], b"\xee" * (page_bytes * min(count, pages + 1))
    elif kind is tcp_wire.FrameKind.CHECKSUM:
        body = dice.randbytes(8)
    else:
        body = damaged(dice, row_bytes(dice, room, attempt))[:ROW_BYTES].ljust(dice.choice((ROW_BYTES, 0)), b"\0")
    nbytes = dice.choice((len(body),) * 9 + (dice.choice(SIZES),))
    count = dice.choice((len(pieces),) * 9 + (dice.choice((0, 511, 512, 513, 65_535)),))
    head = tcp_wire.FRAME.pack(kind, count, attempt % 2**32, room % 2**64, nbytes)
    return head + b"".join(tcp_wire.PIECE.pack(*(number % 2**32 for number in piece)) for piece in pieces) + body


def row_bytes(dice: Random, room: int, attempt: int) -> bytes:
    """A row in which any number may be anything."""
    token = dice.choice((42, -1, 2**31 - 1, -(2**31)))
    row = MetadataRow(
        room=room, attempt=attempt, first_token=token, cached_tokens=dice.choice((0, 2**32 - 1)), prompt_tokens=9
    )
    return row.pack()


def shm_case(dice: Random, boot_id: str, writer: str, attempts: Sequence[tuple[int, int, int]]) -> list[bytes]:
    """Whole messages of a writer on this host, which never touches what it is given; attempts as (room, attempt, digest)."""
    name = dice.choice((writer,) * 9 + ("stranger/0.0",))
    said = [shm_wire.hello(dice.choice((boot_id,) * 9 + ("0" * 36,)), name)]
    if dice.random() < 0.1:
        said[0] = damaged(dice, said[0])
    serials = (1, 2, 2**32 - 1)
    for _ in range(dice.choice((1, 3, 8))):
        room, attempt, digest = dice.choice(attempts)
        kind = dice.choice((shm_wire.Kind.BEGIN, shm_wire.Kind.BEGIN, *shm_wire.Kind))
        count = digest if kind is shm_wire.Kind.BEGIN and dice.random() < 0.9 else dice.choice(SIZES)
        frame = shm_wire.Frame(kind=kind, serial=dice.choice(serials), room=room, attempt=attempt, count=count).pack()
        said.append(damaged(dice, frame) if dice.random() < 0.2 else frame)
        if dice.random() < 0.05:
            said.append(dice.choice((b"", frame * 3, frame[:1])))
    return said


# -- inside a worker


def note_case(dice: Random) -> Multipart:
    """To the log of a unit."""
    member = dice.choice((0, 1, 2, 99, -1, 2**40))
    poll = events.AgreedPoll(rid="r", attempt=1, poll=KVPoll.Success, writers_stopped=True)
    report = Report(stage=dice.choice((0, 1, -1, 99)), position=1, polls=(poll,))
    note = dice.choice(
        (
            Join(member=member),
            Nudge(member=member),
            Idled(member=member),
            Done(member=member, step=1, result=None),
            report,
        )
    )
    return parts(dice, encoded(dice, _NOTES, note))


def round_case(dice: Random) -> Multipart:
    """To the rounds of DP attention."""
    kind, number = (
        dice.choice((b"w", b"o", b"h", b"x", b"")),
        dice.choice((b"0", b"1", b"-1", b"x", b"9" * 5_000, b"\xff")),
    )
    return dice.choice(([kind, number],) * 3 + ([kind], [], [b""], [kind, number, b""], [dice.randbytes(9)] * 2))


def hub_case(dice: Random, plan: str) -> Multipart:
    """To node 0 of a worker on several nodes, from a node that is none of its own."""
    rank = dice.choice((0, 1, 99, -1))
    snapshot = ipc.Snapshot(rank=1, progress=1, gauges={"a": float("nan")})
    said = dice.choice(
        (
            nodes.Join(node=dice.choice((0, 2, 99, -1)), host="h", plan=dice.choice((plan, "other"))),
            nodes.Relay(rank=rank, frame=encoded(dice, ipc.TO_APP, snapshot)),
            nodes.Gone(rank=rank, what="gone"),
            nodes.Beat(),
        )
    )
    return parts(dice, encoded(dice, nodes.TO_HUB, said))


def to_rank(dice: Random) -> bytes:
    """To a rank, over its app's ipc."""
    request = Request(rid="r", prompt=(1, 2), sampling=Sampling())
    verdict = Verdict(reason=Reason.ABORTED, text="t")
    said = dice.choice(
        (events.Submit(request=request), events.Abort(rid="r", verdict=verdict), events.FlushCache(), ipc.Ping())
    )
    return encoded(dice, ipc.TO_RANK, said)


def to_app(dice: Random) -> bytes:
    """To an app, over a rank's ipc."""
    snapshot = ipc.Snapshot(rank=0, progress=dice.choice(SIZES[:12]), gauges={"pages": float("nan"), "x{y=z}": 1.0})
    emits = ipc.Emits(emits=(ipc.Emit(rid=str(hostile(dice))[:99].encode("utf-8", "replace").decode(), tokens=(1,)),))
    said = dice.choice(
        (snapshot, emits, ipc.PeersLost(peers=("x",)), ipc.LoadProgress(rank=0, what="w", done=1, total=0))
    )
    return encoded(dice, ipc.TO_APP, said)


def zmq_noise(dice: Random) -> bytes:
    """Bytes on a port that speaks ZeroMQ: a greeting and a handshake, damaged, and frames of any length."""
    greeting = b"\xff" + bytes(8) + b"\x7f\3\0NULL".ljust(23, b"\0") + bytes(32)
    ready = b"\4\x19\5READY\x0bSocket-Type\0\0\0\6DEALER"
    frame = dice.choice(
        (b"\0\3abc", b"\1\0", b"\2" + struct.pack(">Q", dice.choice(SIZES)) + b"x" * 64, b"\7", b"\4\5\4PING")
    )
    whole = greeting[:64] + ready + frame
    return damaged(dice, whole) if dice.random() < 0.8 else whole[: dice.randrange(len(whole))]
