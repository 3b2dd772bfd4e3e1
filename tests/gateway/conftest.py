from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import httpx
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from checkpoint import Checkpoint, open_checkpoint
from coordinator.store.local_server import RedisServer
from coordinator.store.redis_store import RedisStore
from coordinator.store.store import Store
from testing.memory_store import MemoryStore
from tests.gateway.accepted_text import is_accepted
from tests.gateway.gateway_rig import Rig, gateway, pair


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    """Open the default model; its tokenizer is made once, so that who changes it takes a copy."""
    opened = open_checkpoint("")
    return replace(opened, build_tokenizer=cache(opened.build_tokenizer))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return checkpoint.tokenizer()


@pytest.fixture(scope="session")
def accepts(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Callable[[str, str], bool]:
    """Whether a grammar over the model's tokens takes a text to its end, and may end there."""
    eos = list(checkpoint.eos_token_ids)
    wrapped = LLTokenizer(tokenizer.to_str(), n_vocab=checkpoint.config.vocab_size, eos_token=eos)
    return partial(is_accepted, wrapped, tokenizer)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """The coordinator's, and its twin; no worker dies of silence."""
    if request.param == "memory":
        yield MemoryStore(alive_s=600.0)
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    opened = RedisStore(server.url, "gateway-tests", alive_s=600.0)
    for node in await opened.nodes():
        await opened.leave(node.info.worker_id, node.info.incarnation)
    yield opened
    await opened.close()


@pytest.fixture
async def rig(checkpoint: Checkpoint) -> AsyncIterator[Rig]:
    """A gateway before a pair of fake workers; files that need another one override it."""
    async with gateway(checkpoint, pair()) as rig:
        yield rig


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[httpx.AsyncClient]:
    async with rig.client() as client:
        yield client


@pytest.fixture(scope="module")
def at_once() -> Iterator[None]:
    """No pauses between looks for another place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.dispatch.dispatcher.REPLAY_PERIOD_S", 0.0)
        yield
