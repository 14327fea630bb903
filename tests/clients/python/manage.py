"""Drives the management plane with the unmodified azure-mgmt-eventgrid and azure-identity, and prints each thing that holds.

Usage: manage.py HTTPS_BASE TENANT CLIENT SECRET SUBSCRIPTION STORAGE_ACCOUNT, with REQUESTS_CA_BUNDLE set.
"""

import datetime
import ssl
import os
import sys
import urllib.request

from azure.core.credentials import AzureKeyCredential
from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ResourceNotFoundError,
)
from azure.core.messaging import CloudEvent
from azure.eventgrid import EventGridEvent, EventGridPublisherClient
from azure.identity import ClientSecretCredential
from azure.mgmt.eventgrid import EventGridManagementClient, models as m

from hook import Hook

base, tenant, client_id, secret, account, storage = sys.argv[1:]
GROUP = "rg1"
hook = Hook()


def holds(what, condition, detail=None):
    if not condition:
        raise SystemExit(f"does not hold: {what}: {detail!r}")
    print(what)


def refused(what, error, code, act, *words):
    try:
        act()
    except error as e:
        said = str(e)
        holds(what, (code is None or code in said) and all(w in said for w in words), said)
    else:
        raise SystemExit(f"was not refused: {what}")


credential = ClientSecretCredential(tenant, client_id, secret, authority=base, disable_instance_discovery=True)
client = EventGridManagementClient(credential, account, base_url=base, credential_scopes=[f"{base}/.default"])
group_id = f"/subscriptions/{account}/resourceGroups/{GROUP}"
topic_id = f"{group_id}/providers/Microsoft.EventGrid/topics/py-topic"
storage_id = f"{group_id}/providers/Microsoft.Storage/storageAccounts/{storage}"


def web_hook(path, **more):
    return m.WebHookEventSubscriptionDestination(endpoint_url=hook.url(path), **more)


def subscription(path="/good", **more):
    return m.EventSubscription(destination=web_hook(path), **more)


def send(endpoint, key, events):
    EventGridPublisherClient(endpoint, AzureKeyCredential(key)).send(events)


def event(event_id, subject="/orders/1", **more):
    return EventGridEvent(
        id=event_id, subject=subject, event_type="Order.Placed", data={"n": 1}, data_version="1", **more
    )


def topics():
    topic = client.topics.begin_create_or_update(GROUP, "py-topic", m.Topic(location="westus2", tags={"a": "b"})).result()
    holds("a topic is created", topic.provisioning_state == "Succeeded", topic)
    holds("its id is as sent", topic.id == topic_id, topic.id)
    holds("it has an endpoint", topic.endpoint == f"{base}/topics/py-topic/api/events", topic.endpoint)
    holds("it has defaults", (topic.input_schema, topic.public_network_access) == ("EventGridSchema", "Enabled"), topic)
    holds("its tags are kept", topic.tags == {"a": "b"}, topic.tags)
    again = client.topics.begin_create_or_update(GROUP, "py-topic", m.Topic(location="westus2")).result()
    holds("PUT replaces: the tags are gone", not again.tags, again.tags)
    changed = client.topics.begin_update(GROUP, "py-topic", m.TopicUpdateParameters(tags={"c": "d"})).result()
    got = client.topics.get(GROUP, "py-topic")
    holds("PATCH changes the tags", got.tags == {"c": "d"}, (changed, got))
    names = [t.name for t in client.topics.list_by_resource_group(GROUP)]
    holds("lists by group", "py-topic" in names, names)
    names = [t.name for t in client.topics.list_by_subscription(filter="contains(name,'py-')")]
    holds("lists by filter", names == ["py-topic"], names)
    for n in range(5):
        client.topics.begin_create_or_update(GROUP, f"page-{n}", m.Topic(location="westus2")).result()
    pages = [
        [t.name for t in page]
        for page in client.topics.list_by_resource_group(GROUP, filter="contains(name,'page-')", top=2).by_page()
    ]
    holds("lists in pages", [len(p) for p in pages] == [2, 2, 1], pages)
    holds("pages neither skip nor repeat", sorted(sum(pages, [])) == [f"page-{n}" for n in range(5)], pages)
    for n in range(5):
        client.topics.begin_delete(GROUP, f"page-{n}").result()
    keys = client.topics.list_shared_access_keys(GROUP, "py-topic")
    new = client.topics.begin_regenerate_key(GROUP, "py-topic", m.TopicRegenerateKeyRequest(key_name="key1")).result()
    now = client.topics.list_shared_access_keys(GROUP, "py-topic")
    holds("a key is regenerated", new.key1 == now.key1 != keys.key1 and now.key2 == keys.key2)
    refused(
        "the old key is refused at once",
        ClientAuthenticationError,
        None,
        lambda: send(topic.endpoint, keys.key1, [event("no")]),
    )
    refused(
        "a wrong key name is refused",
        HttpResponseError,
        "keyName",
        lambda: client.topics.begin_regenerate_key(GROUP, "py-topic", {"keyName": "key3"}).result(),
    )
    refused("a missing topic is not found", ResourceNotFoundError, "ResourceNotFound", lambda: client.topics.get(GROUP, "none"))
    refused(
        "a name that is too short is refused",
        HttpResponseError,
        "between 3 and 50",
        lambda: client.topics.begin_create_or_update(GROUP, "ab", m.Topic(location="westus2")).result(),
    )
    return topic.endpoint, now.key1


