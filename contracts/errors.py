"""The errors that users, operators or peers see.

TandemError
├── ConfigError         the process can't start; says what to do
│   └── LayoutMismatch  two workers whose KV caches differ; names the field
├── RequestError        a request that can't be served as it is (HTTP 4xx); names the field
│   └── NotFound        no such model (HTTP 404)
├── Overloaded          more work than fits now (HTTP 429 with Retry-After)
├── Unavailable         no worker to serve it, or the one that served it died (HTTP 503)
│   ├── RegistryError   Redis can't be used; names its address, so clients get other words
│   └── AdapterMissing  this worker has not loaded the LoRA adapter; another may have
├── DeadlineExceeded    a wait ran past the request's budget (HTTP 504)
├── OutOfBlocks         the block pool can't hold it now; the caller waits or refuses
└── TransferError       the KV did not arrive as promised
    ├── AuthFailed      the peer does not know the shared secret
    ├── PeerLost        the peer's process or endpoint is gone
    └── Corrupt         bytes, order or epoch differ from what was announced
"""


class TandemError(Exception):
    """The root of the tree; `code` is a stable, lower-case word for logs, metrics and `Failed` events."""

    code = "internal"


class ConfigError(TandemError):
    code = "config"


class LayoutMismatch(ConfigError):
    """Two KV layouts whose `field` differs and can't be converted."""

    code = "layout_mismatch"

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        self.field, self.ours, self.theirs = field, ours, theirs
        super().__init__(
            f"KV layouts do not match in '{field}': ours is {ours!r}, the peer's is {theirs!r}. "
            f"Start both workers with the same model, dtype and block size."
        )


class RequestError(TandemError):
    """A faulty request; `param` is the field of the client's JSON at fault, or None for the whole body."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class NotFound(RequestError):
    code = "not_found"


class Overloaded(TandemError):
    """More work than fits now; after `retry_after_s` seconds a retry is likely to be admitted."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Unavailable(TandemError):
    """A service that can't be used now.

    `what` says for clients, in a few words without addresses, what that service does; it is empty where there is only
    one such reason.
    """

    code = "unavailable"
    what = ""


class RegistryError(Unavailable):
    """Redis can't be used.

    The message names its address, for operators; `what` says for clients what it does.
    """

    def __init__(self, message: str, what: str) -> None:
        self.what = what
        super().__init__(message)


class AdapterMissing(Unavailable):
    """A LoRA adapter that this worker has not loaded, or of which it has other weights."""

    code = "adapter_missing"


class DeadlineExceeded(TandemError):
    code = "deadline_exceeded"


class OutOfBlocks(TandemError):
    code = "out_of_blocks"


class TransferError(TandemError):
    code = "transfer_failed"


class AuthFailed(TransferError):
    code = "auth_failed"


class PeerLost(TransferError):
    code = "peer_lost"


class Corrupt(TransferError):
    code = "corrupt"


def by_code(code: str, message: str) -> TandemError:
    """Return an error that another process reported by its code."""
    error = TandemError(message)
    error.code = code
    return error
