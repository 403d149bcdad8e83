"""uvicorn's HTTP/1.1 with limits: a head that does not end, and a client that stops in the middle of a request.

    connected ── first byte ──► head ── complete ──► body ── complete ──► answered, and from the beginning
        idle_s │                HEAD_MS │            BODY_STALL_MS │ without a byte of it
               └─ closed                └─ 408, closed             └─ closed: the application hears that the client is gone

What comes is counted until it means something: the bytes of a head, of a chunk's extensions, of trailers. More than
HEAD_BYTES_MAX of them are a 431. Without this a single client can have a server keep whatever it sends.
"""

import asyncio
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton_core.limits import BODY_STALL_MS, HEAD_BYTES_MAX, HEAD_MS

log = structlog.get_logger()

TOO_LONG = b"431 Request Header Fields Too Large"
TOO_LATE = b"408 Request Timeout"


class GuardedHttp(HttpToolsProtocol):
    """One connection of a client."""

    _unread_bytes = 0  # received since anything that arrived was complete
    _in_head = False
    _in_body = False
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol. Who says nothing at all is let go like one who has nothing more to say."""
        super().connection_made(transport)
        self._wait(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self.transport.is_closing():
            return None
        self._unread_bytes += len(data)
        was_in_head, was_in_body = self._in_head, self._in_body
        super().data_received(data)
        if self._unread_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            return self._refuse(TOO_LONG)
        if self._in_head:
            if not was_in_head:
                self._wait(HEAD_MS / 1000, self._head_is_late)
        elif self._in_body:
            self._wait(BODY_STALL_MS / 1000, self._body_stalls)
        elif was_in_head or was_in_body or self._deadline is not None:
            self._wait_no_more()
        return None

    # -- httptools' calls

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head is complete."""
        self._unread_bytes = 0
        self._in_head, self._in_body = False, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of its body."""
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """It is complete."""
        self._unread_bytes = 0
        self._in_body = False
        super().on_message_complete()

    # -- the end of patience

    def _wait(self, seconds: float, late: Any) -> None:
        self._wait_no_more()
        self._deadline = self.loop.call_later(seconds, late)

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        self._refuse(TOO_LATE)

    def _body_stalls(self) -> None:
        if self.flow.read_paused:  # it is we who do not read
            self._wait(BODY_STALL_MS / 1000, self._body_stalls)
        elif not self.transport.is_closing():
            log.info("http.body_stalls", client=self.client, stall_ms=BODY_STALL_MS)
            self.transport.close()

    def _refuse(self, status: bytes) -> None:
        """Say why, and close."""
        if self.transport.is_closing():
            return
        log.info("http.refused", client=self.client, status=status.decode())
        answer = (b"HTTP/1.1 ", status, b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        if self.cycle is None or self.cycle.response_complete:  # else it would be taken for a part of an answer
            self.transport.write(b"".join(answer))
        self.transport.close()