def subscriptions(endpoint, key):
    es = client.event_subscriptions
    made = es.begin_create_or_update(
        topic_id,
        "py-sub",
        m.EventSubscription(
            destination=web_hook(
                "/good?code=secret",
                max_events_per_batch=10,
                preferred_batch_size_in_kilobytes=128,
                delivery_attribute_mappings=[
                    m.StaticDeliveryAttributeMapping(name="x-static", value="one", is_secret=False),
                    m.StaticDeliveryAttributeMapping(name="x-secret", value="two", is_secret=True),
                    m.DynamicDeliveryAttributeMapping(name="x-dynamic", source_field="data.n"),
                ],
            ),
            filter=m.EventSubscriptionFilter(
                subject_begins_with="/orders/",
                included_event_types=["Order.Placed"],
                advanced_filters=[
                    m.NumberGreaterThanAdvancedFilter(key="data.n", value=0),
                    m.StringInAdvancedFilter(key="subject", values=["/orders/1", "/orders/2"]),
                ],
            ),
            labels=["x", "y"],
            retry_policy=m.RetryPolicy(max_delivery_attempts=5, event_time_to_live_in_minutes=60),
            dead_letter_destination=m.StorageBlobDeadLetterDestination(
                resource_id=storage_id, blob_container_name="deadletters"
            ),
            expiration_time_utc=datetime.datetime(2040, 1, 1, tzinfo=datetime.timezone.utc),
        ),
    ).result()
    holds("a subscription is created", made.provisioning_state == "Succeeded", made)
    destination = made.destination
    holds("its URL is masked", destination.endpoint_url is None, destination)
    holds("its base URL is shown", destination.endpoint_base_url == hook.url("/good"), destination)
    holds("batching is kept", destination.max_events_per_batch == 10 and destination.preferred_batch_size_in_kilobytes == 128)
    secrets = {a.name: a.value for a in destination.delivery_attribute_mappings if a.type == "Static"}
    holds("secret headers are hidden", secrets == {"x-static": "one", "x-secret": "Hidden"}, secrets)
    holds("filters are kept", made.filter.advanced_filters[0].value == 0.0 and len(made.filter.advanced_filters) == 2)
    holds("labels are kept", made.labels == ["x", "y"], made.labels)
    policy = made.retry_policy
    holds("the retry policy is kept", (policy.max_delivery_attempts, policy.event_time_to_live_in_minutes) == (5, 60))
    holds("the dead-letter place is kept", made.dead_letter_destination.blob_container_name == "deadletters")
    holds("its topic is in lower case", "/providers/microsoft.eventgrid/topics/py-topic" in made.topic, made.topic)
    full = es.get_full_url(topic_id, "py-sub")
    holds("the full URL is told on request", full.endpoint_url == hook.url("/good?code=secret"), full)
    clear = {a.name: getattr(a, "value", None) for a in es.get_delivery_attributes(topic_id, "py-sub").value}
    holds("headers are told on request", clear["x-secret"] == "two", clear)

    send(endpoint, key, [event("py-1"), event("no", subject="/other")])
    [(path, headers, got)] = hook.delivered()
    holds("an event arrives", (path, got["id"]) == ("/good?code=secret", "py-1"), got)
    lower = {name.lower(): value for name, value in headers.items()}
    wanted = {"x-static": "one", "x-secret": "two", "x-dynamic": "1"}
    holds("with its headers", {name: lower.get(name) for name in wanted} == wanted, lower)

    es.begin_update(topic_id, "py-sub", m.EventSubscriptionUpdateParameters(labels=["z"])).result()
    after = es.get(topic_id, "py-sub")
    holds("PATCH keeps what it does not name", after.labels == ["z"] and after.dead_letter_destination and after.filter.advanced_filters)
    holds("the URL too", es.get_full_url(topic_id, "py-sub").endpoint_url == hook.url("/good?code=secret"))
    es.begin_update(
        topic_id,
        "py-sub",
        m.EventSubscriptionUpdateParameters(
            destination=m.WebHookEventSubscriptionDestination(max_events_per_batch=1),
            retry_policy=m.RetryPolicy(max_delivery_attempts=7, event_time_to_live_in_minutes=61),
        ),
    ).result()
    after = es.get(topic_id, "py-sub")
    holds("a destination without URL keeps it", es.get_full_url(topic_id, "py-sub").endpoint_url == hook.url("/good?code=secret"))
    holds("and changes the rest", after.destination.max_events_per_batch == 1 and after.retry_policy.max_delivery_attempts == 7)
    send(endpoint, key, [event("py-2")])
    holds("changes take effect at once", hook.delivered()[0][2]["id"] == "py-2")

    nested = client.topic_event_subscriptions
    nested.begin_create_or_update(GROUP, "py-topic", "py-nested", subscription()).result()
    names = sorted(s.name for s in es.list_by_resource(GROUP, "Microsoft.EventGrid", "topics", "py-topic"))
    holds("one set of objects, listed by resource", names == ["py-nested", "py-sub"], names)
    names = sorted(s.name for s in nested.list(GROUP, "py-topic"))
    holds("and listed under the topic", names == ["py-nested", "py-sub"], names)
    holds("made nested, read by scope", es.get(topic_id, "py-nested").name == "py-nested")
    holds("made by scope, read nested", nested.get(GROUP, "py-topic", "py-sub").type == "Microsoft.EventGrid/topics/eventSubscriptions")
    names = [s.name for s in es.list_regional_by_resource_group(GROUP, "westus2")]
    holds("listed by location", {"py-nested", "py-sub"} <= set(names), names)
    names = [s.name for s in es.list_regional_by_subscription_for_topic_type("westus2", "Microsoft.EventGrid.Topics")]
    holds("listed by topic type", {"py-nested", "py-sub"} <= set(names), names)
    nested.begin_delete(GROUP, "py-topic", "py-nested").result()
    notice = hook.notices.get(timeout=30)[2]
    holds("the webhook is told of the deletion", notice["eventType"] == "Microsoft.EventGrid.SubscriptionDeletedEvent", notice)

    def failing():
        return es.begin_create_or_update(topic_id, "py-bad", subscription("/nowhere")).result()

    refused("a failed handshake fails the operation", HttpResponseError, "Url validation", failing, "handshake")
    refused("and leaves nothing", ResourceNotFoundError, None, lambda: es.get(topic_id, "py-bad"))

    def failing_update():
        return es.begin_create_or_update(topic_id, "py-sub", subscription("/nowhere")).result()

    refused("so does one on update", HttpResponseError, "Url validation", failing_update)
    kept = es.get(topic_id, "py-sub")
    holds("and leaves the earlier state", kept.provisioning_state == "Succeeded" and kept.labels == ["z"], kept)

    poller = es.begin_create_or_update(topic_id, "py-manual", subscription("/manual"))
    url = hook.manual.get(timeout=30)
    waiting = es.get(topic_id, "py-manual").provisioning_state
    holds("a manual validation is awaited", waiting in ("Creating", "AwaitingManualAction"), waiting)
    trust = ssl.create_default_context(cafile=os.environ["REQUESTS_CA_BUNDLE"])
    with urllib.request.urlopen(url, context=trust, timeout=30) as answer:
        holds("the validation URL answers", answer.status == 200)
    holds("and the operation ends", poller.result().provisioning_state == "Succeeded")
    es.begin_delete(topic_id, "py-manual").result()

    for what, body, words in [
        ("too many attempts", dict(retry_policy=m.RetryPolicy(max_delivery_attempts=31)), ["maxDeliveryAttempts"]),
        ("a time to live of nothing", dict(retry_policy=m.RetryPolicy(event_time_to_live_in_minutes=0)), ["eventTimeToLiveInMinutes"]),
        ("an expiry in the past", dict(expiration_time_utc=datetime.datetime(2020, 1, 1)), ["expiration"]),
        ("a custom schema for an EventGrid topic", dict(event_delivery_schema="CustomInputSchema"), ["eventDeliverySchema"]),
        (
            "an unknown storage account",
            dict(
                dead_letter_destination=m.StorageBlobDeadLetterDestination(
                    resource_id=storage_id + "0", blob_container_name="deadletters"
                )
            ),
            ["resourceId"],
        ),
        ("a reserved header", dict(), None),
    ]:
        body = subscription(**body)
        if words is None:
            body.destination.delivery_attribute_mappings = [m.StaticDeliveryAttributeMapping(name="aeg-x", value="1")]
            words = ["deliveryAttributeMappings"]
        act = lambda: es.begin_create_or_update(topic_id, "py-wrong", body).result()
        refused(f"{what} is refused by name", HttpResponseError, "InvalidRequest", act, *words)
    es.begin_delete(topic_id, "py-sub").result()
    refused("a deleted subscription is gone", ResourceNotFoundError, None, lambda: es.get(topic_id, "py-sub"))


