"""The file of tenants, in TOML: their keys and what each may take.

[tenants.search]
keys = ["sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]
requests_per_minute = 600
tokens_per_minute = 200000
max_inflight = 64
priority = 10
weight = 2.0
"""

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from contracts.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_LIMIT = Annotated[int, Meta(ge=1, le=2**53)]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may take; None: as much as there is.

    `keys`: themselves, or `sha256:` and the digest of one. `tokens_per_minute`: of prompts and answers together.
    `max_inflight`: answers at once. `priority`: no request of it counts as more urgent (lower is sooner). `weight`: its
    part of what is scarce, beside the others'.
    """

    keys: Annotated[list[str], Meta(min_length=1)]
    requests_per_minute: _LIMIT | None = None
    tokens_per_minute: _LIMIT | None = None
    max_inflight: _LIMIT | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    weight: Annotated[float, Meta(ge=1e-3, le=1e3)] = 1.0


@dataclass(frozen=True)
class TenantTable:
    """The tenants by name, and whose a key is by its SHA-256."""

    tenants: Mapping[str, Tenant]
    owners: Mapping[bytes, str]


NOBODY = TenantTable({}, {})


def read_tenants(path: Path) -> TenantTable:
    """Return what a file says. Raises ConfigError naming the file and the field."""
    try:
        return parse_tenants(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of tenants can't be read: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_tenants(text: str) -> TenantTable:
    """Return what a text says. Raises ConfigError naming the field."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"is no TOML: {error}") from error
    if unknown := given.keys() - {"tenants"}:
        raise ConfigError(f"'{min(unknown)}' is not known; tenants stand under [tenants.NAME]")
    tables = given.get("tenants", {})
    if not isinstance(tables, dict):
        raise ConfigError("'tenants' must be a table of tables: [tenants.NAME]")
    if not tables:
        raise ConfigError("names no tenant: nobody could ask for anything")
    tenants = {name: _tenant(name, fields) for name, fields in tables.items()}
    owners: dict[bytes, str] = {}
    for name, tenant in tenants.items():
        for index, key in enumerate(tenant.keys):
            digest = _digest(key, f"tenants.{name}.keys[{index}]")
            if (other := owners.setdefault(digest, name)) != name:
                raise ConfigError(f"tenants.{name}.keys[{index}]: the tenant {other} has the same key")
    return TenantTable(tenants, owners)


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key.

    Looking a key up by it takes no time that tells how much of it was right.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _tenant(name: str, fields: Any) -> Tenant:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"the tenant's name {name[:80]!r} must be 1 to 64 letters, digits, '.', '_' or '-'")
    try:
        return msgspec.convert(fields, Tenant)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        raise ConfigError(f"tenants.{name}{place.removesuffix('`')}: {message}") from error


def _digest(key: str, at: str) -> bytes:
    if key.startswith("sha256:"):
        if (found := _DIGEST.fullmatch(key)) is None:
            raise ConfigError(f"{at}: 'sha256:' is followed by 64 hexadecimal digits in lower case")
        if bytes.fromhex(found[1]) == digest_of(""):
            raise ConfigError(f"{at}: this is the digest of nothing, as of a variable that is not set")
        return bytes.fromhex(found[1])
    if not key or key != key.strip():
        raise ConfigError(f"{at}: a key is not empty, and has no space around it")
    return digest_of(key)
