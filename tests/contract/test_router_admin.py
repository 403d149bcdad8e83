"""The operators' port: drain, undrain, add, remove, while requests flow."""

from urllib.parse import quote

from contract.fake_workers import (
    Client,
    FakeWorker,
    World,
    decodes,
    decodes_slowly,
    event,
    prefills,
    world,
)
from ports import free_port


def admin_of(w: World, port: int) -> Client:
    return Client(f"http://127.0.0.1:{port}", w.client.session)


async def served_by(w: World) -> list[int]:
    """How many requests each decode worker has got."""
    return [len(worker.received) for worker in w.decode]


async def ask(w: World, count: int) -> list[int]:
    statuses = []
    for _ in range(count):
        async with w.client.post() as response:
            await response.read()
            statuses.append(response.status)
    return statuses


async def test_a_drained_worker_gets_nothing_new_and_finishes_what_it_has_until_it_is_undrained() -> None:
    port = free_port()
    async with world(decode=(decodes_slowly, decodes), admin_port=port) as w:
        admin, url = admin_of(w, port), w.decode[0].url
        async with w.client.post() as running:
            assert await running.content.readany() == event({"text": "The "})
            async with admin.post(f"/workers/{quote(url, safe='')}/drain") as response:
                assert response.status == 200
            assert await ask(w, 4) == [200] * 4
            assert await served_by(w) == [1, 4]
            _, body = await admin.get("/workers")
            shown = next(worker for worker in body["workers"] if worker["url"] == url)
            assert (shown["state"], shown["reason"], shown["in_flight"]) == ("draining", "drained by an operator", 1)
            w.decode[0].release.set()
            assert await running.content.read() == event({"text": "capital "})
        async with admin.post(f"/workers/{url}/undrain") as response:
            assert response.status == 200
        await ask(w, 4)
        assert (await served_by(w))[0] > 1


async def test_a_worker_is_added_and_removed_while_the_router_runs() -> None:
    port = free_port()
    async with world(admin_port=port) as w, FakeWorker("prefill", w.prefill[0].rooms, prefills) as extra:
        admin = admin_of(w, port)
        async with admin.post("/workers", json={"url": extra.url, "role": "prefill"}) as response:
            assert response.status == 201
        await w.client.until("/ready", lambda _, body: all(one["state"] == "ready" for one in body["workers"]))
        assert await ask(w, 4) == [200] * 4
        assert len(extra.received) == 2
        async with admin.session.delete(f"{admin.url}/workers/{extra.url}") as response:
            assert response.status == 200
        assert await ask(w, 4) == [200] * 4
        assert len(extra.received) == 2
        assert len((await admin.get("/workers"))[1]["workers"]) == 2


async def test_what_no_one_knows_is_a_404_and_what_is_no_url_a_400() -> None:
    port = free_port()
    async with world(admin_port=port) as w:
        admin = admin_of(w, port)
        for method, path in (("POST", "/drain"), ("POST", "/undrain"), ("DELETE", "")):
            async with admin.session.request(method, f"{admin.url}/workers/http://10.9.9.9:1{path}") as response:
                assert response.status == 404
        async with admin.post("/workers", json={"url": "not-a-url", "role": "decode"}) as response:
            assert response.status == 400
        async with admin.post("/workers", json={"url": w.decode[0].url, "role": "boss"}) as response:
            assert response.status == 422


async def test_the_admin_routes_are_not_on_the_clients_port() -> None:
    async with world() as w:
        assert (await w.client.get("/workers"))[0] == 404
        async with w.client.post(f"/workers/{w.decode[0].url}/drain") as response:
            assert response.status == 404


async def test_a_body_that_is_no_worker_is_refused_whatever_is_in_it() -> None:
    port = free_port()
    async with world(admin_port=port) as w:
        admin = admin_of(w, port)
        bodies = (b"", b"{", b"\xff", b'{"url": NaN}', b'{"url": "\\ud800", "role": "decode"}', b"[" * 5_000, b"1e999")
        for body in bodies:
            async with admin.post("/workers", data=body) as response:
                assert response.status in (400, 422), body
                assert (await response.json())["error"]["message"]
        async with admin.post("/workers", data=b" " * 70_000) as response:
            assert response.status == 413
        async with admin.session.get(f"{admin.url}/nothing") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, 404)


async def test_what_is_told_to_all_workers_does_not_depend_on_the_clients_host_header() -> None:
    async with world() as w, w.client.post("/flush_cache?a=%ff", headers={"host": "["}) as response:
        assert response.status == 200