def schemas():
    cloud = client.topics.begin_create_or_update(
        GROUP, "py-cloud", m.Topic(location="westus2", input_schema="CloudEventSchemaV1_0")
    ).result()
    body = subscription("/good/cloud", event_delivery_schema="CloudEventSchemaV1_0")
    client.event_subscriptions.begin_create_or_update(cloud.id, "all", body).result()
    key = client.topics.list_shared_access_keys(GROUP, "py-cloud").key2
    send(cloud.endpoint, key, [CloudEvent(source="/py", type="Py.Sent", data={"n": 1}, id="ce-1", extensions={"tenant": "x"})])
    [(path, _, got)] = hook.delivered()
    holds("CloudEvents arrive after an OPTIONS handshake", (path, got["id"], got["tenant"]) == ("/good/cloud", "ce-1", "x"), got)
    mapping = m.JsonInputSchemaMapping(
        id=m.JsonField(source_field="MyId"),
        event_type=m.JsonFieldWithDefault(source_field="MyType", default_value="Custom"),
        subject=m.JsonFieldWithDefault(default_value="Sub"),
        data_version=m.JsonFieldWithDefault(default_value="1"),
    )
    custom = client.topics.begin_create_or_update(
        GROUP, "py-custom", m.Topic(location="westus2", input_schema="CustomEventSchema", input_schema_mapping=mapping)
    ).result()
    holds("a mapping is kept", custom.input_schema_mapping.event_type.default_value == "Custom", custom.input_schema_mapping)
    client.event_subscriptions.begin_create_or_update(custom.id, "all", subscription("/good/custom")).result()
    send(custom.endpoint, client.topics.list_shared_access_keys(GROUP, "py-custom").key1, [{"MyId": "c-1", "x": 1}])
    [(_, _, got)] = hook.delivered()
    holds("custom events are mapped", (got["id"], got["eventType"], got["subject"]) == ("c-1", "Custom", "Sub"), got)
    for name in ["py-cloud", "py-custom"]:
        client.topics.begin_delete(GROUP, name).result()


