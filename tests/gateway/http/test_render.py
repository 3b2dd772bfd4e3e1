"""The render endpoints: the prompt that an answer would begin with, and no answer."""

SAY = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f"}}


async def test_a_chat_is_rendered_as_it_would_be_answered(rig, client):
    asked = SAY | {"tools": [TOOL], "max_tokens": 3, "temperature": 0, "seed": 7, "cache_salt": "s", "priority": -1}
    rendered = (await client.post("/v1/chat/completions/render", json=asked, headers={"X-Request-Id": "r"})).json()
    assert rig.workers[0].jobs == []
    await client.post("/v1/chat/completions", json=asked)
    job = rig.workers[0].jobs[0]
    assert rendered["token_ids"] == job.token_ids
    assert rendered["request_id"] == "chatcmpl-r"
    assert (rendered["cache_salt"], rendered["priority"], rendered["stream"]) == ("s", -1, False)
    sampling = rendered["sampling_params"]
    assert (sampling["max_tokens"], sampling["temperature"], sampling["seed"], sampling["n"]) == (3, 0.0, 7, 1)


async def test_each_prompt_of_a_completion_is_rendered_once(client):
    asked = {"prompt": ["one", [1, 2]], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    first, second = (await client.post("/v1/completions/render", json=asked, headers={"X-Request-Id": "r"})).json()
    assert (first["request_id"], second["request_id"]) == ("cmpl-r-0", "cmpl-r-1")
    tokenized = (await client.post("/tokenize", json={"prompt": "one"})).json()["tokens"]
    assert (first["token_ids"], second["token_ids"]) == (tokenized, [1, 2])
    assert first["stream_options"]["include_usage"] is True and first["sampling_params"]["n"] == 2


async def test_what_would_not_be_answered_is_not_rendered(client):
    for path, asked, param in [
        ("/v1/chat/completions/render", SAY | {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions/render", SAY | {"tool_choice": "required"}, "tool_choice"),
        ("/v1/completions/render", {"prompt": []}, "prompt"),
    ]:
        reply = await client.post(path, json=asked)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
