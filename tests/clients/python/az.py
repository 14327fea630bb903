"""Drives the management plane with the unmodified az, and prints each thing that holds.

Usage: az.py HTTPS_BASE TENANT CLIENT SECRET SUBSCRIPTION STORAGE_ACCOUNT, with REQUESTS_CA_BUNDLE and an empty AZURE_CONFIG_DIR set.
az itself runs in this process: starting it anew for every command takes longer than the command.
"""

import io
import json
import sys

from azure.cli.core import get_default_cli

from hook import Hook

base, tenant, client_id, secret, account, storage = sys.argv[1:]
hook = Hook()
GROUP = f"/subscriptions/{account}/resourceGroups/rg1"


def az(line, *more, fails=None):
    """The JSON that a command prints. With `fails`, the exit code it must end with."""
    words = line.split() + list(more)
    out = io.StringIO()
    cli = get_default_cli()
    try:
        code = cli.invoke(words, out_file=out)
    except SystemExit as e:
        code = e.code
    if fails is not None:
        return holds(f"exit {fails}: az {line}", code == fails, (code, out.getvalue()))
    if code != 0:
        raise SystemExit(f"az {line} ended with {code}: {cli.result.error!r}")
    print(f"az {line}")
    text = out.getvalue()
    return json.loads(text) if text.strip() else None


def holds(what, condition, detail=None):
    if not condition:
        raise SystemExit(f"does not hold: {what}: {detail!r}")
    print(what)


az(f"cloud register -n Postrider --endpoint-resource-manager {base}")
az("cloud set -n Postrider")
logged_in = az(f"login --service-principal -u {client_id} -p {secret} --tenant {tenant}")
holds("the subscription is the server's", logged_in[0]["id"] == account, logged_in)

# The documents' own example, with the option's present name.
storage_id = az(f"storage account show --name {storage} --resource-group rg1 --query id")
made = az(
    f"eventgrid event-subscription create --source-resource-id {storage_id} --name example --endpoint {hook.url('/good')}"
    " --max-events-per-batch 1000 --preferred-batch-size-in-kilobytes 512"
)
holds("the example ends well", made["provisioningState"] == "Succeeded", made)
kept = made["destination"]
holds("with its batches", (kept["maxEventsPerBatch"], kept["preferredBatchSizeInKilobytes"]) == (1000, 512), kept)
holds("and its type", kept["endpointType"] == "WebHook", kept)
az(f"eventgrid event-subscription delete --source-resource-id {storage_id} --name example")

topic = az("eventgrid topic create -g rg1 -n az-topic -l westus2 --tags a=b")
holds("a topic is created", (topic["provisioningState"], topic["tags"]) == ("Succeeded", {"a": "b"}), topic)
holds("its endpoint is ours", topic["endpoint"] == f"{base}/topics/az-topic/api/events", topic)
az("eventgrid topic create -g rg1 -n az-nowhere")
names = sorted(t["name"] for t in az("eventgrid topic list -g rg1"))
holds("topics are listed", names == ["az-nowhere", "az-topic"], names)
holds("and by query", [t["name"] for t in az("eventgrid topic list --odata-query", "contains(name,'nowhere')")] == ["az-nowhere"])
holds("it is shown", az("eventgrid topic show -g rg1 -n az-topic")["id"] == topic["id"])
az("eventgrid topic update -g rg1 -n az-topic --tags c=d")
holds("it is updated", az("eventgrid topic show -g rg1 -n az-topic")["tags"] == {"c": "d"})
keys = az("eventgrid topic key list -g rg1 -n az-topic")
new = az("eventgrid topic key regenerate -g rg1 -n az-topic --key-name key1")
holds("a key is regenerated", new["key1"] != keys["key1"] and new["key2"] == keys["key2"])
az("eventgrid topic show -g rg1 -n missing", fails=3)

