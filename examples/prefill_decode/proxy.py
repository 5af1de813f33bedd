"""A proxy before two vLLM engines: one computes prompts, the other generates, and the KV cache goes from the
first to the second through UMBP's pool.

    python proxy.py --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200 --port 8000

Each completion is asked of the prefill engine first, for one token. Its answer tells what it stores of the
prompt (`kv_transfer_params`), which goes with the request to the decode engine, whose answer is the client's.
Whatever the prefill engine does wrong costs a computation: the decode engine can do without it. It is one
engine of each kind, to be read and changed; aiohttp comes with vLLM.
"""

import argparse
import json
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

log = logging.getLogger("proxy")

FORWARDED = ("Authorization", "X-Request-Id")
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "n", "best_of", "max_completion_tokens")
NEEDED = {"/v1/completions": ("prompt", "prompt_embeds"), "/v1/chat/completions": ("messages",)}
"""The endpoints, and what a request to each must have one of."""
CONNECT_TIMEOUT_S = 10.0

SESSION = web.AppKey("session", aiohttp.ClientSession)


class Proxy:
    """Both engines' addresses, and how long a prompt may take."""

    def __init__(self, prefill: str, decode: str, prefill_timeout_s: float) -> None:
        self.prefill = prefill.rstrip("/")
        self.decode = decode.rstrip("/")
        self.prefill_timeout = aiohttp.ClientTimeout(total=prefill_timeout_s, sock_connect=CONNECT_TIMEOUT_S)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=256 << 20, middlewares=[_in_words_of_the_api])
        app.cleanup_ctx.append(_session)
        for endpoint in NEEDED:
            app.router.add_post(endpoint, self.complete)
        app.router.add_get("/{path:.*}", self.look)
        return app

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await _asked(request)
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
                answered = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            log.warning("the prefill engine failed, the decode engine goes on alone: %s", _why(error))
            return None
        told = answered.get("kv_transfer_params") if isinstance(answered, dict) else None
        return told if isinstance(told, dict) else None

    async def _decode(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        call = request.app[SESSION].post(self.decode + request.path, json=body, headers=_headers(request))
        return await _passed_on(request, call)

    async def look(self, request: web.Request) -> web.StreamResponse:
        """Models, health, metrics: the decode engine's."""
        call = request.app[SESSION].get(self.decode + request.path_qs, headers=_headers(request))
        return await _passed_on(request, call)


async def _session(app: web.Application) -> AsyncIterator[None]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        app[SESSION] = session
        yield


@web.middleware
async def _in_words_of_the_api(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refusals of the proxy's own, as objects of the form that the engines' have."""
    try:
        return await handler(request)
    except web.HTTPError as refusal:
        kind = HTTPStatus(refusal.status).phrase.replace(" ", "") + "Error"
        error = {"message": refusal.text, "type": kind, "param": None, "code": refusal.status}
        refusal.text = json.dumps({"error": error})
        refusal.content_type = "application/json"
        raise


async def _asked(request: web.Request) -> dict[str, Any]:
    """The request's body; what no engine could answer is refused before either is asked."""
    try:
        body = await request.json()
    except (ValueError, LookupError, RecursionError, web.RequestPayloadError) as error:
        raise web.HTTPBadRequest(text=f"the request's body can't be read as JSON: {_why(error)}") from None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the request's body must be a JSON object")
    needed = NEEDED[request.path]
    if all(body.get(name) is None for name in needed):
        raise web.HTTPBadRequest(text=f"the request has no {' or '.join(map(repr, needed))}")
    return body


def _headers(request: web.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in FORWARDED if name in request.headers}


async def _passed_on(request: web.Request, call: Any) -> web.StreamResponse:
    """The engine's answer as it comes, byte by byte where it is streamed."""
    response = web.StreamResponse()
    try:
        async with call as answer:
            response.set_status(answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
    except aiohttp.ClientError as error:
        if not response.prepared:
            log.warning("the decode engine doesn't answer: %s", _why(error))
            raise web.HTTPBadGateway(text=f"the decode engine doesn't answer: {_why(error)}") from None
        log.warning("an answer broke off: %s", _why(error))
        # Its beginning is sent: the client sees that it has no end.
        if request.transport is not None:
            request.transport.close()
    return response


def _why(error: Exception) -> str:
    return f"{type(error).__name__} {' '.join(str(error).split())}"


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right:
        raise argparse.ArgumentTypeError(f"must be an URL such as http://10.0.0.1:8100, not {text!r}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--prefill", type=_url, required=True, help="URL of the engine that computes prompts")
    parser.add_argument("--decode", type=_url, required=True, help="URL of the engine that generates")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill-timeout-s", type=float, default=300.0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    app = Proxy(arguments.prefill, arguments.decode, arguments.prefill_timeout_s).app()
    try:
        # Who hangs up is served no further: the engines hear of it, too.
        web.run_app(app, host=arguments.host, port=arguments.port, handler_cancellation=True, print=None)
    except (OSError, OverflowError) as error:
        sys.exit(f"proxy: can't listen on {arguments.host}:{arguments.port}: {error}")


if __name__ == "__main__":
    main()
