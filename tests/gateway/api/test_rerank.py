"""/score and /rerank against fake workers: each prompt has the row 3, 0, -4."""

from dataclasses import replace

import pytest

from checkpoint.checkpoint import ScoreForm
from gateway.api.openai.scores import RerankFormatter, ScoreFormatter
from gateway.generation.usage import Usage
from tests.gateway.gateway_rig import gateway, pair

USAGE = Usage(7, 0, 0)


@pytest.fixture(params=[None, ScoreForm()], ids=["embeddings", "classifier"])
async def scoring(request, checkpoint):
    """A rig of a model that embeds texts, and of one that classifies pairs; what each pair's score is."""
    form = request.param
    async with gateway(replace(checkpoint, score=form), pair()) as rig:
        yield rig, pytest.approx(1.0 if form is None else 0.9525741)


async def test_pairs_have_scores_in_their_order(scoring):
    rig, expected = scoring
    async with rig.client() as http:
        for path, fields, count in (
            ("/score", {"text_1": "a b", "text_2": ["c", "d e"]}, 2),
            ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d"]}, 2),
            ("/score", {"queries": "a", "documents": "b"}, 1),
        ):
            reply = await http.post(path, json=fields | {"model": rig.front.model})
            body = reply.json()
            assert (reply.status_code, body["object"], body["model"]) == (200, "list", rig.front.model), body
            scores = [{"index": index, "object": "score", "score": expected} for index in range(count)]
            assert body["data"] == scores and body["id"].startswith("score-")
            assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0
    assert {job.sampling.returns_embedding for job in rig.workers[0].jobs} == {True}


async def test_a_classifier_reads_pairs_and_another_model_each_text_once(scoring):
    rig, _ = scoring
    encode = rig.front.prompting.tokenizer.encode
    async with rig.client() as http:
        reply = await http.post("/rerank", json={"query": "the cat", "documents": ["sleeps", "barks", "sleeps"]})
    assert reply.status_code == 200
    texts = ["the cat", "sleeps", "barks"]
    pairs = [("the cat", text) for text in ("sleeps", "barks", "sleeps")]
    is_classifier = rig.front.checkpoint.score is not None
    expected = [encode(*one).ids for one in pairs] if is_classifier else [encode(text).ids for text in texts]
    assert sorted(job.token_ids for job in rig.workers[0].jobs) == sorted(expected)


async def test_documents_come_with_their_texts_and_no_more_than_are_wanted(scoring):
    rig, expected = scoring
    async with rig.client() as http:
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            asked = {"query": "a", "documents": ["b", "c", "d"], "top_n": 2}
            results = (await http.post(path, json=asked)).json()["results"]
            assert results == [
                {"index": index, "document": {"text": text}, "relevance_score": expected}
                for index, text in enumerate("bc")
            ]


def test_the_best_document_comes_first():
    rows = [{"index": index, "row": [value]} for index, value in enumerate((-800.0, 2.0, 800.0))]
    head = {"id": "x", "model": "m", "created": 0, "parts": ((0,), (1,), (2,))}
    ranked = RerankFormatter(**head, form=ScoreForm(), documents=("a", "b", "c"), top_n=0).whole(rows, USAGE)
    assert [(entry["index"], entry["relevance_score"]) for entry in ranked["results"]] == [
        (2, 1.0), (1, pytest.approx(0.8807971)), (0, 0.0),
    ]  # fmt: skip
    plain = ScoreFormatter(**head, form=ScoreForm(is_sigmoid=False)).whole(rows, USAGE)
    assert [entry["score"] for entry in plain["data"]] == [-800.0, 2.0, 800.0]
    between = ScoreFormatter("x", "m", 0, ((0, 1), (0, 2)), None)
    assert between.scores([{"index": i, "row": row} for i, row in enumerate(([1.0, 0.0], [1.0, 1.0], [0.0, 0.0]))]) == [
        pytest.approx(0.5**0.5), 0.0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/score", {"text_1": "a"}, "text_2", "'text_2' must be a text or a list of texts"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "'text_1' has 2 texts and 'text_2' 1"),
        ("/score", {"queries": [], "documents": ["c"]}, "queries", "queries"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n"),
        ("/rerank", {"query": "a", "documents": ["b " * 9000]}, "documents", "maximum context length"),
    ],
)
async def test_bad_fields_are_named(scoring, path, fields, param, words):
    rig, _ = scoring
    async with rig.client() as http:
        reply = await http.post(path, json=fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param) and words in error["message"]


async def test_a_classifier_writes_no_text_and_says_what_it_does_not_score(checkpoint):
    async with gateway(replace(checkpoint, score=ScoreForm("it has 3 labels")), pair()) as rig, rig.client() as http:
        for path, fields in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ):
            reply = await http.post(path, json=fields)
            error = reply.json()["error"]
            assert reply.status_code == 400 and "classifies texts, and writes none: POST /score" in error["message"]
        error = (await http.post("/score", json={"text_1": "a", "text_2": "b"})).json()["error"]
        assert error["message"] == "this model makes no scores here: it has 3 labels"