def tokens(endpoint):
    client.event_subscriptions.begin_create_or_update(topic_id, "py-token", subscription("/good/token")).result()
    EventGridPublisherClient(endpoint, credential).send([event("token-1")])
    holds("a token publishes", hook.delivered()[0][2]["id"] == "token-1")
    wrong = ClientSecretCredential(tenant, client_id, "wrong", authority=base, disable_instance_discovery=True)
    refused("a wrong secret gets no token", ClientAuthenticationError, None, lambda: wrong.get_token(f"{base}/.default"))
    client.event_subscriptions.begin_delete(topic_id, "py-token").result()


def domains():
    domain = client.domains.begin_create_or_update(GROUP, "py-domain", m.Domain(location="westus2")).result()
    holds("a domain is created", domain.endpoint == f"{base}/domains/py-domain/api/events", domain)
    holds("with its flags", domain.auto_create_topic_with_first_subscription and domain.auto_delete_topic_with_last_subscription)
    made = client.domain_topics.begin_create_or_update(GROUP, "py-domain", "tenant-a").result()
    holds("a domain topic is created", made.provisioning_state == "Succeeded", made)
    es = client.event_subscriptions
    es.begin_create_or_update(made.id, "of-a", subscription("/good/a")).result()
    es.begin_create_or_update(f"{domain.id}/topics/tenant-b", "of-b", subscription("/good/b")).result()
    es.begin_create_or_update(domain.id, "of-all", subscription("/good/all")).result()
    names = sorted(t.name for t in client.domain_topics.list_by_domain(GROUP, "py-domain"))
    holds("a domain topic comes with its first subscription", names == ["tenant-a", "tenant-b"], names)
    keys = client.domains.list_shared_access_keys(GROUP, "py-domain")
    send(domain.endpoint, keys.key1, [event("d-a", topic="tenant-a"), event("d-b", topic="tenant-b")])
    got = sorted((path, e["id"]) for path, _, e in hook.delivered(4))
    holds("events go by topic", got == [("/good/a", "d-a"), ("/good/all", "d-a"), ("/good/all", "d-b"), ("/good/b", "d-b")], got)
    es.begin_delete(f"{domain.id}/topics/tenant-b", "of-b").result()
    names = [t.name for t in client.domain_topics.list_by_domain(GROUP, "py-domain")]
    holds("and goes with its last", names == ["tenant-a"], names)
    names = [s.name for s in client.domain_event_subscriptions.list(GROUP, "py-domain")]
    holds("domain subscriptions are listed", names == ["of-all"], names)
    names = [s.name for s in es.list_by_domain_topic(GROUP, "py-domain", "tenant-a")]
    holds("domain-topic subscriptions are listed", names == ["of-a"], names)
    new = client.domains.regenerate_key(GROUP, "py-domain", m.DomainRegenerateKeyRequest(key_name="key2"))
    holds("a domain's key is regenerated", new.key1 == keys.key1 and new.key2 != keys.key2)
    client.domain_topics.begin_delete(GROUP, "py-domain", "tenant-a").result()
    client.domains.begin_delete(GROUP, "py-domain").result()
    refused("a deleted domain is gone", ResourceNotFoundError, None, lambda: client.domains.get(GROUP, "py-domain"))


