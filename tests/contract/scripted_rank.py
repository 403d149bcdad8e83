"""A rank process without an engine: it speaks the real ipc, and what it does with a request stands in the request's id.

    echo…   the prompt comes back as the answer, one token a message (also any other id)
    hold…   one token, then nothing until an abort
    step…   as echo, but a token at each ping
    mute…   nothing until an abort
    fail…   the request fails before its first token
    break…  one token, and at the next ping it fails
    die…    the process exits with code 3
    words…  the process says why and exits with code 1
    stall…  the process stops reading
    reg…    the room is to be registered for this DP rank; then as hold

Who asks for logprobs gets -token/1000 for each token, and of the likeliest beside it the token itself and those that
follow it, each worth 1 less. A decode worker says nothing about the prompt of a request with a room.

Rank r has 64 - r pages and a context of 512 - r tokens. What it was told is counted in the gauges of its snapshots:
`seen{event=Abort}`, `rejected{reason=…}`.
"""

import os
import signal
import sys
import threading
from collections import Counter

import zmq

from baton_core.effects import Emit, LookUp, RegisterRank
from baton_core.errors import Reason, Verdict
from baton_core.events import Abort, AbortAll, Continue, LookupFailed, Pause, Resolved, StopHere, Submit
from baton_core.kv_layout import UnitLayout
from baton_core.request import Finish, FinishType, Request, TokenLogprob
from baton_io.config import from_json
from baton_io.ipc import (
    TO_APP,
    TO_RANK,
    Emits,
    LoadProgress,
    LookUps,
    Ping,
    RankFailed,
    RankReady,
    RegisterRanks,
    Snapshot,
    Stop,
)
from baton_worker.config import RankConfig, Role

CONTEXT_TOKENS = 512
LAYOUT = UnitLayout(layers=30, kv_heads=3, head_dim=64, element_bytes=4, page_tokens=16)


class ScriptedRank:
    """One rank; `run` returns when the app says stop."""

    def __init__(self, config: RankConfig, socket: "zmq.Socket[bytes]") -> None:
        self._config = config
        self._dp_rank = config.parallel.place(config.rank).dp_rank
        self._socket = socket
        self._live: dict[str, Request] = {}
        self._gauges: Counter[str] = Counter()
        self._turns = 0
        self._top: dict[str, int] = {}
        self._scores: dict[str, list[TokenLogprob]] = {}
        self._steps: dict[str, list[int]] = {}  # tokens of `step…` that are still to come

    def run(self) -> None:
        rank = self._config.rank
        self._say(LoadProgress(rank=rank, what="weights", done=1, total=1))
        self._say(
            RankReady(
                rank=rank,
                pid=os.getpid(),
                rank_host="127.0.0.1",
                rank_port=40_000 + rank,
                fingerprint="scripted",
                layout=LAYOUT.to_text(),
                kv_pages=64 - rank,
                page_tokens=self._config.page_tokens,
                kv_bytes=4_096,
                context_tokens=CONTEXT_TOKENS - rank,
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
                case Pause() | Continue():
                    self._gauges["paused"] = int(isinstance(message, Pause))
                case StopHere():
                    self._emit(message.rid, finish=Finish(type=FinishType.STOP))
                case Resolved():
                    self._abort(message.rid, Verdict(reason=Reason.PEER_LOST, text=message.infos.incarnation))
                case LookupFailed():
                    self._abort(message.rid, message.verdict)
                case Ping():
                    for rid in [rid for rid in self._live if rid.startswith("break")]:
                        self._abort(rid, Verdict(reason=Reason.PEER_LOST, text="the peer went away"))
                    for rid in [rid for rid in self._live if rid.startswith("step")]:
                        self._step(rid)
                    live = {"live": len(self._live), "queue_requests{queue=running}": len(self._live)}
                    pages = {"pages": 64, "pages_free": 64 - len(self._live)}
                    self._say(Snapshot(rank=rank, progress=self._turns, gauges={**self._gauges, **live, **pages}))
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
            "step": lambda: self._steps.update({request.rid: list(echo_of(request))}),
            "mute": lambda: None,
            "fail": lambda: self._abort(request.rid, Verdict(reason=Reason.LOOKUP_FAILED, text="no such worker")),
            "brea": lambda: self._emit(request.rid, request.prompt[:1]),
            "die": lambda: os._exit(3),
            "stal": signal.pause,
            "word": lambda: self._last_words(),
            "reg": lambda: self._register(request),
            "look": lambda: self._say(LookUps(lookups=(LookUp(rid=request.rid, bootstrap=request.bootstrap),))),
        }
        act.get(request.rid.split("-")[0][:4], lambda: self._echo(request))()

    def _last_words(self) -> None:
        self._say(RankFailed(rank=self._config.rank, text="rank 1 did not take part in a collective"))
        self._socket.close(linger=1_000)
        self._socket.context.term()
        os._exit(1)

    def _register(self, request: Request) -> None:
        assert request.bootstrap is not None
        one = RegisterRank(rid=request.rid, room=request.room, dp_rank=self._dp_rank, bootstrap=request.bootstrap)
        self._say(RegisterRanks(rooms=(one,)))
        self._emit(request.rid, request.prompt[:1])

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
        tokens = echo_of(request)
        self._socket.send(b"\xff not a message")
        for token in tokens[:-1]:
            self._emit(request.rid, (token,))
        self._end(request, tokens[-1])

    def _step(self, rid: str) -> None:
        token, *self._steps[rid] = self._steps[rid]
        if self._steps[rid]:
            self._emit(rid, (token,))
        else:
            self._end(self._live[rid], token)

    def _end(self, request: Request, token: int) -> None:
        stopped = token in request.sampling.stop_token_ids
        kind = FinishType.STOP if stopped else FinishType.LENGTH
        self._emit(request.rid, (token,), Finish(type=kind, matched=token if stopped else None))

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


def echo_of(request: Request) -> tuple[int, ...]:
    """The prompt, as an answer. A continuation has what was told of it before at the end of its prompt."""
    told = request.sampling.output_offset
    prompt = request.prompt[: len(request.prompt) - told]
    assert request.prompt[len(prompt) :] == prompt[:told], "the answer so far is what the echo of the prompt was"
    return prompt[told:][: request.sampling.max_new_tokens]


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
