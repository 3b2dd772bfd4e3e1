"""The state of the gateway, for load balancers, operators and Prometheus."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from gateway.api.error_body import error_body
from gateway.api.openapi import LoadReply, ReadyReply, VersionReply, returns
from gateway.dispatch.registry_client import nothing_placed
from gateway.http.context import Context
from gateway.http.routes.head_route import HeadAnsweringRoute

router = APIRouter(route_class=HeadAnsweringRoute)


@router.get("/health", responses=returns(None), response_class=Response)
async def health() -> Response:
    """200 while this process answers."""
    return Response()


@router.get("/ping", responses=returns(None), response_class=Response)
@router.post("/ping", responses=returns(None), response_class=Response)
async def ping() -> Response:
    """The same as /health."""
    return Response()


@router.get("/load", responses=returns(LoadReply), response_model=None)
async def load(context: Context) -> dict[str, int]:
    """Answers in progress."""
    return {"server_load": context.admission.num_taken}


@router.get("/ready", responses=returns(ReadyReply), response_model=None)
async def ready(context: Context) -> JSONResponse:
    """Answer 200 while this gateway can have work done.

    It can while a prefill and a decode worker that can exchange KV, or a mixed one, take work from it, and the registry
    answers.
    """
    workers = context.dispatch.workers
    what = nothing_placed("does not answer") if workers.is_blind else workers.lack()
    if not what:
        return JSONResponse({"status": "ready"})
    why = "; ".join([what, *workers.troubles])
    return JSONResponse(error_body(503, why), status_code=503, headers={"Retry-After": "1"})


@router.get("/metrics", responses=returns(None), response_class=PlainTextResponse)
async def metrics(context: Context) -> Response:
    """Prometheus text."""
    return Response(context.metrics.text(), media_type="text/plain; version=0.0.4")


@router.get("/version", responses=returns(VersionReply), response_model=None)
async def version(context: Context) -> dict[str, str]:
    """The release that runs."""
    return {"version": context.version}