def system_topics():
    body = m.SystemTopic(location="westus2", source=storage_id, topic_type="Microsoft.Storage.StorageAccounts")
    made = client.system_topics.begin_create_or_update(GROUP, "py-system", body).result()
    holds("a system topic is created", (made.provisioning_state, made.source) == ("Succeeded", storage_id), made)
    nested = client.system_topic_event_subscriptions
    sub = nested.begin_create_or_update(GROUP, "py-system", "blobs", subscription("/good/blobs")).result()
    types = sub.filter.included_event_types
    holds("its default event types are filled in", types and "Microsoft.Storage.BlobCreated" in types, types)
    names = [s.name for s in nested.list_by_system_topic(GROUP, "py-system")]
    holds("its subscriptions are listed", names == ["blobs"], names)
    direct = client.event_subscriptions.begin_create_or_update(storage_id, "direct", subscription("/good/blobs")).result()
    holds("a subscription hangs on the account itself", direct.id.startswith(storage_id), direct.id)
    client.event_subscriptions.begin_delete(storage_id, "direct").result()
    nested.begin_delete(GROUP, "py-system", "blobs").result()
    client.system_topics.begin_delete(GROUP, "py-system").result()
    names = [t.name for t in client.system_topics.list_by_resource_group(GROUP)]
    holds("a deleted system topic is gone", "py-system" not in names, names)


def the_rest():
    types = {t.name: t for t in client.topic_types.list()}
    holds("topic types are listed", {"Microsoft.EventGrid.Topics", "Microsoft.Storage.StorageAccounts"} <= set(types))
    names = [t.name for t in client.topic_types.list_event_types("Microsoft.Storage.StorageAccounts")]
    holds("with event types", "Microsoft.Storage.BlobCreated" in names, names)
    holds("operations are listed", len(list(client.operations.list())) > 0)
    client.topics.begin_delete(GROUP, "py-topic").result()
    refused("a deleted topic is gone", ResourceNotFoundError, None, lambda: client.topics.get(GROUP, "py-topic"))
    client.topics.begin_delete(GROUP, "py-topic").result()
    holds("deleting it again does nothing", True)


endpoint, key = topics()
subscriptions(endpoint, key)
schemas()
tokens(endpoint)
domains()
system_topics()
the_rest()
