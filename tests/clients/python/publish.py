"""Publishes with the unmodified Azure SDK in every way it knows, and prints the ids that were accepted.

Usage: publish.py HTTP_BASE HTTPS_BASE KEY CLIENT_SECRET, with REQUESTS_CA_BUNDLE set.
"""

import datetime
import sys
import time

from azure.core.credentials import AccessToken, AzureKeyCredential, AzureSasCredential
from azure.core.exceptions import ClientAuthenticationError, HttpResponseError, ResourceNotFoundError
from azure.core.messaging import CloudEvent
from azure.eventgrid import EventGridEvent, EventGridPublisherClient, generate_sas

http, https, key, secret = sys.argv[1:]
accepted = []


class Token:
    def get_token(self, *scopes, **options):
        return AccessToken(secret, int(time.time()) + 3600)


def endpoint(base, topic):
    return f"{base}/topics/{topic}/api/events"


def grid_event(event_id, subject="/python"):
    return EventGridEvent(
        id=event_id, subject=subject, event_type="Python.Sent", data={"n": 1, "text": "grün"}, data_version="1.0"
    )


def grid_dict(event_id):
    return {
        "id": event_id,
        "subject": "/python",
        "eventType": "Python.Sent",
        "eventTime": "2026-01-02T03:04:05Z",
        "data": [1, 2],
        "dataVersion": "1",
    }


def send(client, events, ids):
    client.send(events)
    accepted.extend(ids)


def refused(kind, status, act):
    try:
        act()
    except kind as error:
        # The SDK replaces a 404 by an error of its own, without a status.
        assert error.status_code == status or status == 404, (error.status_code, error)
        return error
    raise AssertionError(f"was not refused with {status}")


for name, base in (("http", http), ("https", https)):
    client = EventGridPublisherClient(endpoint(base, "orders"), AzureKeyCredential(key))
    send(client, grid_event(f"py-{name}-one"), [f"py-{name}-one"])
    send(client, [grid_event(f"py-{name}-a"), grid_event(f"py-{name}-b")], [f"py-{name}-a", f"py-{name}-b"])
    send(client, grid_dict(f"py-{name}-dict"), [f"py-{name}-dict"])
    send(client, [grid_dict(f"py-{name}-dicts")], [f"py-{name}-dicts"])

    clouds = EventGridPublisherClient(endpoint(base, "clouds"), AzureKeyCredential(key))
    one = CloudEvent(id=f"py-{name}-ce", source="/python", type="Python.Sent", data={"n": 1})
    send(clouds, one, [one.id])
    extended = CloudEvent(
        id=f"py-{name}-ext", source="/python", type="T", data=b"\x00\x01", extensions={"tenant": "acme"}, subject="s"
    )
    empty = CloudEvent(id=f"py-{name}-empty", source="/python", type="T")
    send(clouds, [extended, empty], [extended.id, empty.id])
    as_dict = {"specversion": "1.0", "id": f"py-{name}-cedict", "source": "/python", "type": "T", "data": "text"}
    send(clouds, as_dict, [as_dict["id"]])

    things = EventGridPublisherClient(endpoint(base, "things"), AzureKeyCredential(key))
    send(things, {"id": f"py-{name}-custom", "any": {"shape": True}}, [f"py-{name}-custom"])

    for zone in (datetime.timezone.utc, None):
        expiry = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=zone) + datetime.timedelta(minutes=5)
        token = generate_sas(endpoint(base, "orders"), key, expiry)
        event_id = f"py-{name}-sas-{'aware' if zone else 'naive'}"
        send(EventGridPublisherClient(endpoint(base, "orders"), AzureSasCredential(token)), grid_event(event_id), [event_id])
    past = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(minutes=5)
    expired = AzureSasCredential(generate_sas(endpoint(base, "orders"), key, past))
    refused(
        ClientAuthenticationError,
        401,
        lambda: EventGridPublisherClient(endpoint(base, "orders"), expired).send(grid_event("no")),
    )
    wrong = EventGridPublisherClient(endpoint(base, "orders"), AzureKeyCredential("d3Jvbmc="))
    error = refused(ClientAuthenticationError, 401, lambda: wrong.send(grid_event("no")))
    assert "The request authorization key is not authorized for" in error.message, error.message

# Tokens go over https only.
send(EventGridPublisherClient(endpoint(https, "orders"), Token()), grid_event("py-token"), ["py-token"])

missing = EventGridPublisherClient(endpoint(http, "missing"), AzureKeyCredential(key))
refused(ResourceNotFoundError, 404, lambda: missing.send(grid_event("no")))
orders = EventGridPublisherClient(endpoint(http, "orders"), AzureKeyCredential(key))
error = refused(HttpResponseError, 400, lambda: orders.send({"id": "no"}))
assert error.error.code == "BadRequest", error
assert "requires 'subject' property to be set" in error.message, error.message
clouds = EventGridPublisherClient(endpoint(http, "clouds"), AzureKeyCredential(key))
refused(HttpResponseError, 400, lambda: clouds.send(grid_event("no")))
large = grid_event("no")
large.data = "x" * 4_000_000
refused(HttpResponseError, 413, lambda: orders.send(large))

# As a module on the edge is published to.
edge = EventGridPublisherClient(
    f"{http}/topics/orders/events", AzureKeyCredential("any"), api_version="2019-01-01-preview"
)
send(edge, grid_event("py-edge"), ["py-edge"])

print("\n".join(accepted))
