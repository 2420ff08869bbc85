"""The web application: the event loop reads requests and sends answers, a thread of its own computes them in order."""

import asyncio
import contextlib
import json
import secrets
import socket
import time
import traceback
from collections.abc import AsyncIterator, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import uvicorn
from starlette import applications, exceptions, middleware, requests, responses, routing
from starlette.middleware.trustedhost import TrustedHostMiddleware

from errors import UserError, reading
from generation.generate import PromptTooLong
from generation.settings import Sampling
from serving.answer import ChatRequest, CompletionRequest, InspectRequest, Piece, Request, ServedModel, to_choices

MAX_WAITING, MAX_BODY = 8, 1_000_000  # requests, bytes


class Server(uvicorn.Server):
    def __init__(self, directories: dict[str, Path], host: str, dtype: str = "auto", device: str = "auto"):
        self.models = {name: ServedModel(name, directory, dtype, device) for name, directory in directories.items()}
        self.worker = ThreadPoolExecutor(1)
        self.pending = set()  # futures of the request that is computed, and of those that wait
        cards = {"object": "list", "data": [model.card for model in self.models.values()]}
        routes = [
            routing.Route("/", lambda http: responses.FileResponse(Path(__file__).with_name("page.html"))),
            routing.Route("/health", responses.JSONResponse({"status": "ok"}), methods=["GET"]),
            routing.Route("/v1/models", responses.JSONResponse(cards), methods=["GET"]),
            routing.Route(
                "/v1/models/{id:path}", lambda http: responses.JSONResponse(self.find(**http.path_params).card)
            ),
            routing.Route("/v1/completions", self.create, methods=["POST"]),
            routing.Route("/v1/chat/completions", self.create, methods=["POST"]),
            routing.Route("/inspect", self.inspect, methods=["POST"]),
        ]
        # Against DNS rebinding: a page of another site can send requests here, but with that site's name as Host.
        is_everywhere = host in ("", "0.0.0.0")
        allowed_hosts = ["*"] if is_everywhere else ["localhost", "127.0.0.1", host, socket.gethostbyname(host)]
        host_check = middleware.Middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts)
        handlers = {exceptions.HTTPException: refuse, Exception: refuse}
        app = applications.Starlette(routes=routes, middleware=[host_check], exception_handlers=handlers)
        super().__init__(uvicorn.Config(app, lifespan="off", log_level="critical", timeout_graceful_shutdown=0.5))

    def find(self, id: str) -> ServedModel:
        if id not in self.models:
            raise exceptions.HTTPException(404, f"there is no model {id!r}, only {', '.join(self.models)}")
        return self.models[id]

    def read(self, content: bytes, kind: type[Request | InspectRequest]) -> Request | InspectRequest:
        """The request of a body. A field that is null counts as absent; the model gives the defaults of sampling."""
        first_name, first_model = next(iter(self.models.items()))
        with reading("the request", "see docs/serve.md"):
            values = msgspec.json.decode(content, type=dict).items()
            fields = {"model": first_name} | {name: value for name, value in values if value is not None}
            if "max_completion_tokens" in fields:
                fields["max_tokens"] = fields["max_completion_tokens"]
            model = self.models.get(str(fields["model"]), first_model)  # an unknown one is refused by `find`
            default = model.chat_sampling if kind is ChatRequest else model.text_sampling
            return msgspec.convert(fields | {"sampling": msgspec.convert(vars(default) | fields, Sampling)}, kind)

    async def create(self, http: requests.Request) -> responses.Response:
        is_chat = http.url.path == "/v1/chat/completions"
        request = self.read(await read_body(http), ChatRequest if is_chat else CompletionRequest)
        pieces = self.compute(http, self.find(request.model).answer(request))
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion"}
        if is_chat:
            kind = "chat.completion.chunk" if request.stream else "chat.completion"
            head = {"id": f"chat{head['id']}", "object": kind}
        head |= {"model": request.model, "created": int(time.time())}

        def response(pieces: list[Piece], **usage: dict) -> str:
            return json.dumps(head | {"choices": to_choices(request, pieces)} | usage, ensure_ascii=False)

        async def chunks(piece: Piece) -> AsyncIterator[str]:
            yield f"data: {response([piece])}\n\n"
            try:
                async for piece in pieces:
                    if isinstance(piece, Piece):
                        yield f"data: {response([piece])}\n\n"
                    elif request.stream_options.get("include_usage"):
                        yield f"data: {response([], usage=piece)}\n\n"
            except Exception as error:
                yield f"data: {refuse(http, error).body.decode()}\n\n"
            yield "data: [DONE]\n\n"

        if request.stream:
            first_piece = await anext(pieces)  # raises what is wrong with the request
            return responses.StreamingResponse(chunks(first_piece), media_type="text/event-stream")
        *answer, usage = [piece async for piece in pieces]
        return responses.Response(response(answer, usage=usage), media_type="application/json")

    async def inspect(self, http: requests.Request) -> responses.Response:
        request = self.read(await read_body(http), InspectRequest)
        [content] = [content async for content in self.compute(http, self.find(request.model).inspect(request))]
        return responses.Response(content, media_type="application/json")

    async def compute(self, http: requests.Request, results: Generator) -> AsyncIterator:
        """What the worker's thread gets by iterating over `results`, until the client leaves."""
        if len(self.pending) > MAX_WAITING:
            raise exceptions.HTTPException(429, f"{MAX_WAITING} requests are waiting; try again later")
        loop = asyncio.get_running_loop()
        computed = asyncio.Queue()
        client_left = asyncio.ensure_future(http.receive())  # the only message after the body: the client has left

        def work() -> None:  # in the worker's thread
            with contextlib.closing(results):
                for result in results:
                    if client_left.done() or self.should_exit:
                        raise UserError("the answer was ended")
                    loop.call_soon_threadsafe(computed.put_nowait, result)

        future = loop.run_in_executor(self.worker, work)
        self.pending.add(future)
        future.add_done_callback(self.pending.discard)
        future.add_done_callback(lambda _: computed.put_nowait(None))
        client_left.add_done_callback(lambda _: future.cancel())  # if it has not begun
        while (result := await computed.get()) is not None:
            yield result
        await future  # raises what went wrong


async def read_body(http: requests.Request) -> bytes:
    """A body. What arrives is counted, whatever the headers say, and read to its end, as clients listen only then."""
    content = b""
    async for chunk in http.stream():
        content += chunk if len(content) <= MAX_BODY else b""
    if len(content) > MAX_BODY:
        raise exceptions.HTTPException(413, f"a body may have at most {MAX_BODY:,} bytes")
    return content


def refuse(http: requests.Request, error: Exception) -> responses.JSONResponse:
    if isinstance(error, exceptions.HTTPException):
        status, message = error.status_code, error.detail
        if status == 405:
            message = f"{http.url.path} does not take {http.method}; use {error.headers['Allow']}"
    elif isinstance(error, UserError):
        status, message = 400, str(error)
    else:
        status, message = 500, repr(error)
        traceback.print_exception(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return responses.JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)
