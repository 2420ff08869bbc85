"""The web application: the event loop reads requests and sends answers, a thread of its own computes them in order."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvicorn
from starlette import applications, exceptions, requests, responses, routing

from errors import UserError, reading
from generation.settings import Settings
from serving.answer import Request, ServedModel

MAX_WAITING, MAX_BODY = 8, 1_000_000  # requests, bytes


class Server(uvicorn.Server):
    def __init__(self, directories: dict[str, Path], settings: Settings, host: str):
        self.models = {name: ServedModel(name, directory, settings) for name, directory in directories.items()}
        self.worker, self.answers = ThreadPoolExecutor(1), set()  # the answer that is computed, and those that wait
        cards = {"object": "list", "data": [model.card for model in self.models.values()]}
        routes = [
            routing.Route("/", lambda http: responses.FileResponse(Path(__file__).with_name("page.html"))),
            routing.Route("/health", responses.JSONResponse({"status": "ok"}), methods=["GET"]),
            routing.Route("/v1/models", responses.JSONResponse(cards), methods=["GET"]),
            routing.Route("/v1/completions", self.answer, methods=["POST"]),
            routing.Route("/v1/chat/completions", self.answer, methods=["POST"]),
        ]
        # Against DNS rebinding: a page of another site can send requests here, but with that site's name as Host.
        names, handlers = ("localhost", "{a:int}.{b:int}.{c:int}.{d:int}", host), (exceptions.HTTPException, Exception)
        hosts = [routing.Host(name, routing.Router(routes)) for name in names]
        app = applications.Starlette(routes=hosts, exception_handlers=dict.fromkeys(handlers, refuse))
        super().__init__(uvicorn.Config(app, lifespan="off", log_level="critical", timeout_graceful_shutdown=0.5))

    async def answer(self, http: requests.Request) -> responses.Response:
        if int(http.headers.get("content-length", MAX_BODY + 1)) > MAX_BODY:
            raise exceptions.HTTPException(413, f"a body must have a Content-Length of at most {MAX_BODY:,}")
        with reading("the request", "see /v1/models and OpenAI's reference of the API"):
            request = Request(await http.body(), "chat" in http.url.path, self.models)
        if len(self.answers) > MAX_WAITING:
            raise exceptions.HTTPException(429, f"{MAX_WAITING} requests are waiting; try again later")
        loop, steps = asyncio.get_running_loop(), asyncio.Queue()
        left = asyncio.ensure_future(http.receive())  # the only message after the body: the client has left

        def emit(*step) -> None:  # in the worker's thread
            if left.done() or self.should_exit:
                raise UserError("the answer was ended")
            loop.call_soon_threadsafe(steps.put_nowait, step)

        answer = loop.run_in_executor(self.worker, request.model.answer, request, emit)
        self.answers.add(answer)
        answer.add_done_callback(self.answers.discard)
        answer.add_done_callback(steps.put_nowait)
        left.add_done_callback(lambda _: answer.cancel())  # if it has not begun

        async def chunks():
            while (step := await steps.get()) is not answer:
                yield f"data: {request.body([step])}\n\n"
            if answer.exception():
                yield f"data: {refuse(http, answer.exception()).body.decode()}\n\n"
            elif request.stream_usage:
                yield f"data: {request.body([], answer.result())}\n\n"
            yield "data: [DONE]\n\n"

        if request.stream:
            return responses.StreamingResponse(chunks(), media_type="text/event-stream")
        usage = await answer
        return responses.Response(request.body([*iter(steps.get_nowait, answer)], usage), media_type="application/json")


def refuse(http: requests.Request, error: Exception) -> responses.JSONResponse:
    """An error in OpenAI's format."""
    status = getattr(error, "status_code", 400 if isinstance(error, UserError) else 500)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return responses.JSONResponse({"error": {"message": str(error), "type": kind, "param": None, "code": None}}, status)