source = f"--source-resource-id {topic['id']}"
container = f"{storage_id}/blobServices/default/containers/deadletters"
made = az(
    f"eventgrid event-subscription create {source} --name full --endpoint {hook.url('/good')}?code=secret --endpoint-type webhook"
    f" --deadletter-endpoint {container} --included-event-types A B --subject-begins-with /x --subject-ends-with .jpg"
    " --advanced-filter data.key1 NumberIn 2 3 4 --advanced-filter data.key2 StringBeginsWith a b --labels l1 l2"
    " --max-delivery-attempts 10 --event-ttl 120 --expiration-date 2040-01-01T00:00:00+00:00"
    " --delivery-attribute-mapping x-static static one false --delivery-attribute-mapping x-secret static two true"
    " --delivery-attribute-mapping x-dynamic dynamic data.key1"
)
holds("everything is kept", made["filter"]["subjectEndsWith"] == ".jpg" and made["labels"] == ["l1", "l2"], made)
holds("dead letters have a place", made["deadLetterDestination"]["blobContainerName"] == "deadletters", made)
shown = az(f"eventgrid event-subscription show {source} --name full --include-full-endpoint-url true")
holds("the full URL on request", shown["destination"]["endpointUrl"] == hook.url("/good?code=secret"), shown)
shown = az(f"eventgrid event-subscription show {source} --name full --include-static-delivery-attribute-secret true")
# az puts the whole answer there.
values = {a["name"]: a.get("value") for a in shown["destination"]["deliveryAttributeMappings"]["value"]}
holds("secrets on request", values["x-secret"] == "two", values)
az(f"eventgrid event-subscription update {source} --name full --labels l3 --subject-ends-with .png")
shown = az(f"eventgrid event-subscription show {source} --name full --include-full-endpoint-url true")
holds("an update changes what it says", (shown["labels"], shown["filter"]["subjectEndsWith"]) == (["l3"], ".png"), shown)
holds("and keeps the rest", shown["deadLetterDestination"] and shown["filter"]["subjectBeginsWith"] == "/x", shown)
holds("the URL too", shown["destination"]["endpointUrl"] == hook.url("/good?code=secret"), shown)
az(f"eventgrid event-subscription update {source} --name full --endpoint {hook.url('/good/2')}")
names = [s["name"] for s in az(f"eventgrid event-subscription list {source}")]
holds("subscriptions are listed", names == ["full"], names)
names = [s["name"] for s in az("eventgrid event-subscription list --location westus2")]
holds("by location too", "full" in names, names)
az(f"eventgrid event-subscription create {source} --name bad --endpoint {hook.url('/nowhere')}", fails=1)
az(f"eventgrid event-subscription show {source} --name bad", fails=3)
az(f"eventgrid topic event-subscription create -g rg1 --topic-name az-topic --name nested --endpoint {hook.url('/good')}")
names = sorted(s["name"] for s in az("eventgrid topic event-subscription list -g rg1 --topic-name az-topic"))
holds("one set of objects", names == ["full", "nested"], names)
az("eventgrid topic event-subscription delete -g rg1 --topic-name az-topic --name nested --yes")
az(f"eventgrid event-subscription delete {source} --name full")

domain = az("eventgrid domain create -g rg1 -n az-domain -l westus2")
holds("a domain has an endpoint", domain["endpoint"] == f"{base}/domains/az-domain/api/events", domain)
az("eventgrid domain topic create -g rg1 --domain-name az-domain -n one")
holds("domain topics", [t["name"] for t in az("eventgrid domain topic list -g rg1 --domain-name az-domain")] == ["one"])
az(f"eventgrid event-subscription create --source-resource-id {domain['id']}/topics/one --name of-one --endpoint {hook.url('/good')}")
az("eventgrid domain key list -g rg1 -n az-domain")
az("eventgrid domain topic delete -g rg1 --domain-name az-domain -n one")
az("eventgrid domain delete -g rg1 -n az-domain")
az(
    "eventgrid system-topic create -g rg1 -n az-system -l westus2 --topic-type Microsoft.Storage.StorageAccounts"
    f" --source {storage_id}"
)
az(f"eventgrid system-topic event-subscription create -g rg1 --system-topic-name az-system --name blobs --endpoint {hook.url('/good')}")
names = [s["name"] for s in az("eventgrid system-topic event-subscription list -g rg1 --system-topic-name az-system")]
holds("system topics have subscriptions", names == ["blobs"], names)
az("eventgrid system-topic event-subscription delete -g rg1 --system-topic-name az-system --name blobs --yes")
az("eventgrid system-topic delete -g rg1 -n az-system --yes")

custom = az(
    "eventgrid topic create -g rg1 -n az-custom -l westus2 --input-schema customeventschema"
    " --input-mapping-fields eventType=myType id=myId --input-mapping-default-values subject=none dataVersion=1"
)
holds("mappings are kept", custom["inputSchemaMapping"]["eventType"]["sourceField"] == "myType", custom)
cloud = az("eventgrid topic create -g rg1 -n az-cloud -l westus2 --input-schema cloudeventschemav1_0")
az(
    f"eventgrid event-subscription create --source-resource-id {cloud['id']} --name all --endpoint {hook.url('/good')}"
    " --event-delivery-schema cloudeventschemav1_0"
)
holds("topic types", any(t["name"] == "Microsoft.Storage.StorageAccounts" for t in az("eventgrid topic-type list")))
listed = {r["name"] for r in az("resource list -g rg1")}
holds("resources are listed", {"az-topic", "az-custom", "az-cloud"} <= listed, listed)
az(f"rest --method get --url {GROUP}/providers/Microsoft.EventGrid/topics?api-version=2022-06-15")
for name in ["az-topic", "az-nowhere", "az-custom", "az-cloud"]:
    az(f"eventgrid topic delete -g rg1 -n {name}")
holds("nothing is left", az("eventgrid topic list -g rg1") == [])
