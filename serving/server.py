"""The web application: the event loop reads requests and sends answers, a thread of its own computes them in order."""

import asyncio
import contextlib
import ipaddress
import json
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvicorn
from starlette import applications, exceptions, requests, responses, routing

from errors import UserError
from serving.model import ServedModel
from serving.request import Refused, Request, parse

MAX_BODY, MAX_WAITING = 1_000_000, 8
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class Server(uvicorn.Server):
    """Ctrl-C ends the answers, too."""

    def __init__(self, models: list[ServedModel], host: str):
        self.models, self.host = {model.card["id"]: model for model in models}, host
        self.turn, self.pool, self.waiting, self.stopping = asyncio.Lock(), ThreadPoolExecutor(1), set(), False
        routes = [
            routing.Route(f"/v1/{path}", self.answer, methods=["POST"]) for path in ("completions", "chat/completions")
        ]
        cards = {"object": "list", "data": [model.card | {"created": int(time.time())} for model in models]}
        for path, found in (("/v1/models", cards), ("/health", {"status": "ok"})):
            routes.append(routing.Route(path, lambda http, found=found: responses.JSONResponse(found)))
        page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        page = responses.HTMLResponse(page, headers={"content-security-policy": POLICY})
        routes.append(routing.Route("/", lambda http: page))
        handlers = {
            Refused: lambda http, error: refuse(error),
            exceptions.HTTPException: lambda http, error: refuse(Refused(error.status_code, error.detail)),
            requests.ClientDisconnect: lambda http, error: refuse(Refused(400, "the client has left")),
        }
        self.app = applications.Starlette(routes=routes, exception_handlers=handlers)
        options = {"interface": "asgi3", "lifespan": "off", "log_level": "error", "timeout_graceful_shutdown": 0.5}
        super().__init__(uvicorn.Config(self.check_host, **options))

    def handle_exit(self, sig, frame) -> None:
        self.stopping = True
        super().handle_exit(sig, frame)

    async def check_host(self, scope, receive, send) -> None:
        """Refuse a Host that is a name but not ours: a page of another site can only send its site's."""
        name = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        name = name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name
        allowed = name in ("localhost", self.host)
        with contextlib.suppress(ValueError):
            allowed = allowed or bool(ipaddress.ip_address(name.strip("[]")))
        refused = refuse(Refused(403, "the Host header names another server"))
        await (self.app if allowed else refused)(scope, receive, send)

    async def answer(self, http: requests.Request) -> responses.Response:
        content = bytearray()
        async for chunk in http.stream():
            content += chunk
            if len(content) > MAX_BODY:
                raise Refused(413, f"the body is larger than {MAX_BODY:,} bytes")
        request = parse(bytes(content), "chat" in http.url.path, self.models)
        if len(self.waiting) >= MAX_WAITING:
            raise Refused(429, f"{MAX_WAITING} requests are waiting; try again later", "rate_limit_exceeded")
        self.waiting.add(answer := Answer(request, self))
        return answer


class Answer(responses.Response):
    """Sends an answer as it is computed, and ends the computation when the client leaves."""

    def __init__(self, request: Request, server: Server):
        self.request, self.server, self.left, self.id = request, server, False, uuid.uuid4().hex
        self.events: asyncio.Queue[tuple | dict | Refused] = asyncio.Queue()

    async def __call__(self, scope, receive, send) -> None:
        def leave() -> None:
            self.left = True
            self.server.waiting.discard(self)
            computing.cancel()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            leave()

        computing, watching = asyncio.ensure_future(self.compute()), asyncio.ensure_future(watch())
        try:
            await (self.stream(send) if self.request.stream else self.complete(scope, receive, send))
        finally:
            leave()
            watching.cancel()

    async def compute(self) -> None:
        """Wait for the turn, and have the answer computed: its steps and the usage, or an error, become `events`."""
        loop, end = asyncio.get_running_loop(), Refused(503, "the answer was ended")

        def check() -> None:
            if self.left or self.server.stopping:
                raise end

        def emit(event: tuple) -> None:
            loop.call_soon_threadsafe(self.events.put_nowait, event)

        try:
            async with self.server.turn:
                self.server.waiting.discard(self)
                check()
                end = await loop.run_in_executor(self.server.pool, self.request.model.answer, self.request, emit, check)
        except UserError as error:
            end = error if isinstance(error, Refused) else Refused(500, str(error))
        except Exception as error:
            traceback.print_exc()
            end = Refused(500, f"internal error: {type(error).__name__}")
        finally:
            self.events.put_nowait(end)

    async def complete(self, scope, receive, send) -> None:
        steps = [[] for _ in range(self.request.samples)]
        while isinstance(event := await self.events.get(), tuple):
            steps[event[0]].append(event)
        if isinstance(event, Refused):
            return await refuse(event)(scope, receive, send)
        await responses.JSONResponse(self.body([self.choice(s, "message") for s in steps], event))(scope, receive, send)

    async def stream(self, send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def put(data: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": more})

        for i in range(self.request.samples * self.request.chat):
            first = {"delta": {"role": "assistant", "content": ""}}
            await put(json.dumps(self.body([self.choice([(i, "", None, None)], "delta") | first])))
        while isinstance(event := await self.events.get(), tuple):
            if any(event[1:]):
                await put(json.dumps(self.body([self.choice([event], "delta")])))
        if isinstance(event, Refused):
            await put(json.dumps({"error": event.body}))
        elif self.request.stream_usage:
            await put(json.dumps(self.body([], event)))
        await put("[DONE]", more=False)

    def body(self, choices: list[dict], usage: dict | None = None) -> dict:
        kind, prefix = ("chat.completion", "chatcmpl") if self.request.chat else ("text_completion", "cmpl")
        kind += ".chunk" * (self.request.chat and self.request.stream)
        fields = {"id": f"{prefix}-{self.id}", "object": kind, "created": int(time.time()), "choices": choices}
        total = {} if usage is None else {"total_tokens": usage["prompt_tokens"] + usage["completion_tokens"]}
        return fields | {"model": self.request.model.card["id"]} | ({} if usage is None else {"usage": usage | total})

    def choice(self, steps: list[tuple], key: str) -> dict:
        """Some steps of one answer in OpenAI's format."""
        text, found = "".join(step[1] for step in steps), [step[2] for step in steps if step[2] is not None]
        choice = {"index": steps[0][0], "finish_reason": steps[-1][3], "logprobs": None}
        if self.request.top_logprobs is not None:
            choice["logprobs"] = {"content": found}
            if not self.request.chat:
                top = [{t["token"]: t["logprob"] for t in entry["top_logprobs"]} or None for entry in found]
                choice["logprobs"] |= {"tokens": [entry["token"] for entry in found], "top_logprobs": top}
                choice["logprobs"] |= {"token_logprobs": [entry["logprob"] for entry in found]}
        role = {"role": "assistant"} if key == "message" else {}
        return choice | ({key: {"content": text} | role} if self.request.chat else {"text": text})


def refuse(error: Refused) -> responses.JSONResponse:
    return responses.JSONResponse({"error": error.body}, error.status)
