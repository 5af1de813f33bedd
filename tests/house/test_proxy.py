"""The example's proxy before engines that are well, wrong or away: it answers in the API's form, and no
traceback is logged.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp comes with vLLM: run `make setup`")

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:aiohttp")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RIGHT = {"model": "tiny", "prompt": "Once", "max_tokens": 8}
HANDED_OVER = {"remote": 1}


@pytest.fixture(scope="module")
def proxy(project_root: Path) -> ModuleType:
    path = project_root / "examples" / "prefill_decode" / "proxy.py"
    spec = importlib.util.spec_from_file_location("prefill_decode_proxy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def nobody() -> Iterator[str]:
    """An engine's URL at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


class Engine:
    """What it was asked, and what it answers: an object, or whatever else the test does with the request."""

    def __init__(self, answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | object) -> None:
        self.asked: list[Any] = []
        self._answer = answer

    async def reply(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json() if request.can_read_body else None)
        return await self._answer(request) if callable(self._answer) else web.json_response(self._answer)

    def server(self) -> TestServer:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.reply)
        return TestServer(app)


Asking = Callable[[TestClient[Any, Any]], Awaitable[None]]


@pytest.fixture
def between(proxy: ModuleType, caplog: pytest.LogCaptureFixture) -> Callable[..., None]:
    """Asks the proxy between two engines, of which a text is one's URL; nothing may be logged as an error."""

    async def run(prefill: Engine | str, decode: Engine | str, ask: Asking) -> None:
        servers = [each.server() for each in (prefill, decode) if isinstance(each, Engine)]
        for server in servers:
            await server.start_server()
        started = iter(servers)
        urls = [
            each if isinstance(each, str) else str(next(started).make_url("")) for each in (prefill, decode)
        ]
        async with TestClient(TestServer(proxy.Proxy(*urls, 5.0).app())) as client:
            await ask(client)
        for server in servers:
            await server.close()

    def checked(prefill: Engine | str, decode: Engine | str, ask: Asking) -> None:
        with caplog.at_level(logging.WARNING):
            asyncio.run(run(prefill, decode, ask))
        assert not [each for each in caplog.records if each.exc_info or each.levelno >= logging.ERROR]

    return checked


async def refused(answer: aiohttp.ClientResponse, status: int, kind: str) -> str:
    told = await answer.json()
    assert answer.status == status, told
    error = told["error"]
    assert (error["type"], error["code"], error["param"]) == (kind, status, None)
    assert len(error["message"].splitlines()) == 1
    return str(error["message"])


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (COMPLETIONS, b"", "can't be read as JSON"),
        (COMPLETIONS, b"{", "can't be read as JSON"),
        (COMPLETIONS, b"\xff\xfe", "can't be read as JSON"),
        (COMPLETIONS, b'{"a":' * 100_000, "can't be read as JSON"),
        (COMPLETIONS, b"[1]", "must be a JSON object"),
        (CHAT, b"null", "must be a JSON object"),
        (COMPLETIONS, b"{}", "has no 'prompt' or 'prompt_embeds'"),
        (COMPLETIONS, b'{"messages": []}', "has no 'prompt'"),
        (CHAT, b'{"prompt": "x"}', "has no 'messages'"),
        (CHAT, b'{"messages": null}', "has no 'messages'"),
    ],
)
def test_what_no_engine_could_answer_is_refused_before_any_is_asked(
    between: Callable[..., None], path: str, body: bytes, words: str
) -> None:
    prefill, decode = Engine({}), Engine({})

    async def ask(client: TestClient[Any, Any]) -> None:
        assert words in await refused(await client.post(path, data=body), 400, "BadRequestError")

    between(prefill, decode, ask)
    assert prefill.asked == decode.asked == []


def test_a_body_in_an_unknown_charset_is_refused(between: Callable[..., None]) -> None:
    headers = {"Content-Type": "application/json; charset=no-such"}

    async def ask(client: TestClient[Any, Any]) -> None:
        answer = await client.post(COMPLETIONS, data=json.dumps(RIGHT).encode(), headers=headers)
        assert "no-such" in await refused(answer, 400, "BadRequestError")

    between(Engine({}), Engine({}), ask)


