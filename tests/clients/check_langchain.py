"""LangChain's ChatOpenAI: messages, streams, batches, structured output, errors."""

from typing import Literal

import openai
import pydantic
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

QUESTION = "What is the capital of France?"
AS_JSON = 'Answer as JSON with the one key "capital": what is the capital of France?'


class Capital(pydantic.BaseModel):
    """A capital city."""

    city: str = pydantic.Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]


@pytest.fixture
def llm(url, model) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0, max_retries=0, timeout=60)


def test_invoke(llm):
    reply = llm.bind(max_tokens=24).invoke([SystemMessage("You are a helpful assistant."), HumanMessage(QUESTION)])
    assert isinstance(reply, AIMessage) and reply.content
    assert 0 < reply.usage_metadata["output_tokens"] <= 24
    assert reply.response_metadata["finish_reason"] in ("stop", "length")


def test_stream(llm):
    chunks = list(llm.stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert len(chunks) > 2 and whole.content == llm.invoke(QUESTION).content


def test_stream_with_usage(url, model):
    llm = ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0, stream_usage=True, timeout=60)
    chunks = list(llm.stream(QUESTION))
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0


async def test_async(llm):
    text = "".join([chunk.content async for chunk in llm.astream(QUESTION)])
    assert text == (await llm.ainvoke(QUESTION)).content


def test_batch(llm):
    chain = ChatPromptTemplate.from_template("What is the capital of {country}?") | llm | StrOutputParser()
    assert ["Paris" in text for text in chain.batch([{"country": "France"}, {"country": "Italy"}])] == [True, False]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(llm, method):
    assert isinstance(llm.with_structured_output(Capital, method=method).invoke(QUESTION), Capital)
    raw = llm.with_structured_output(Capital, method=method, include_raw=True).invoke(QUESTION)
    assert isinstance(raw["parsed"], Capital) and raw["parsing_error"] is None


def test_tools(llm):
    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    bound = llm.bind_tools([weather], tool_choice="weather", max_tokens=60)
    (call,) = bound.invoke(QUESTION).tool_calls
    assert call["name"] == "weather" and weather.invoke(call).content.startswith("sunny in")
    pieces = list(bound.stream(QUESTION))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    assert whole.tool_calls[0]["args"] == call["args"]


def test_json_mode(llm):
    reply = llm.bind(response_format={"type": "json_object"}, max_tokens=64).invoke(AS_JSON)
    assert "Paris" in reply.content and reply.content.startswith("{")


def test_stop_and_log_probabilities(llm):
    reply = llm.bind(stop=["Paris"], logprobs=True, top_logprobs=1).invoke(QUESTION)
    assert "Paris" not in reply.content
    assert reply.response_metadata["logprobs"]["content"]


def test_completions(url, model):
    llm = OpenAI(model=model, base_url=url, api_key="none", temperature=0, max_tokens=8, max_retries=0)
    assert "4" in llm.invoke("1, 2, 3,")


def test_errors(llm, url):
    with pytest.raises(openai.BadRequestError, match="context"):
        llm.invoke("word " * 20_000)
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(model="nobody", base_url=url, api_key="none", max_retries=0).invoke(QUESTION)
