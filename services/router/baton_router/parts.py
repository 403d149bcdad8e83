"""A request for several answers as requests for one each, and their answers as one; on JSON, without I/O.

    prompts p0 p1, n = 2   ->   parts 0 1 2 3 = p0 p0 p1 p1, part i·n + j, in room r + i·n + j
    answers                ->   choices (or list items) in that order, usage summed

A prompt's tokens count once, however many samples it has. Sample j of a request with a seed gets seed + j: the same
seed would draw the same text n times.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from baton_router.caller import Refused
from baton_router.exchange import Fields
from baton_router.failures import Rejection

PARTS_MAX = 256
RID_CHARS_MAX = 120
"""Of the client's id that is left in that of a part: workers take 128, and a retry adds to it."""
GENERATE = "/generate"
COMPLETIONS = "/v1/completions"
EACH_PROMPTS_OWN = (
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "session_params",
)
"""Fields of `/generate` that may be lists with one item for each prompt."""
SEEDS = ("seed", "sampling_seed")

_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a request was split into. `samples`: parts of one prompt, which follow one another."""

    route: str
    bodies: tuple[Fields, ...]
    samples: int
    is_stream: bool


def part_id(rid: str, number: int) -> str:
    """The request id of one part, no longer than workers take."""
    return f"{rid[:RID_CHARS_MAX]}-{number}"


def split(route: str, fields: Fields, rid: str) -> Parts | None:
    """The parts, or None where it asks for one answer, or for nothing a router understands. Raises Refused."""
    prompt_field, prompts = _prompts(route, fields)
    samples = _samples(route, fields)
    if prompts is None and samples == 1:
        return None
    count = samples * (1 if prompts is None else len(prompts))
    if not 0 < count <= PARTS_MAX:
        text = f"prompts times n must be between 1 and {PARTS_MAX}, not {count}"
        raise Refused(Rejection.INVALID_REQUEST, text)
    bodies = []
    for number in range(count):
        prompt, sample = divmod(number, samples)
        body = dict(fields)
        if prompts is not None:
            body[prompt_field] = prompts[prompt]
            if route == GENERATE:
                _take_own(body, prompt, len(prompts))
        if route == GENERATE:
            body["rid"] = _raw(part_id(rid, number))
        _ask_for_one(body, sample)
        bodies.append(body)
    is_stream = bytes(fields.get("stream", b"")) == b"true"
    return Parts(route=route, bodies=tuple(bodies), samples=samples, is_stream=is_stream)


def _prompts(route: str, fields: Fields) -> tuple[str, list[msgspec.Raw] | None]:
    """The field that holds a list of prompts, and the list; None for a single prompt."""
    names = ("text", "input_ids") if route == GENERATE else ("prompt",) if route == COMPLETIONS else ()
    for name in names:
        items = _items(fields.get(name))
        if items and bytes(items[0])[:1] in (b'"', b"["):
            return name, items
    return "", None


def _samples(route: str, fields: Fields) -> int:
    wanted = fields.get("n")
    if route == GENERATE:
        wanted = _object(fields.get("sampling_params")).get("n")
    try:
        number = 1 if wanted is None else msgspec.json.decode(wanted, type=int | None) or 1
    except _UNREADABLE:
        return 1  # the worker says what is wrong with it
    return number if number > 0 else 1


def _take_own(body: Fields, prompt: int, prompts: int) -> None:
    for name in EACH_PROMPTS_OWN:
        items = _items(body.get(name))
        if items is None or (name == "token_ids_logprob" and (not items or bytes(items[0])[:1] != b"[")):
            continue
        if len(items) != prompts:
            raise Refused(Rejection.INVALID_REQUEST, f"{name} has {len(items)} items for {prompts} prompts")
        body[name] = items[prompt]


def _ask_for_one(body: Fields, sample: int) -> None:
    """One sample instead of n, with a seed of its own."""
    parameters = _object(body.get("sampling_params"))
    for place in (parameters, body):
        if "n" in place:
            place["n"] = msgspec.Raw(b"1")
        for name in SEEDS:
            if sample and name in place:
                place[name] = _later_seed(place[name], sample)
    if parameters:
        body["sampling_params"] = _raw(parameters)


def _later_seed(raw: msgspec.Raw, sample: int) -> msgspec.Raw:
    try:
        seed = msgspec.json.decode(raw, type=int)
    except _UNREADABLE:
        return raw  # null, or the worker's to refuse
    return _raw(seed + sample)


def _items(raw: msgspec.Raw | None) -> list[msgspec.Raw] | None:
    if raw is None or bytes(raw)[:1] != b"[":
        return None
    try:
        return _LIST.decode(raw)
    except _UNREADABLE:
        return None


def _object(raw: msgspec.Raw | None) -> dict[str, msgspec.Raw]:
    if raw is None or bytes(raw)[:1] != b"{":
        return {}
    try:
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except _UNREADABLE:
        return {}


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


# -- answers


def join(parts: Parts, bodies: list[bytes]) -> bytes:
    """One JSON answer from that of every part. Raises ValueError when one of them is no such answer."""
    try:
        answers = [msgspec.json.decode(body) for body in bodies]
    except _UNREADABLE as error:
        raise ValueError(f"a worker's answer is not JSON ({error})") from error
    if parts.route == GENERATE:
        return msgspec.json.encode(answers)
    choices = []
    usage = Usage(parts.samples)
    for number, answer in enumerate(answers):
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
            raise ValueError("a worker's answer has no choices")
        choices += [choice | {"index": number} for choice in answer["choices"]]
        usage.add(number, answer.get("usage"))
    merged = answers[0] | {"choices": choices}
    if usage.total:
        merged["usage"] = usage.total
    return msgspec.json.encode(merged)


class Usage:
    """The sum of what the parts used."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.total: dict[str, Any] = {}

    def add(self, number: int, usage: object) -> None:
        """What one part used; of samples of the same prompt only the first counts it."""
        if not isinstance(usage, dict):
            return
        prompt = usage.get("prompt_tokens", 0) if number % self._samples == 0 else 0
        completion = usage.get("completion_tokens", 0)
        for name, tokens in (("prompt_tokens", prompt), ("completion_tokens", completion)):
            self.total[name] = self.total.get(name, 0) + tokens
        self.total["total_tokens"] = self.total["prompt_tokens"] + self.total["completion_tokens"]


class EventJoiner:
    """The streams of all parts as one: every event says which part it belongs to, and the end comes once."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._usage = Usage(parts.samples)
        self._usage_event: dict[str, Any] | None = None
        self._id: object = None

    def take(self, number: int, events: bytes) -> bytes:
        """Whole events of one part, as the client shall see them."""
        out = []
        for line in events.splitlines():
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data and data != b"[DONE]":
                out.append(self._marked(number, data))
        return b"".join(out)

    def end(self) -> bytes:
        """After the end of every part."""
        last = b"data: [DONE]\n\n"
        if self._usage_event is None:
            return last
        return _event(self._usage_event | {"usage": self._usage.total}) + last

    def _marked(self, number: int, data: bytes) -> bytes:
        try:
            said = msgspec.json.decode(data)
        except _UNREADABLE:
            return b""  # no event of a worker's
        if not isinstance(said, dict):
            return b""
        if self._parts.route == GENERATE:
            return _event(said | {"index": number})
        if "id" in said:
            self._id = self._id or said["id"]
            said["id"] = self._id
        if said.get("choices") == [] and said.get("usage"):
            self._usage.add(number, said["usage"])
            self._usage_event = said
            return b""
        for choice in said.get("choices", ()):
            choice["index"] = number
        return _event(said)


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
