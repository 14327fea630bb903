"""A collector of traces on loopback that reads them with OpenTelemetry's own message types.

Prints its port, then every span it is sent as one line of JSON. Ends when its input ends.
"""

import base64
import http.server
import json
import os
import sys
import threading

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

IDS = ("traceId", "spanId", "parentSpanId")


def with_bytes(value):
    """OTLP's JSON writes ids in hex where protobuf's JSON has base64."""
    if isinstance(value, dict):
        return {
            key: base64.b64encode(bytes.fromhex(inner)).decode() if key in IDS else with_bytes(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [with_bytes(inner) for inner in value]
    return value


def read(content_type, body):
    if content_type == "application/x-protobuf":
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        # Fields that OpenTelemetry does not know would be kept unseen.
        known = ExportTraceServiceRequest()
        known.CopyFrom(request)
        known.DiscardUnknownFields()
        if known.ByteSize() != len(body):
            raise ValueError("unknown fields")
        return request
    if content_type == "application/json":
        # Unknown names are refused.
        return json_format.ParseDict(with_bytes(json.loads(body)), ExportTraceServiceRequest())
    raise ValueError(f"content type {content_type}")


def plain(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(inner) for inner in value.array_value.values]
    return getattr(value, kind)


def attributes(pairs):
    return {pair.key: plain(pair.value) for pair in pairs}


def spans(request):
    for of_resource in request.resource_spans:
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield {
                    "resource": attributes(of_resource.resource.attributes),
                    "scope": of_scope.scope.name,
                    "traceId": span.trace_id.hex(),
                    "spanId": span.span_id.hex(),
                    "parentSpanId": span.parent_span_id.hex(),
                    "traceState": span.trace_state,
                    "flags": span.flags,
                    "name": span.name,
                    "kind": span.kind,
                    "took": span.end_time_unix_nano - span.start_time_unix_nano,
                    "begun": span.start_time_unix_nano,
                    "attributes": attributes(span.attributes),
                    "links": [{"traceId": link.trace_id.hex(), "spanId": link.span_id.hex()} for link in span.links],
                    "status": {"code": span.status.code, "message": span.status.message},
                }


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        content_type = self.headers["content-type"]
        try:
            if self.path != "/v1/traces":
                raise ValueError(f"path {self.path}")
            for span in spans(read(content_type, body)):
                span["key"] = self.headers["x-key"]
                print(json.dumps(span), flush=True)
            answer = ExportTraceServiceResponse()
            if content_type == "application/json":
                out = json_format.MessageToJson(answer).encode()
            else:
                out = answer.SerializeToString()
            self.send_response(200)
        except Exception as error:
            print(json.dumps({"error": str(error)}), flush=True)
            out = b""
            self.send_response(400)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
os._exit(0)
