"""A proxy before two vLLM engines: one computes prompts, the other generates, and the KV cache goes from the
first to the second through UMBP's pool.

    python proxy.py --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200 --port 8000

Each completion is asked of the prefill engine first, for one token. Its answer tells what it stores of the
prompt (`kv_transfer_params`), which goes with the request to the decode engine, whose answer is the client's.
Whatever the prefill engine does wrong costs a computation: the decode engine can do without it. It is one
engine of each kind, to be read and changed; aiohttp comes with vLLM.
"""

import argparse
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

log = logging.getLogger("proxy")

FORWARDED = ("Authorization", "X-Request-Id")
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "n", "best_of", "max_completion_tokens")

SESSION = web.AppKey("session", aiohttp.ClientSession)


class Proxy:
    """Both engines' addresses, and how long a prompt may take."""

    def __init__(self, prefill: str, decode: str, prefill_timeout_s: float) -> None:
        self.prefill = prefill.rstrip("/")
        self.decode = decode.rstrip("/")
        self.prefill_timeout = aiohttp.ClientTimeout(total=prefill_timeout_s)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=256 << 20)
        app.cleanup_ctx.append(_session)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_get("/{path:.*}", self.look)
        return app

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not isinstance(body, dict):
            raise web.HTTPBadRequest(text="the request must be a JSON object")
        told = await self._prefill(request, body)
        # A client's own word for it would be as good as any, and is not wanted.
        body.pop("kv_transfer_params", None)
        return await self._decode(request, body | ({"kv_transfer_params": told} if told else {}))

    async def _prefill(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any] | None:
        """What the engine that has now computed the prompt tells the other; None if it didn't work."""
        asked = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
        asked |= {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        call = request.app[SESSION].post(
            self.prefill + request.path, json=asked, headers=_headers(request), timeout=self.prefill_timeout
        )
        try:
            async with call as answer:
                answer.raise_for_status()
                told = (await answer.json()).get("kv_transfer_params")
                return told if isinstance(told, dict) else None
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            log.warning("the prefill engine failed, the decode engine goes on alone: %r", error)
            return None

    async def _decode(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        call = request.app[SESSION].post(self.decode + request.path, json=body, headers=_headers(request))
        return await _passed_on(request, call)

    async def look(self, request: web.Request) -> web.StreamResponse:
        """Models, health, metrics: the decode engine's."""
        call = request.app[SESSION].get(self.decode + request.path_qs, headers=_headers(request))
        return await _passed_on(request, call)


async def _session(app: web.Application) -> AsyncIterator[None]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        app[SESSION] = session
        yield


def _headers(request: web.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in FORWARDED if name in request.headers}


async def _passed_on(request: web.Request, call: Any) -> web.StreamResponse:
    """The engine's answer as it comes, byte by byte where it is streamed."""
    try:
        async with call as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response
    except aiohttp.ClientConnectorError as error:
        raise web.HTTPBadGateway(text=f"the decode engine can't be reached: {error}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--prefill", required=True, help="URL of the engine that computes prompts")
    parser.add_argument("--decode", required=True, help="URL of the engine that generates")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill-timeout-s", type=float, default=300.0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    proxy = Proxy(arguments.prefill, arguments.decode, arguments.prefill_timeout_s)
    # Who hangs up is served no further: the engines hear of it, too.
    web.run_app(proxy.app(), host=arguments.host, port=arguments.port, handler_cancellation=True, print=None)


if __name__ == "__main__":
    main()
