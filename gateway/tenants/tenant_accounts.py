"""What each tenant has taken of this gateway, and whether it may have more."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from contracts.errors import Overloaded, RequestError
from gateway.tenants.tenant_file import NOBODY, Tenant, TenantTable, digest_of
from gateway.tenants.token_bucket import TokenBucket

FLOODED_ROOM = 0.5


class TenantAccount:
    """The account of what one tenant has taken.

    `counts`: requests by what became of them; `tokens`: of prompts and answers that have ended. `all_accounts`: of this
    gateway.
    """

    def __init__(
        self, name: str, tenant: Tenant, all_accounts: Callable[[], "Iterable[TenantAccount]"] = tuple
    ) -> None:
        self.name, self.tenant, self._all_accounts = name, tenant, all_accounts
        self.num_inflight = 0
        self.counts = Counter[str]()
        self.tokens = Counter[str]()
        self._requests = _bucket(tenant.requests_per_minute)
        self._tokens = _bucket(tenant.tokens_per_minute)

    def change(self, tenant: Tenant, now: float) -> None:
        """Have other limits from now on; what was taken stays taken."""
        self._requests = _changed(self._requests, tenant.requests_per_minute, now)
        self._tokens = _changed(self._tokens, tenant.tokens_per_minute, now)
        self.tenant = tenant

    def room(self, num_more: int) -> float:
        """Return the part of the workers' queues that a request may fill.

        Half of them where the tenant, with `num_more` answers that it begins before this one, has more of what is in
        progress than its part, by weight, beside one more tenant that may come: that one finds room, and its turn is
        the first.
        """
        active = [one for one in self._all_accounts() if one.num_inflight or one is self]
        own, fair = self.num_inflight + num_more, self.tenant.weight / (sum(one.tenant.weight for one in active) + 1)
        return FLOODED_ROOM if own > fair * (sum(one.num_inflight for one in active) + num_more) else 1.0

    def is_done(self, now: float) -> bool:
        """Return whether nothing is in progress, and nothing taken that counts still."""
        buckets = [bucket for bucket in (self._requests, self._tokens) if bucket is not None]
        return not self.num_inflight and all(bucket.is_full(now) for bucket in buckets)

    def urgency(self, priority: int) -> int:
        """Return the priority that a request of this tenant has, if it asks for `priority`."""
        return max(priority, self.tenant.priority)

    def take(self, num_answers: int, prompt_tokens: int, now: float) -> None:
        """Begin a request. Raises Overloaded, which says when to come again, and then nothing is taken.

        Raises RequestError for one that could never be taken.
        """
        most = self.tenant.max_inflight
        if most is not None and num_answers > most:
            raise RequestError(f"{num_answers} answers; the tenant '{self.name}' may have {most} at once", "n")
        if most is not None and self.num_inflight + num_answers > most:
            raise self.refusal("inflight", f"has {self.num_inflight} answers in progress, of at most {most}", 1.0)
        for limit, bucket, amount in (
            ("requests_per_minute", self._requests, 1),
            ("tokens_per_minute", self._tokens, prompt_tokens),
        ):
            if bucket is not None and (wait_s := bucket.wait_s(amount, now)) > 0:
                raise self.refusal(limit, f"has used up its {limit} ({getattr(self.tenant, limit)})", wait_s)
        self._spend(1, prompt_tokens, now)
        self.num_inflight += num_answers
        self.counts["taken"] += 1

    def refusal(self, limit: str, why: str, wait_s: float) -> Overloaded:
        """Return the error of a request that a limit refuses, and count it."""
        self.counts[f"refused_{limit}"] += 1
        return Overloaded(f"the tenant '{self.name}' {why}", wait_s)

    def give_back(self, num_answers: int, prompt_tokens: int, now: float) -> None:
        """End a request that was not begun: it costs nothing."""
        self._spend(-1, -prompt_tokens, now)
        self.counts["taken"] -= 1
        self.counts["refused_room"] += 1
        self._leave(num_answers)

    def end(self, num_answers: int, prompt_tokens: int, cached_tokens: int, completion_tokens: int, now: float) -> None:
        """End a request that was begun. Its answers' tokens are known now, and may leave the tenant in debt."""
        self._spend(0, completion_tokens, now)
        self.tokens.update(prompt=prompt_tokens, cached=cached_tokens, completion=completion_tokens)
        self._leave(num_answers)

    def _leave(self, num_answers: int) -> None:
        assert num_answers <= self.num_inflight, f"the tenant {self.name} gives back more than it took"
        self.num_inflight -= num_answers

    def _spend(self, num_requests: int, num_tokens: int, now: float) -> None:
        if self._requests is not None:
            self._requests.take(num_requests, now)
        if self._tokens is not None:
            self._tokens.take(num_tokens, now)


class TenantAccounts:
    """The accounts of all tenants, found by key.

    Those of tenants that are gone stay until what they took counts no more: nobody gets more by coming back.
    """

    def __init__(self, table: TenantTable = NOBODY, now: float = 0.0) -> None:
        self._table = NOBODY
        self._accounts: dict[str, TenantAccount] = {}
        self.replace(table, now)

    def __iter__(self) -> Iterator[TenantAccount]:
        return iter([self._accounts[name] for name in self._table.tenants])

    def replace(self, table: TenantTable, now: float) -> None:
        """Have other tenants from now on."""
        for name, tenant in table.tenants.items():
            if (account := self._accounts.get(name)) is None:
                self._accounts[name] = TenantAccount(name, tenant, lambda: self._accounts.values())
            else:
                account.change(tenant, now)
        self._table = table
        gone = [name for name, account in self._accounts.items() if name not in table.tenants and account.is_done(now)]
        for name in gone:
            del self._accounts[name]

    def of_key(self, key: str) -> TenantAccount | None:
        """Return whose a key is; None if it is nobody's."""
        name = self._table.owners.get(digest_of(key))
        return None if name is None else self._accounts[name]


def _bucket(per_minute: int | None) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute)


def _changed(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if bucket is None or per_minute is None:
        return _bucket(per_minute)
    bucket.change(per_minute, now)
    return bucket
