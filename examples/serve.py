"""An OpenAI-compatible server over AsyncEngine: chat and completions, streamed or whole. For a trusted network.

    pip install fastapi uvicorn            (and prometheus-client, for /metrics)
    python examples/serve.py --port 8000

A request whose client goes away is aborted. More requests than may queue are refused with 429. How requests and answers
look is in the files beside this one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from openai_errors import APIError, add_error_handlers
from openai_replies import ChatReply, CompletionReply, Reply
from openai_requests import Body, ChatBody, CompletionBody

from kvcore.errors import KVCacheError
from runner import AsyncEngine, OutputStream, RunnerError
from runner.cli_options import add_engine_arguments, load_engine
from runner.loader import default_model_file

T = TypeVar("T")


def make_app(engine: AsyncEngine, model: str) -> FastAPI:
    """The server's application; it closes the engine when it shuts down.

    Args:
        engine: What answers.
        model: The name that clients call it by.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app = FastAPI(title="runner", lifespan=lifespan)
    add_error_handlers(app)
    tokenizer = engine.engine.tokenizer
    card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "runner"}

    def check_model(name: str) -> None:
        if name != model:
            raise APIError(404, f"no model {name!r} here, only {model!r}", param="model", code="model_not_found")

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Any:
        check_model(body.model)
        return await respond(engine, request, body, ChatReply(body, tokenizer))

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Any:
        check_model(body.model)
        return await respond(engine, request, body, CompletionReply(body, tokenizer))

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Any:
        check_model(name)
        return card

    @app.get("/health")
    async def health() -> Any:
        if engine.closed_because is not None:
            raise APIError(503, engine.closed_because)
        return {"status": "ok"}

    try:
        from serve_metrics import add_metrics
    except ImportError:  # no prometheus-client: no /metrics
        pass
    else:
        add_metrics(app, engine)
    return app


async def respond(engine: AsyncEngine, request: Request, body: Body, reply: Reply) -> Any:
    """Answer one body: whole, or as a stream of events."""
    asked: dict[str, Any] = {
        "prompts": body.prompts(),
        "sampling_params": body.sampling_params(),
        "request_id": reply.id,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
    }
    if body.stream:
        stream = engine.stream(**asked)
        await stream.start()  # a refusal is answered before the first byte is
        # Closing it is the response's part from here on; dropped before it began, it closes itself.
        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(events_of(stream, reply), media_type="text/event-stream", headers=headers)
    outputs = await unless_disconnected(request, engine.generate(**asked))
    if outputs is None:
        return Response(status_code=499)  # nobody reads it; a name that proxies' logs have for this
    return reply.whole(outputs)


async def events_of(stream: OutputStream, reply: Reply) -> AsyncIterator[str]:
    """Answers as server-sent events, in the order in which they come; left early, it aborts what is left."""
    try:
        async for output in stream:
            if (chunk := reply.chunk(output)) is not None:
                yield event(chunk)
        if (chunk := reply.last_chunk()) is not None:
            yield event(chunk)
        yield "data: [DONE]\n\n"
    except RunnerError as error:
        yield event(APIError.of(error).content)
    finally:
        stream.close()


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work comes to; None, and the work cancelled, if the client goes away before."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        gone.cancel()
        working.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--max-queued-requests", type=int, default=256, metavar="N", help="default: %(default)s")
    add_engine_arguments(parser)
    args = parser.parse_args()
    if not 0 <= args.port <= 65535:
        parser.error(f"--port goes from 0 to 65535, got {args.port}")
    try:
        engine = AsyncEngine(load_engine(args), max_queued_requests=args.max_queued_requests)
    except (RunnerError, KVCacheError) as error:
        print(f"serve.py: error: {error}", file=sys.stderr)
        return 2
    # Model and books stay: no full collection has to look at them again, which would take up to tenths of a second.
    gc.collect()
    gc.freeze()
    path = default_model_file() if args.model is None else Path(args.model)
    name = path.name.removesuffix(".gguf") if path.exists() else args.model
    print(f"serving {name!r}; its name is also at http://{args.host}:{args.port}/v1/models", file=sys.stderr)
    # Long answers must not keep the server from ending.
    uvicorn.run(make_app(engine, name), host=args.host, port=args.port, timeout_graceful_shutdown=5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
