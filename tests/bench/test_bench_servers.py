"""Servers that run, as bench.serving.gpu takes them."""

import argparse

import pytest

from bench.load.client import session
from bench.load.servers import Named, found_at, named
from contracts.errors import Unavailable
from tests.bench.completions import served


def test_a_name_has_one_address_or_several():
    assert named("vllm=http://a:1/") == Named("vllm", ("http://a:1",))
    assert named("two=http://a:1,https://b") == Named("two", ("http://a:1", "https://b"))


@pytest.mark.parametrize("text", ["http://a:1", "=http://a:1", "vllm=", "vllm=a:1", "vllm=http://a:1,"])
def test_what_is_no_name_and_address_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=URL"):
        named(text)


async def test_a_server_says_its_model_and_version():
    async with served("good") as one, session() as http:
        found = await found_at(http, (one.url, one.url), "")
        named_by_us = await found_at(http, (one.url, "http://other"), "ours")
    assert (found.model, found.version, named_by_us.model) == ("m", "1.2.3", "ours")
    server = named_by_us.server(vocabulary=100, quiet_s=1.0)
    assert server.urls == (one.url, "http://other") and server.vocabulary == 100


async def test_a_server_that_lists_no_model_is_named_or_refused():
    async with served("good", card={}) as one, session() as http:
        with pytest.raises(Unavailable, match="--served-name"):
            await found_at(http, (one.url,), "")
        assert (await found_at(http, (one.url,), "ours")).model == "ours"


async def test_replicas_of_different_models_are_refused():
    async with served("good") as one, served("good", card={"id": "another"}) as other, session() as http:
        with pytest.raises(Unavailable, match="these list 'm', 'another'"):
            await found_at(http, (one.url, other.url), "")
