"""The model that is served, and its LoRA adapters."""

from typing import Any

from fastapi import APIRouter

from gateway.api.openapi import ModelCard, ModelList, returns
from gateway.http.context import AppContext, Context, ServedModel
from gateway.http.routes.head_route import HeadAnsweringRoute

router = APIRouter(route_class=HeadAnsweringRoute)


@router.get("/v1/models", responses=returns(ModelList), response_model=None)
async def models(context: Context) -> dict[str, Any]:
    """The one model, under each of its names, and its adapters."""
    adapters = [context.served(name) for name in context.dispatch.workers.adapters]
    return {"object": "list", "data": [_card(context, each) for each in (*map(ServedModel, context.names), *adapters)]}


@router.get("/v1/models/{model:path}", responses=returns(ModelCard), response_model=None)
async def model(model: str, context: Context) -> dict[str, Any]:
    """One model by its id."""
    served = context.served(model)
    return _card(context, served if served.adapter is not None else ServedModel(model))


def _card(context: AppContext, served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": context.created,
        "owned_by": "tandem",
        "root": context.checkpoint.name if served.adapter is None else served.name,
        "parent": None if served.adapter is None else context.model,
        "max_model_len": context.limits.max_model_len,
        "permission": [],
    }
