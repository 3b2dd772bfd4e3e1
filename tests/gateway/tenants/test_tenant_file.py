"""The file of tenants: what it says, and what is wrong with it by name."""

import hashlib

import pytest

from contracts.errors import ConfigError
from gateway.tenants.tenant_accounts import TenantAccounts
from gateway.tenants.tenant_file import parse_tenants, read_tenants

NOTHING = hashlib.sha256(b"").hexdigest()
DIGEST = hashlib.sha256(b"secret").hexdigest()


def test_a_key_is_found_by_itself_or_by_its_digest():
    text = f'[tenants.a]\nkeys = ["sha256:{DIGEST}"]\nweight = 2\n[tenants.b]\nkeys = ["x", "schlüssel"]\n'
    accounts = TenantAccounts(parse_tenants(text))
    found = {key: accounts.of_key(key) for key in ("secret", "x", "schlüssel", "", "y", f"sha256:{DIGEST}")}
    names = {key: account and account.name for key, account in found.items()}
    assert names == {"secret": "a", "x": "b", "schlüssel": "b", "": None, "y": None, f"sha256:{DIGEST}": None}
    assert [account.tenant.weight for account in accounts] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tenants = 5", "'tenants' must be a table"),
        ("[tenant.a]\nkeys = ['x']", "'tenant' is not known"),
        ("[tenants.a", "is no TOML"),
        ("[tenants.a]", "tenants.a: Object missing required field `keys`"),
        ("[tenants.a]\nkeys = []", "tenants.a.keys"),
        ("[tenants.a]\nkeys = [5]", r"tenants.a.keys\[0\]: Expected `str`"),
        ("[tenants.a]\nkeys = ['']", r"tenants.a.keys\[0\]: a key is not empty"),
        ("[tenants.a]\nkeys = ['x', ' y']", r"tenants.a.keys\[1\]: a key is not empty, and has no space"),
        ("", "names no tenant"),
        (f"[tenants.a]\nkeys = ['sha256:{NOTHING}']", r"tenants.a.keys\[0\]: this is the digest of nothing"),
        ("[tenants.a]\nkeys = ['sha256:abc']", r"tenants.a.keys\[0\]: 'sha256:' is followed by 64"),
        ("[tenants.a]\nkeys = ['x']\n[tenants.b]\nkeys = ['x']", r"tenants.b.keys\[0\]: the tenant a has the same"),
        ("[tenants.a]\nkeys = ['x']\nrequests_per_minute = 0", "tenants.a.requests_per_minute"),
        ("[tenants.a]\nkeys = ['x']\ntokens_per_minute = '5'", "tenants.a.tokens_per_minute"),
        ("[tenants.a]\nkeys = ['x']\nmax_inflight = -1", "tenants.a.max_inflight"),
        ("[tenants.a]\nkeys = ['x']\nweight = 0.0", "tenants.a.weight"),
        ("[tenants.a]\nkeys = ['x']\nweight = nan", "tenants.a.weight"),
        ("[tenants.a]\nkeys = ['x']\nrpm = 5", "tenants.a: Object contains unknown field `rpm`"),
        ("[tenants.'a b']\nkeys = ['x']", "the tenant's name 'a b'"),
    ],
)
def test_what_is_wrong_is_named(text, words, tmp_path):
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_tenants(file)
    assert str(caught.value).startswith(str(file))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"tenants\.toml"):
        read_tenants(tmp_path / "tenants.toml")