def test_what_is_not_there_is_refused_in_the_same_form(between: Callable[..., None]) -> None:
    async def ask(client: TestClient[Any, Any]) -> None:
        await refused(await client.post("/v1/nothing", json=RIGHT), 405, "MethodNotAllowedError")

    between(Engine({}), Engine({}), ask)


def test_a_decode_engine_that_is_away_is_a_bad_gateway_and_one_sentence(
    between: Callable[..., None], nobody: str
) -> None:
    async def ask(client: TestClient[Any, Any]) -> None:
        for answer in (await client.post(COMPLETIONS, json=RIGHT), await client.get("/v1/models")):
            assert "the decode engine doesn't answer" in await refused(answer, 502, "BadGatewayError")

    between(Engine({}), nobody, ask)


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def test_a_decode_engine_that_hangs_up_is_a_bad_gateway(between: Callable[..., None]) -> None:
    async def ask(client: TestClient[Any, Any]) -> None:
        await refused(await client.post(COMPLETIONS, json=RIGHT), 502, "BadGatewayError")

    between(Engine({}), Engine(hang_up), ask)


def test_an_answer_that_breaks_off_has_no_end_for_the_client_either(between: Callable[..., None]) -> None:
    async def begin(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        return await hang_up(request)

    async def ask(client: TestClient[Any, Any]) -> None:
        answer = await client.post(COMPLETIONS, json=RIGHT)
        assert answer.status == 200
        assert await answer.content.readline() == b"data: {}\n"
        with pytest.raises(aiohttp.ClientError):
            await answer.read()

    between(Engine({}), Engine(begin), ask)


async def refuse(request: web.Request) -> web.StreamResponse:
    raise web.HTTPServiceUnavailable


@pytest.mark.parametrize("answer", [[], None, {"kv_transfer_params": [1]}, hang_up, refuse])
def test_whatever_the_prefill_engine_does_wrong_the_other_answers(
    between: Callable[..., None], answer: Any
) -> None:
    decode = Engine({"choices": []})

    async def ask(client: TestClient[Any, Any]) -> None:
        assert await (await client.post(COMPLETIONS, json=RIGHT)).json() == {"choices": []}

    between(Engine(answer), decode, ask)
    assert decode.asked == [RIGHT]


def test_without_a_prefill_engine_the_other_answers(between: Callable[..., None], nobody: str) -> None:
    decode = Engine({"choices": []})

    async def ask(client: TestClient[Any, Any]) -> None:
        assert (await client.post(COMPLETIONS, json=RIGHT)).status == 200

    between(nobody, decode, ask)
    assert decode.asked == [RIGHT]


def test_what_the_prefill_engine_tells_goes_to_the_other_and_a_clients_own_word_does_not(
    between: Callable[..., None],
) -> None:
    prefill, decode = Engine({"kv_transfer_params": HANDED_OVER}), Engine({"choices": []})

    async def ask(client: TestClient[Any, Any]) -> None:
        body = RIGHT | {"stream": False, "kv_transfer_params": {"forged": 1}}
        assert (await client.post(COMPLETIONS, json=body)).status == 200

    between(prefill, decode, ask)
    assert prefill.asked == [
        RIGHT | {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    ]
    assert decode.asked == [RIGHT | {"stream": False, "kv_transfer_params": HANDED_OVER}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--decode", "10.0.0.2:8200"), "argument --decode: must be an URL such as http://"),
        (("--decode", "http://"), "argument --decode: must be an URL such as http://"),
        (("--prefill", "http://a:99999"), "argument --prefill: must be an URL such as http://"),
        (("--port", "many"), "argument --port: invalid int value: 'many'"),
        (("--port", "99999"), "proxy: can't listen on 127.0.0.1:99999: "),
        (("--host", "no.such.host.invalid"), "proxy: can't listen on no.such.host.invalid:8000: "),
    ],
)
def test_the_proxy_says_why_it_cannot_start(
    project_root: Path, arguments: tuple[str, ...], words: str
) -> None:
    command = [sys.executable, str(project_root / "examples" / "prefill_decode" / "proxy.py")]
    command += ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr
