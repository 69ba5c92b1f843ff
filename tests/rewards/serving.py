"""A service on this machine that gives rewards, and misbehaves on demand."""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LIMIT_S = 60.0
"""How long a slow answer takes where nobody ends the server before."""
AT_A_TIME = 16
"""Calls that come before any of them is answered, of a path whose answers wait."""


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests = []
        """Path, headers and content of each."""
        self.counts = Counter()
        """Requests by path."""
        self.ended = threading.Event()
        self.at_a_time = self.most_at_a_time = 0
        self.lock = threading.Lock()
        self.are_enough = threading.Event()
        """Set once that many calls have come."""

    def handle_error(self, request, client_address):
        """Nothing: clients are killed in the midst of their requests."""


def reward_of(content):
    """The rewards of a service that counts the even digits of a completion."""
    completions = [
        query.removeprefix(prompt)
        for query, prompt in zip(content["query"], content["prompts"], strict=True)
    ]
    return [sum(c in "02468" for c in text) / max(len(text), 1) for text in completions]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.strip("/").partition("?")[0]
        with server.lock:
            server.requests.append((path, dict(self.headers), content))
            server.counts[path] += 1
            number = server.counts[path]
            server.at_a_time += 1
            server.most_at_a_time = max(server.most_at_a_time, server.at_a_time)
            if server.at_a_time >= AT_A_TIME:
                server.are_enough.set()
        try:
            self.answer(path, number, content)
        finally:
            with server.lock:
                server.at_a_time -= 1

    def answer(self, path, number, content):
        told = ANSWERS.get(path)
        match path:
            case "slow" | "v1/slow/chat/completions":
                self.server.ended.wait(LIMIT_S)
            case "trickle":
                self.send_response(200)
                self.end_headers()
                while not self.server.ended.wait(0.1):
                    self.wfile.write(b" ")
                    self.wfile.flush()
            case "closes":
                self.connection.close()
            case "half":
                self.give(200, '{"rewards": [', length=100)
            case "huge":
                self.give(200, '{"rewards": [0.5], "more": "' + "x" * (5 * 2**20) + '"}')
            case "flaky_500" | "flaky_429" if number == 1:
                self.give(int(path[-3:]), "busy")
            case "flaky_closes" if number == 1:
                self.connection.close()
            case "down":
                self.give(503, "loading the model")
            case "missing_page":
                self.give(404, "<html>no such page</html>")
            case "moved":
                self.give(302, "", Location="/get_reward")
            case "to_https":
                self.give(301, "", Location=f"https://elsewhere{self.path}")
            case "no_page":
                self.send_response(404, f"no {self.path} here")
                self.end_headers()
            case "no_http":
                self.wfile.write(f"what is {self.path}?\r\n".encode())
            case "shows_address":
                self.give(400, f"{self.path} is wrong")
            case "latency":
                self.server.are_enough.wait(LIMIT_S)
                self.give(200, json.dumps({"rewards": [1.0]}))
            case _ if path.endswith("chat/completions"):
                self.give(*self.judged(path, content))
            case _ if told is not None:
                self.give(200, told)
            case _:
                rewards = reward_of(content)
                logs = {"half": [rewards[0] / 2]}
                self.give(200, json.dumps({"rewards": rewards, "extra_logs": logs}))

    def judged(self, path, content):
        """Status and text of a judge, which finds as many points as the question has digits 4."""
        key = self.headers.get("Authorization", "")
        if path == "v1/refuses/chat/completions":
            return 401, f"wrong key: {key}"
        if path == "v1/other/chat/completions":
            return 200, '{"rewards": [0.5]}'
        text = {
            "v1/echoes/chat/completions": f"your key is {key}",
            "v1/silent/chat/completions": None,
            "v1/vague/chat/completions": "quite good",
            "v1/worded/chat/completions": "Score: four",
            "v1/nan/chat/completions": "Score: nan",
        }.get(path, f"Score: 9, no. Score: {content['messages'][0]['content'].count('4')}")
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        return 200, json.dumps({"choices": [choice]})

    def give(self, status, text, *, length=None, **headers):
        body = text.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nothing."""


ANSWERS = {
    "nan": '{"rewards": [NaN]}',
    "infinite": '{"rewards": [-Infinity]}',
    "missing": '{"scores": [1.0]}',
    "list": "[1.0]",
    "none": '{"rewards": [null]}',
    "two": '{"rewards": [1.0, 2.0]}',
    "empty": '{"rewards": []}',
    "no_list": '{"rewards": 1.0}',
    "nested": '{"rewards": [[1.0]]}',
    "text": '{"rewards": ["1.0"]}',
    "bool": '{"rewards": [true]}',
    "html": "<html>welcome</html>",
    "nothing": "",
}
"""What these paths answer, with status 200."""


@contextmanager
def serving():
    """A server, while the block runs."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
