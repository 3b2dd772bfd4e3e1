"""What tenants have taken, as Prometheus families."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.tenants.tenant_accounts import TenantAccount

MOST_TENANTS = 200
"""The tenants with series of their own, the first of the file; the others are added up as `other`."""
_OUTCOMES = (
    "taken",
    "refused_inflight",
    "refused_requests_per_minute",
    "refused_tokens_per_minute",
    "refused_share",
    "refused_room",
)
_KINDS = ("prompt", "cached", "completion")


class TenantMetrics(Collector):
    """The counts of the accounts, by tenant."""

    def __init__(self, accounts: Iterable[TenantAccount]) -> None:
        self._accounts = accounts

    def collect(self) -> Iterator[Metric]:
        accounts = list(self._accounts)
        named = [(account.name, [account]) for account in accounts[:MOST_TENANTS]]
        if len(accounts) > MOST_TENANTS:
            named.append(("other", accounts[MOST_TENANTS:]))
        words = "requests of a tenant, by what became of them"
        requests = CounterMetricFamily("tandem_gateway_tenant_requests", words, labels=["tenant", "outcome"])
        words = "tokens of a tenant's requests that have ended"
        tokens = CounterMetricFamily("tandem_gateway_tenant_tokens", words, labels=["tenant", "kind"])
        inflight = GaugeMetricFamily("tandem_gateway_tenant_inflight", "answers in progress", labels=["tenant"])
        for name, group in named:
            for outcome in _OUTCOMES:
                requests.add_metric([name, outcome], sum(account.counts[outcome] for account in group))
            for kind in _KINDS:
                tokens.add_metric([name, kind], sum(account.tokens[kind] for account in group))
            inflight.add_metric([name], sum(account.num_inflight for account in group))
        yield from (requests, tokens, inflight)
