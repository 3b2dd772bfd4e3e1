"""The HTTP interface of a worker: jobs, event streams, health, readiness, metrics."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from contracts.codec import decoder
from contracts.errors import RequestError, Unavailable
from contracts.ids import GatewayId
from contracts.node import WorkerRole
from contracts.request import AdapterRef, Job, JobMessage
from service.request_body import read_body
from service.shared_secret import refusal, refuse_without_secret
from worker.front.metrics import render
from worker.front.worker_state import WorkerState
from worker.messages import Work

log = logging.getLogger(__name__)

MAX_BODY_NBYTES = 32 << 20


ChangeRole = Callable[[WorkerRole], Awaitable[None]]
ChangeAdapters = Callable[[tuple[AdapterRef, ...]], Awaitable[None]]


class AdapterWanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /adapters: a LoRA adapter to load, or without a path to unload."""

    name: str
    path: str | None = None


class RoleWanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /role."""

    role: WorkerRole


def make_app(state: WorkerState, change_role: ChangeRole, change_adapters: ChangeAdapters) -> FastAPI:
    """Return the HTTP application of a worker; what changes is told by Membership's methods."""
    app = FastAPI(title="Tandem worker", docs_url=None, redoc_url=None)
    _add_work(app, state)
    _add_role(app, state, change_role)
    _add_adapters(app, state, change_adapters)
    _add_views(app, state)
    return app


def _add_work(app: FastAPI, state: WorkerState) -> None:
    """Add the routes for gateways and operators; all of them need the secret."""
    jobs_decoder = decoder(list[JobMessage])

    @app.post("/jobs", status_code=202)
    async def jobs(request: Request, stream: int = 0) -> Response:
        """Take a msgpack array of Job and Cancel, sent while the event stream of this number was open.

        202: taken; each job ends in exactly one Finished or Failed event.
        """
        if refused := _refused(request, state):
            return refused
        try:
            data, taken_s = await read_body(request, MAX_BODY_NBYTES), time.monotonic()
            messages = jobs_decoder.decode(data)
        except RequestError as error:
            return refusal(413, error.code, str(error))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return refusal(400, "invalid_request", f"the body is not a msgpack array of jobs and cancels: {error}")
        refused = _no_taker(state, messages, stream)
        if refused is not None:  # only the jobs; a cancelled request in the same body is here already, and ends
            messages = [m for m in messages if not isinstance(m, Job)]
        if messages:
            state.core.send(Work(messages, taken_s))
        num_jobs = sum(isinstance(m, Job) for m in messages)
        state.num_jobs += num_jobs
        state.num_cancels += len(messages) - num_jobs
        if refused is not None:
            return refused
        return Response(status_code=202)

    @app.get("/events")
    async def events(request: Request, gateway_id: str, stream: int = 0) -> Response:
        """Codec frames, each an EventFrame; an empty one every second. One stream per gateway.

        `stream`: the gateway's number of it; each is higher than the one before.
        """
        if refused := _refused(request, state):
            return refused
        return StreamingResponse(_stream(state, GatewayId(gateway_id), stream), media_type="application/octet-stream")

    @app.post("/drain", status_code=202)
    async def drain(request: Request) -> Response:
        """Take no new work; what runs goes on."""
        if refused := _refused(request, state):
            return refused
        state.draining = True
        return Response(status_code=202)


def _add_role(app: FastAPI, state: WorkerState, change_role: ChangeRole) -> None:
    @app.post("/role")
    async def role(request: Request) -> Response:
        """Take `{"role": ROLE}`, one of prefill, decode and mixed, for new work.

        409: this worker drains, or nobody else has a side that the role lacks. 503: the registry does not answer.
        """
        if refused := _refused(request, state):
            return refused
        try:
            wanted = msgspec.json.decode(await read_body(request, MAX_BODY_NBYTES), type=RoleWanted).role
        except RequestError as error:
            return refusal(413, error.code, str(error))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            roles = ", ".join(WorkerRole)
            return refusal(400, "invalid_request", f'the body is not {{"role": ROLE}} with one of {roles}: {error}')
        if state.load.draining:
            return refusal(409, "draining", "this worker takes no new work, of no role")
        before = state.info.role
        try:
            await change_role(wanted)
        except RequestError as error:
            return refusal(409, error.code, str(error))
        except Unavailable as error:
            return refusal(503, error.code, f"{error}; whether the role has changed is not known: repeat the call")
        return JSONResponse({"role": wanted, "was": before, "num_of_former_role": state.num_of_former_role})


