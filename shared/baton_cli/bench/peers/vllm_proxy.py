"""The smallest router for vLLM's prefill/decode pairs: `python -m baton_cli.bench.peers.vllm_proxy PORT PREFILL DECODE`.

Prefill is asked for one token; what it answers as `kv_transfer_params` goes to decode with the same body, whose stream is
passed on as it comes. vLLM has no such router in its own package.
"""

import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

from baton_cli.bench.client import KEEPALIVE_SECONDS

REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ROUTE = "/v1/completions"
SESSION = web.AppKey("session", aiohttp.ClientSession)


def make_app(prefill: str, decode: str) -> web.Application:
    """The proxy in front of one pair."""

    async def session(app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=600)
        # Its servers are paused while ours are measured, and give idle connections up meanwhile.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as opened:
            app[SESSION] = opened
            yield

    async def complete(request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        first = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")}
        first |= {"stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
        async with request.app[SESSION].post(prefill + ROUTE, json=first) as answer:
            if answer.status != 200:
                return web.Response(status=answer.status, body=await answer.read())
            params = (await answer.json())["kv_transfer_params"]
        async with request.app[SESSION].post(decode + ROUTE, json=body | {"kv_transfer_params": params}) as answer:
            response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    async def models(request: web.Request) -> web.Response:
        async with request.app[SESSION].get(decode + "/v1/models") as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")

    app = web.Application(client_max_size=16 * 1024 * 1024)
    app.cleanup_ctx.append(session)
    app.router.add_post(ROUTE, complete)
    app.router.add_get("/health", models)
    app.router.add_get("/v1/models", models)
    return app


def main() -> None:
    """Serve on loopback until a signal."""
    port, prefill, decode = sys.argv[1:4]
    web.run_app(make_app(prefill, decode), host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main()
