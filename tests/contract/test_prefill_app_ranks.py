"""A whole prefill app of many ranks: its own registry, another one, and decode's look-ups; only the ranks are scripted."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from baton_core.effects import LookUp
from baton_core.errors import EngineError
from baton_core.events import BootstrapInfos, LookupFailed, Resolved
from baton_core.limits import Limits
from baton_core.request import Bootstrap
from baton_io.peers import Peers
from baton_prefill.app import run
from baton_worker.config import PrefillConfig, Role
from baton_worker.materials import Materials
from baton_worker.models import resolve_model
from baton_worker.tokenizer import Tokenizer
from contract.registry_servers import listening_socket, registry
from contract.worker_apps import LIMITS, SCRIPTED_RANK, model_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return model_tokenizer()


@dataclass
class App:
    """A prefill worker that is registered at its own registry and at `other`."""

    http: httpx.AsyncClient
    own: int
    other: int
    exit_code: "asyncio.Task[int]"
    session: aiohttp.ClientSession

    async def look_up(self, registry_port: int, room: int, lookup_ms: int = 1_000) -> Resolved | LookupFailed:
        """As a decode worker that knows nothing yet."""
        bootstrap = Bootstrap(host="127.0.0.1", port=registry_port, room=room)
        return await Peers(self.session, Limits(lookup_ms=lookup_ms)).resolve(LookUp(rid="r", bootstrap=bootstrap))

    async def found(self, registry_port: int, room: int) -> BootstrapInfos:
        answer = await self.look_up(registry_port, room)
        assert isinstance(answer, Resolved), answer
        return answer.infos


@asynccontextmanager
async def prefill(tokenizer: Tokenizer, token: str | None = None, **options: Any) -> AsyncIterator[App]:
    ports = []
    for _ in range(2):
        bound = listening_socket()
        ports.append(bound.getsockname()[1])
        bound.close()
    materials = Materials(
        role=Role.PREFILL,
        incarnation="life1",
        model=resolve_model("smollm2-135m-instruct"),
        tokenizer=tokenizer,
        rank_command=(sys.executable, str(SCRIPTED_RANK)),
    )
    async with registry(token=token) as other, aiohttp.ClientSession() as session:
        urls = (f"http://127.0.0.1:{other}",)
        config = PrefillConfig(port=ports[0], bootstrap_port=ports[1], registry=urls, limits=LIMITS, **options)
        exit_code = asyncio.create_task(run(config, materials))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", timeout=10) as http:
            async with asyncio.timeout(15):
                while True:
                    if exit_code.done():
                        raise exit_code.exception() or AssertionError(exit_code)
                    try:
                        if (await http.get("/ready")).status_code == 200:
                            break
                    except httpx.TransportError:
                        await asyncio.sleep(0.02)
            yield App(http, ports[1], other, exit_code, session)
        if not exit_code.done():
            os.kill(os.getpid(), signal.SIGTERM)  # the app's own handler: it drains
        async with asyncio.timeout(10):
            await exit_code


async def test_all_ranks_of_all_units_are_registered_everywhere(tokenizer: Tokenizer) -> None:
    async with prefill(tokenizer, tp=2, pp=2, dp=2) as app:
        infos = [await app.found(port, room) for port in (app.own, app.other) for room in (4, 7)]
        async with app.session.get(f"http://127.0.0.1:{app.other}/v1/instances") as answer:
            (entry,) = (await answer.json())["instances"]
    assert [one.incarnation for one in infos] == ["life1/0.0", "life1/1.0"] * 2
    assert [[rank.port for rank in one.endpoints] for one in infos[:2]] == [
        [40_000, 40_001, 40_002, 40_003],
        [40_004, 40_005, 40_006, 40_007],
    ]
    assert (entry["ranks_registered"], entry["ready"], entry["fingerprint"]) == (8, True, "scripted")
    layout = entry["layout"]
    sizes = [layout[key] for key in ("attn_tp_size", "attn_cp_size", "dp_size", "pp_size", "page_size")]
    assert sizes == [2, 1, 2, 2, 16] and layout["follow_bootstrap_room"] is True


@pytest.mark.parametrize("options", [{"load_balance_method": "round_robin"}, {"force_query_prefill_dp_rank": True}])
async def test_a_room_that_nobody_can_guess_is_found_where_its_request_points(
    tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    async with prefill(tokenizer, dp=2, **options) as app:
        ask = {"bootstrap_host": "localhost", "bootstrap_port": app.own, "bootstrap_room": 4, "routed_dp_rank": 1}
        asked = asyncio.create_task(app.http.post("/generate", json={"text": "Hi", "rid": "reg-1"} | ask))
        assert (await app.found(app.own, 4)).dp_rank == 1, "where room mod dp_size would have said 0"
        elsewhere = await app.look_up(app.other, 4, lookup_ms=200)
        assert isinstance(elsewhere, LookupFailed), "another registry was not asked to know"
        await app.http.post("/abort_request", json={"rid": "reg-1"})
        await asked
        assert (await app.found(app.own, 4)).dp_rank == 1, "decode's leg may come late"


async def test_a_dead_unit_leaves_the_registries_and_the_worker_follows(tokenizer: Tokenizer) -> None:
    async with prefill(tokenizer, dp=2) as app:
        ask = {"bootstrap_host": "127.0.0.1", "bootstrap_port": app.own, "bootstrap_room": 4}
        asked = asyncio.create_task(app.http.post("/generate", json={"text": "Hi", "rid": "hold-1"} | ask))
        assert (await app.found(app.other, 5)).dp_rank == 1
        async with asyncio.timeout(5):
            while (await app.http.get("/debug/snapshot")).json()["live_requests"] == 0:
                pass
        ranks = (await app.http.get("/server_info")).json()["ranks"]
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        for port in (app.own, app.other):
            async with asyncio.timeout(5):
                while isinstance(await app.look_up(port, 5), Resolved):
                    pass
            gone = await app.look_up(port, 5)
            assert isinstance(gone, LookupFailed) and "not found for dp_rank=1" in gone.verdict.text
            assert (await app.found(port, 4)).dp_rank == 0, "the other unit can still be found, for what it has"
        await app.http.post("/abort_request", json={"rid": "hold-1"})
        assert (await asked).status_code == 200
        assert await app.exit_code == 1
        answer = await app.look_up(app.other, 4, lookup_ms=200)
        assert isinstance(answer, LookupFailed) and "0 workers registered" in answer.verdict.text


async def test_with_a_token_prefill_writes_to_registries_and_strangers_do_not(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    async with prefill(tokenizer, token="s3cret", registry_token_file=str(file)) as app:
        for port in (app.own, app.other):
            assert (await app.found(port, 4)).incarnation == "life1/0.0", "look-ups need no token"
            url = f"http://127.0.0.1:{port}/register_dp_rank"
            async with app.session.post(url, json={"bootstrap_room": 1, "dp_rank": 0}) as answer:
                assert answer.status == 401
            head = {"authorization": "Bearer s3cret"}
            async with app.session.post(url, json={"bootstrap_room": 1, "dp_rank": 0}, headers=head) as answer:
                assert answer.status == 200


async def test_a_token_file_that_cannot_be_read_ends_the_start_by_its_name(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "empty").touch()
    for name in ("empty", "missing"):
        with pytest.raises(EngineError, match=f"registry_token_file: .*{name}"):
            async with prefill(tokenizer, registry_token_file=str(tmp_path / name)):
                raise AssertionError("it started")