def _add_adapters(app: FastAPI, state: WorkerState, change_adapters: ChangeAdapters) -> None:
    @app.post("/adapters")
    async def adapters(request: Request) -> Response:
        """Take `{"name": NAME, "path": FOLDER}` to load a LoRA adapter, `{"name": NAME}` to unload one.

        400: it can't be served, or is not loaded. 503: the core or the registry does not answer.
        """
        if refused := _refused(request, state):
            return refused
        try:
            wanted = msgspec.json.decode(await read_body(request, MAX_BODY_NBYTES), type=AdapterWanted)
            calls = state.adapter_calls
            found = await (calls.unload(wanted.name) if wanted.path is None else calls.load(wanted.name, wanted.path))
            await change_adapters(found)
        except RequestError as error:
            return refusal(400, error.code, str(error))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return refusal(400, "invalid_request", f'the body is not {{"name": NAME, "path": FOLDER}}: {error}')
        except Unavailable as error:
            return refusal(503, error.code, f"{error}; whether the adapters have changed is not known: repeat the call")
        return JSONResponse({"adapters": [ref.name for ref in found]})


def _add_views(app: FastAPI, state: WorkerState) -> None:
    """Add the routes that need no secret."""

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while the core's loop turns, else 503 with the reason."""
        sickness = state.health_error()
        return JSONResponse(_report(state) | {"status": sickness or "ok"}, status_code=503 if sickness else 200)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """200 once this worker is in the registry and may be given work."""
        words = (
            state.health_error()
            or (None if state.joined else "not in the registry")
            or state.broken
            or ("draining" if state.draining else None)
        )
        return JSONResponse({"status": words or "ready"}, status_code=503 if words else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        taken = {"jobs": state.num_jobs, "cancels": state.num_cancels}
        text = render(state.info, state.status, not state.health_error(), taken, state.started_at_s)
        return Response(text, media_type="text/plain; version=0.0.4")


async def _stream(state: WorkerState, gateway_id: GatewayId, number: int) -> AsyncIterator[bytes]:
    async for data in state.streams.listen(gateway_id, number):
        yield data


def _refused(request: Request, state: WorkerState) -> JSONResponse | None:
    if strange := refuse_without_secret(request, state.secret):
        return strange
    if sickness := state.health_error():
        return refusal(503, "unavailable", sickness)
    return None


def _no_taker(state: WorkerState, messages: list[JobMessage], stream: int) -> JSONResponse | None:
    """Return why the jobs among them are not taken, or None. `stream`: under which they were sent."""
    gateways = {m.gateway_id for m in messages if isinstance(m, Job)}
    if missing := sorted(gateway_id for gateway_id in gateways if not state.streams.has(gateway_id)):
        return refusal(409, "no_stream", f"open GET /events first: it is missing for {', '.join(missing)}")
    if former := sorted(gateway_id for gateway_id in gateways if state.streams.is_former(gateway_id, stream)):
        return refusal(409, "no_stream", f"stream {stream} of {', '.join(former)} has ended, and its jobs with it")
    begins = (m for m in messages if isinstance(m, Job) and not _takes_away(state, m))
    if state.load.draining and any(begins):
        return refusal(503, "draining", "this worker takes no new work")
    return None


def _takes_away(state: WorkerState, job: Job) -> bool:
    """Return whether the job moves an answer from this worker to another one."""
    return job.is_migration and job.route.prefill.worker_id == state.info.worker_id


def _report(state: WorkerState) -> dict[str, object]:
    info = state.info
    return {
        "worker_id": info.worker_id,
        "incarnation": info.incarnation,
        "role": info.role,
        "num_of_former_role": state.num_of_former_role,
        "model": info.model,
        "layout_id": info.layout_id,
        "config_digest": state.config_digest,
        "core_pid": info.core_pid,
        "core": msgspec.to_builtins(state.status) if state.status is not None else None,
    }
