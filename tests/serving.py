"""A local HTTP server for the tests of endpoints."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


def answer(text: str = "a reply", reason: str = "stop", tokens: int = 3) -> dict:
    return {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}],
        "usage": {"completion_tokens": tokens},
    }


class Server:
    """Answers with `script(number of the request, body)`: (status, body, headers)."""

    def __init__(self):
        self.script = lambda number, body: (200, answer(), {})
        self.seen: list[tuple[str, dict, dict]] = []
        self.trickle = 0.0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.seen.append((self.path, body, dict(self.headers)))
                    number = len(server.seen)
                status, found, headers = server.script(number, body)
                data = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # whoever asked may have left
                    for piece in [data[i : i + 1] for i in range(len(data))] if server.trickle else [data]:
                        time.sleep(server.trickle)
                        self.wfile.write(piece)

            def log_message(self, *_):
                pass

        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def echoing(model: Any, tokenizer: Any, change: Callable[[dict], Any] = lambda block: block) -> Callable[..., Any]:
    """A script that answers with the logprobs of the request's tokens and of one more, as vLLM does with `echo`.

    `change` turns them into what a wrong server gives.
    """
    names = [tokenizer.decode([i]) for i in range(len(tokenizer))]

    def script(number, body):
        ids = body["prompt"]
        with torch.no_grad():
            found = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].double(), -1)
        best = int(found[-1].argmax())
        values = [None, *(float(found[i - 1, ids[i]]) for i in range(1, len(ids))), float(found[-1, best])]
        block = {"tokens": [names[i] for i in [*ids, best]], "token_logprobs": values}
        return 200, {"choices": [{"text": "", "logprobs": change(block)}]}, {}

    return script
