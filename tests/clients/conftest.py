"""Clients that no one here wrote, against a system that runs: see tools/clients.py, which installs and calls them."""

import os

import pytest

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="session")
def url() -> str:
    return os.environ["TANDEM_CLIENTS_URL"] + "/v1"


@pytest.fixture(scope="session")
def model() -> str:
    return os.environ["TANDEM_CLIENTS_MODEL"]
