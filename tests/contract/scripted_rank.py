"""A rank process without an engine: it speaks the real ipc, and what it does with a request stands in the request's id.

    echo…   the prompt comes back as the answer, one token a message (also any other id)
    hold…   one token, then nothing until an abort
    mute…   nothing until an abort
    fail…   the request fails before its first token
    break…  one token, and at the next ping it fails
    die…    the process exits with code 3
    stall…  the process stops reading

Who asks for logprobs gets -token/1000 for each token, and of the likeliest beside it the token itself and those that
follow it, each worth 1 less. A decode worker says nothing about the prompt of a request with a room.

What it was told is counted in the gauges of its snapshots: `seen{event=Abort}`, `rejected{reason=…}`.
"""

import os
import signal
import sys
import threading
from collections import Counter

import zmq

from baton_core.effects import Emit, LookUp
from baton_core.errors import Reason, Verdict
from baton_core.events import Abort, AbortAll, LookupFailed, Resolved, StopHere, Submit
from baton_core.request import Finish, FinishType, Request, TokenLogprob
from baton_io.config import from_json
from baton_io.ipc import TO_APP, TO_RANK, Emits, LookUps, Ping, RankReady, Snapshot, Stop
from baton_worker.config import RankConfig, Role

CONTEXT_TOKENS = 512


class ScriptedRank:
    """One rank; `run` returns when the app says stop."""

    def __init__(self, config: RankConfig, socket: "zmq.Socket[bytes]") -> None:
        self._config = config
        self._socket = socket
        self._live: dict[str, Request] = {}
        self._gauges: Counter[str] = Counter()
        self._turns = 0
        self._top: dict[str, int] = {}
        self._scores: dict[str, list[TokenLogprob]] = {}

    def run(self) -> None:
        self._say(
            RankReady(
                rank=0,
                pid=os.getpid(),
                rank_host="127.0.0.1",
                rank_port=0,
                fingerprint="scripted",
                kv_pages=64,
                page_tokens=self._config.page_tokens,
                kv_bytes=4_096,
                context_tokens=CONTEXT_TOKENS,
                kv_dtype=self._config.dtype,
                load_seconds=0.0,
            )
        )
        while True:
            message = TO_RANK.decode(self._socket.recv())
            self._turns += 1
            self._gauges[f"seen{{event={type(message).__name__}}}"] += 1
            match message:
                case Submit():
                    self._submit(message.request)
                case Abort():
                    self._abort(message.rid, message.verdict)
                case AbortAll():
                    for rid in list(self._live):
                        self._abort(rid, message.verdict)
                case StopHere():
                    self._emit(message.rid, finish=Finish(type=FinishType.STOP))
                case Resolved():
                    self._abort(message.rid, Verdict(reason=Reason.PEER_LOST, text=message.infos.incarnation))
                case LookupFailed():
                    self._abort(message.rid, message.verdict)
                case Ping():
                    for rid in [rid for rid in self._live if rid.startswith("break")]:
                        self._abort(rid, Verdict(reason=Reason.PEER_LOST, text="the peer went away"))
                    gauges = {**self._gauges, "live": len(self._live)}
                    self._say(Snapshot(rank=0, progress=self._turns, gauges=gauges))
                case Stop():
                    return

    def _submit(self, request: Request) -> None:
        if request.rejected is not None:
            self._gauges[f"rejected{{reason={request.rejected.reason.name.lower()}}}"] += 1
            self._emit(request.rid, finish=Finish(type=FinishType.ABORT, verdict=request.rejected))
            return
        self._live[request.rid] = request
        self._note_logprobs(request)
        self._gauges[f"sampling{{seed={request.sampling.seed},most={request.sampling.max_new_tokens}}}"] += 1
        act = {
            "hold": lambda: self._emit(request.rid, request.prompt[:1]),
            "mute": lambda: None,
            "fail": lambda: self._abort(request.rid, Verdict(reason=Reason.LOOKUP_FAILED, text="no such worker")),
            "brea": lambda: self._emit(request.rid, request.prompt[:1]),
            "die": lambda: os._exit(3),
            "stal": signal.pause,
            "look": lambda: self._say(LookUps(lookups=(LookUp(rid=request.rid, bootstrap=request.bootstrap),))),
        }
        act.get(request.rid.split("-")[0][:4], lambda: self._echo(request))()

    def _note_logprobs(self, request: Request) -> None:
        asked = request.sampling
        if asked.logprobs is not None:
            self._top[request.rid] = asked.logprobs
        if asked.prompt_logprobs_from is None or (request.room and self._config.role is Role.DECODE):
            return
        scored = [judged(token, asked.logprobs or 0) for token in request.prompt]
        scored[0] = TokenLogprob(token=request.prompt[0], logprob=None)
        self._scores[request.rid] = scored[asked.prompt_logprobs_from :]

    def _echo(self, request: Request) -> None:
        # The last one goes out with the finish, as from the real core; a frame that is no message must harm nobody.
        tokens = request.prompt[: request.sampling.max_new_tokens]
        self._socket.send(b"\xff not a message")
        for token in tokens[:-1]:
            self._emit(request.rid, (token,))
        stopped = tokens[-1] in request.sampling.stop_token_ids
        kind = FinishType.STOP if stopped else FinishType.LENGTH
        self._emit(request.rid, tokens[-1:], Finish(type=kind, matched=tokens[-1] if stopped else None))

    def _abort(self, rid: str, verdict: Verdict) -> None:
        if rid in self._live:
            self._emit(rid, finish=Finish(type=FinishType.ABORT, verdict=verdict))

    def _emit(self, rid: str, tokens: tuple[int, ...] = (), finish: Finish | None = None) -> None:
        if finish is not None:
            self._live.pop(rid, None)
        scores = tuple(self._scores.pop(rid, ())) if tokens else ()
        top = self._top.get(rid)
        logprobs = () if top is None else tuple(judged(token, top) for token in tokens)
        emit = Emit(rid=rid, tokens=tokens, finish=finish, logprobs=logprobs, prompt_logprobs=scores)
        self._say(Emits(emits=(emit,)))

    def _say(self, message: object) -> None:
        self._socket.send(TO_APP.encode(message))


def judged(token: int, top: int) -> TokenLogprob:
    """What this rank says of a token."""
    logprob = -token / 1000
    return TokenLogprob(
        token=token, logprob=logprob, top=tuple((token + index, logprob - index) for index in range(top))
    )


def main() -> None:
    config = from_json(RankConfig, sys.stdin.readline())
    # The end of stdin is the death of the app.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(9)), daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(config.ipc_address)
    ScriptedRank(config, socket).run()


if __name__ == "__main__":
    main()
