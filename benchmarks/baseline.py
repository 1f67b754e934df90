"""The baseline: a two-hop proxy of the kind that one writes in an afternoon with FastAPI and httpx.

It parses the request, sends it to the prefill engine for one token, puts that engine's
`kv_transfer_params` into the request, sends it to the decode engine and relays the stream. It has no
retries, no health checks and no metrics.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse


def proxy(prefill_url: str, decode_url: str) -> FastAPI:
    """The app, for one prefill and one decode engine."""
    # vLLM closes connections that were idle for 5 s; with httpx's own 5 s both at once, requests would fail.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2)
    prefill = httpx.AsyncClient(base_url=prefill_url, timeout=None, limits=limits)
    decode = httpx.AsyncClient(base_url=decode_url, timeout=None, limits=limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with prefill, decode:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
        first.pop("stream_options", None)
        answer = await prefill.post("/v1/chat/completions", json=first, headers=headers)
        if answer.status_code != 200:
            return JSONResponse(answer.json(), answer.status_code)
        body["kv_transfer_params"] = answer.json().get("kv_transfer_params")

        async def stream() -> AsyncIterator[bytes]:
            async with decode.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
                reply.raise_for_status()
                async for chunk in reply.aiter_bytes():
                    yield chunk

        return StreamingResponse(stream(), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    uvicorn.run(proxy(args.prefill, args.decode), port=args.port, log_level="warning", access_log=False)
