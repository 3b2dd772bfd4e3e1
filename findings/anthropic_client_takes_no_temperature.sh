#!/usr/bin/env bash
# Expected: the official client of the Messages API takes what the API takes, `temperature`, `top_p` and `top_k` among it,
#   as its releases up to 0.x did and as clients of OpenAI's API do; at worst it warns where a model ignores one.
# Seen: messages.create() of release 2 has none of the three: they raise TypeError before anything is sent. A server
#   gets them only through `extra_body`, which no type checks.
# Package: anthropic 2.14.0 (PyPI).
# Why it matters to who serves models: a user who points this client at an own server for a greedy answer, to compare
#   two builds say, can't ask for one as every example does; `extra_body={"temperature": 0}` is what to tell them, and a
#   server should not take a missing temperature for a wish.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet anthropic==2.14.0
"$folder/venv/bin/python" - <<'PYTHON'
import inspect
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic

received = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        usage = {"input_tokens": 1, "output_tokens": 1}
        reply = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage}
        body = json.dumps(reply | {"stop_reason": "end_turn", "stop_sequence": None}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none", max_retries=0)
ask = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
names = inspect.signature(client.messages.create).parameters
print("anthropic", anthropic.__version__)
for name in ("temperature", "top_p", "top_k"):
    try:
        client.messages.create(**ask, **{name: 1})
        outcome = "taken"
    except TypeError as error:
        outcome = f"TypeError: {error}"
    print(f"{name}: {outcome}")
    assert name not in names and outcome.startswith("TypeError"), f"the client takes {name} now"
client.messages.create(**ask, extra_body={"temperature": 0})
print("sent with extra_body:", received)
assert [body["temperature"] for body in received] == [0], "extra_body is not sent as part of the body now"
PYTHON
