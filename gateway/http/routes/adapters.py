"""LoRA adapters, loaded and unloaded while all runs, as vLLM has it."""

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from contracts.errors import NotFound, RequestError
from gateway.api.openai.schema import LoadAdapterRequest, UnloadAdapterRequest
from gateway.api.openapi import returns, takes
from gateway.http.context import AppContext
from gateway.http.request_reading import read_as
from gateway.json_decoding import Kind

router = APIRouter()


@router.post(
    "/v1/load_lora_adapter",
    openapi_extra=takes(LoadAdapterRequest),
    responses=returns(None),
    response_class=PlainTextResponse,
)
async def load_lora_adapter(request: Request) -> str:
    """Have every worker load an adapter from a folder that it sees; it is then a model of that name."""
    context, asked = await _asked(request, LoadAdapterRequest)
    if asked.lora_name in context.names:
        raise RequestError(f"'{asked.lora_name}' is a name of the model itself", "lora_name")
    await context.dispatch.workers.change_adapter(asked.lora_name, asked.lora_path)
    return f"Success: LoRA adapter '{asked.lora_name}' added successfully."


@router.post(
    "/v1/unload_lora_adapter",
    openapi_extra=takes(UnloadAdapterRequest),
    responses=returns(None),
    response_class=PlainTextResponse,
)
async def unload_lora_adapter(request: Request) -> str:
    """Have every worker forget an adapter; what runs with it goes on to its end."""
    context, asked = await _asked(request, UnloadAdapterRequest)
    if asked.lora_name not in context.dispatch.workers.adapters:
        raise NotFound(f"the adapter '{asked.lora_name}' is not loaded", "lora_name")
    await context.dispatch.workers.change_adapter(asked.lora_name, None)
    return f"Success: LoRA adapter '{asked.lora_name}' removed successfully."


async def _asked(request: Request, kind: type[Kind]) -> tuple[AppContext, Kind]:
    """Return the body as a `kind`. Raises NotFound where the setting does not allow such requests."""
    context: AppContext = request.app.state.context
    if not context.settings.allow_runtime_lora_updating:
        raise NotFound("this gateway changes no adapters: set TANDEM_ALLOW_RUNTIME_LORA_UPDATING for that")
    return context, await read_as(request, kind)
