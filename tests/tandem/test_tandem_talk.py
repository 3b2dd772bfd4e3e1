"""What `tandem chat` sends and keeps, against a server that answers as it is told."""

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from contracts.errors import Unavailable
from tandem.commands import target
from tandem.commands.chat import Talk

pytestmark = pytest.mark.slow


class Server(ThreadingHTTPServer):
    """`answers`: for each request the pieces of its stream, a failure as an exception's words. `asked`: the bodies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[list[dict]] = []
        self.asked: list[dict] = []


HANG_UP: dict = {"hang up": True}
RESET: dict = {"reset": True}
STALL: dict = {"stall": True}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        events = self.server.answers.pop(0)
        if "status" in events[0]:
            self.send_error_body(events[0])
            return
        self.send_response(200)
        self.end_headers()
        for event in events:
            if event == STALL:
                self.rfile.read(1)  # until the client gives up
            if event == RESET:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())
            if event in (HANG_UP, STALL, RESET):
                return
            line = event.get("comment") or f"data: {json.dumps(event)}"
            self.wfile.write(f"{line}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def send_error_body(self, event: dict) -> None:
        self.send_response(event["status"])
        self.end_headers()
        self.wfile.write(event["body"].encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test says what matters."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def talk(server: Server) -> Talk:
    return Talk(f"http://127.0.0.1:{server.server_port}", "m", {"temperature": 0.0})


def piece(text: str, num_tokens: int = 0) -> dict:
    return {"choices": [{"delta": {"content": text}}], "usage": {"completion_tokens": num_tokens}}


def test_the_whole_talk_is_sent_each_time(server: Server, talk: Talk) -> None:
    server.answers = [[piece("I am "), piece("m.", 2)], [piece("Ada.", 1)]]
    shown: list[str] = []
    timing = talk.answer("Who are you?", shown.append)
    talk.answer("Who am I?", shown.append)
    assert "".join(shown) == "I am m.\nAda.\n"
    assert timing.num_tokens == 2
    said = ["Who are you?", "I am m.", "Who am I?"]
    assert [message["content"] for message in server.asked[1]["messages"]] == said
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2


def test_what_is_asked_for_is_a_stream_with_usage_and_the_sampling(server: Server, talk: Talk) -> None:
    server.answers = [[piece("x", 1)]]
    talk.answer("q", lambda text: None)
    (body,) = server.asked
    assert (body["model"], body["stream"], body["temperature"]) == ("m", True, 0.0)
    assert body["stream_options"]["include_usage"]


def test_what_is_no_event_of_the_answer_is_passed_over(server: Server, talk: Talk) -> None:
    server.answers = [[{"comment": ": still in the queue"}, {"comment": "event: chunk"}, piece("x", 1)]]
    assert talk.answer("q", lambda text: None).num_tokens == 1


def thought(text: str, num_tokens: int = 0) -> dict:
    return {"choices": [{"delta": {"reasoning": text}}], "usage": {"completion_tokens": num_tokens}}


def test_reasoning_is_shown_apart_and_not_said_again(server: Server, talk: Talk) -> None:
    server.answers = [[thought("Who "), thought("indeed?"), piece("Ada."), piece("", 3)], [thought("Hm.", 1)]]
    shown: list[str] = []
    thoughts: list[str] = []
    timing = talk.answer("Who?", shown.append, thoughts.append)
    assert ("".join(shown), "".join(thoughts)) == ("Ada.\n", "Who indeed?\n\n")
    assert timing.num_tokens == 3 and timing.first_s is not None
    thoughts.clear()
    talk.answer("And you?", shown.append, thoughts.append)
    assert "".join(thoughts) == "Hm.\n", "what comes next has a line of its own"
    assert [message["content"] for message in talk.messages] == ["Who?", "Ada."]


def test_a_refused_question_was_never_said(server: Server, talk: Talk) -> None:
    server.answers = [[{"status": 400, "body": '{"error": {"message": "too long"}}'}]]
    with pytest.raises(Unavailable, match="too long"):
        talk.answer("q", lambda text: None)
    assert talk.messages == []


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"error": {"message": "a worker was lost"}}, "a worker was lost"),
        (HANG_UP, "the answer broke off"),
        (RESET, "the answer broke off: .*reset"),
        (STALL, "the answer broke off: timed out"),
    ],
)
def test_an_answer_that_breaks_off_is_kept_as_far_as_it_came(
    server: Server, talk: Talk, monkeypatch: pytest.MonkeyPatch, end: dict, words: str
) -> None:
    monkeypatch.setattr("tandem.commands.target.TIMEOUT_S", 2.0 if end == STALL else 60.0)
    server.answers = [[piece("half"), end]]
    with pytest.raises(Unavailable, match=words):
        talk.answer("q", lambda text: None)
    assert [message["content"] for message in talk.messages] == ["q", "half"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "a key, please; set TANDEM_API_KEY or OPENAI_API_KEY to the server's key"),
        ({"OPENAI_API_KEY": "old"}, "a key, please; the key in OPENAI_API_KEY is not one of the server's"),
        ({"TANDEM_API_KEY": "a,b", "OPENAI_API_KEY": "old"}, "a key, please; the key in TANDEM_API_KEY is not"),
    ],
)
def test_where_a_key_is_wanted_the_variables_are_named(
    server: Server, talk: Talk, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str], words: str
) -> None:
    for name in target.KEYS:
        monkeypatch.delenv(name, raising=False)
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    server.answers = [[{"status": 401, "body": '{"error": {"message": "a key, please"}}'}]]
    with pytest.raises(Unavailable, match=words):
        talk.answer("q", lambda text: None)


@pytest.mark.parametrize("body", ["", "<html>", "[]", '{"error": "odd"}'])
def test_an_error_without_words_is_told_by_its_status(server: Server, talk: Talk, body: str) -> None:
    server.answers = [[{"status": 502, "body": body}]]
    with pytest.raises(Unavailable, match="answers 502"):
        talk.answer("q", lambda text: None)
