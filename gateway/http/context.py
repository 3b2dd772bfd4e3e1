"""What the endpoints of one gateway share."""

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from checkpoint import Checkpoint
from contracts.errors import NotFound
from contracts.request import AdapterRef
from gateway.admission.limits import BodyMemoryLimit, ConcurrencyLimit
from gateway.api.response_formatter import Spelling, spell_id
from gateway.dispatch.dispatcher import Dispatcher
from gateway.observability.metrics import Metrics
from gateway.observability.tracing import Tracing
from gateway.prompting.chat_template import Prompting
from gateway.prompting.request_fields import Detailed
from gateway.prompting.token_budget import ServingLimits
from gateway.settings import GatewaySettings
from gateway.tenants.tenant_accounts import TenantAccounts

MAX_WHOLE_BODIES = 64
"""So many of the longest that are allowed may be on their way at once: half a GiB of them."""


@dataclass(frozen=True)
class ServedModel:
    """The model that a request asks for: the name that its answer carries, and its LoRA adapter, if any."""

    name: str
    adapter: AdapterRef | None = None


@dataclass
class AppContext:
    """The parts of a gateway that its endpoints use, and what it may take at once.

    `model`: the name that answers carry; clients may name one of `aliases`, too.
    """

    settings: GatewaySettings
    checkpoint: Checkpoint
    prompting: Prompting
    dispatch: Dispatcher
    metrics: Metrics
    model: str
    version: str
    created: int
    tracing: Tracing | None = None
    aliases: tuple[str, ...] = ()
    tenants: TenantAccounts = field(default_factory=TenantAccounts)

    def __post_init__(self) -> None:
        self.admission = ConcurrencyLimit(self.settings.max_inflight)
        self.bodies = BodyMemoryLimit(MAX_WHOLE_BODIES * self.settings.max_body_nbytes)

    @property
    def limits(self) -> ServingLimits:
        own = self.checkpoint.config.max_model_len
        max_model_len, max_answers = self.dispatch.workers.max_model_len(own), self.settings.max_inflight
        return ServingLimits(max_model_len, tuple(self.checkpoint.eos_token_ids), max_answers)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model, *self.aliases)

    @property
    def fingerprint(self) -> str:
        """Return what answers say of the system, also that they are a measurement's nonsense."""
        synthetic = self.dispatch.workers.synthetic_acceptance
        return f"tandem-{self.version}" + (f"-synthetic-acceptance-{synthetic:g}" if synthetic else "")

    def spelling(self, asked: Detailed) -> Spelling:
        """Return how tokens are named in this request's log-probabilities."""
        return spell_id if asked.return_tokens_as_token_ids else self.prompting.token_text

    def served(self, name: str | None) -> ServedModel:
        """Return the model that a request names, the one of this server if it names none.

        Raises NotFound for another name.
        """
        if not name or name in self.names:
            return ServedModel(self.model)
        if (adapter := self.dispatch.workers.adapters.get(name)) is not None:
            return ServedModel(name, adapter)
        raise NotFound(f"the model '{name[:200]}' does not exist; this server has '{self.model}'", "model")


def app_context(request: Request) -> AppContext:
    """Return the context of the application that `request` came to."""
    return request.app.state.context


Context = Annotated[AppContext, Depends(app_context)]
