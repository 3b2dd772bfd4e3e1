"""The model that is served."""

from typing import Any

from fastapi import APIRouter

from gateway.api.openapi import ModelCard, ModelList, returns
from gateway.http.context import AppContext, Context
from gateway.http.routes.head_route import HeadAnsweringRoute

router = APIRouter(route_class=HeadAnsweringRoute)


@router.get("/v1/models", responses=returns(ModelList), response_model=None)
async def models(context: Context) -> dict[str, Any]:
    """The one model, under each of its names."""
    return {"object": "list", "data": [_card(context, name) for name in context.names]}


@router.get("/v1/models/{model:path}", responses=returns(ModelCard), response_model=None)
async def model(model: str, context: Context) -> dict[str, Any]:
    """One model by its id."""
    context.require_model(model)
    return _card(context, model)


def _card(context: AppContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "tandem",
        "root": context.checkpoint.name,
        "parent": None,
        "max_model_len": context.limits.max_model_len,
        "permission": [],
    }
