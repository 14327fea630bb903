"""A webhook on loopback that takes part in validation handshakes, for the client scripts."""

import http.server
import json
import queue
import threading
import urllib.request


class Hook:
    """`/good…` proves itself, `/manual…` answers 200 and nothing else, anything else is 404. What was delivered is in `events`."""

    def __init__(self):
        hook = self
        self.events = queue.Queue()
        self.notices = queue.Queue()
        self.manual = queue.Queue()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, status, body=b"", **headers):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_OPTIONS(self):
                if self.path.startswith("/good"):
                    origin = self.headers["webhook-request-origin"]
                    self.answer(200, WebHook_Allowed_Origin=origin, WebHook_Allowed_Rate="*")
                elif self.path.startswith("/manual"):
                    self.answer(200)
                    hook.manual.put(self.headers["webhook-request-callback"])
                else:
                    self.answer(404)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if not self.path.startswith(("/good", "/manual")):
                    return self.answer(404)
                kind = self.headers.get("aeg-event-type")
                if kind == "SubscriptionValidation":
                    data = body[0]["data"]
                    if self.path.startswith("/good"):
                        answer = json.dumps({"validationResponse": data["validationCode"]}).encode()
                        return self.answer(200, answer, content_type="application/json")
                    self.answer(200)
                    return hook.manual.put(data["validationUrl"])
                self.answer(200)
                to = hook.notices if kind == "SubscriptionDeletion" else hook.events
                for event in body if isinstance(body, list) else [body]:
                    to.put((self.path, dict(self.headers), event))

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def url(self, path):
        return self.base + path

    def delivered(self, count=1):
        """The next events that arrive, as (path, headers, event)."""
        return [self.events.get(timeout=30) for _ in range(count)]


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.status, answer.read()
