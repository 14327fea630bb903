"""Looks into a storage account with the unmodified Azure SDK.

blobs.py make ENDPOINT ACCOUNT KEY CONTAINER   makes a container
blobs.py read ENDPOINT ACCOUNT KEY CONTAINER   prints what is in it, as a JSON object by name
"""

import json
import sys

from azure.core.exceptions import ResourceNotFoundError
from azure.storage.blob import BlobServiceClient

what, endpoint, account, key, name = sys.argv[1:]
service = BlobServiceClient(endpoint, credential={"account_name": account, "account_key": key})
container = service.get_container_client(name)

if what == "make":
    container.create_container()
elif what == "read":
    found = {}
    try:
        for listed in container.list_blobs():
            blob = container.get_blob_client(listed.name)
            properties = blob.get_blob_properties()
            found[listed.name] = {
                "type": properties.blob_type,
                "contentType": properties.content_settings.content_type,
                "etag": properties.etag.strip('"'),
                "url": blob.url,
                "text": blob.download_blob().readall().decode(),
            }
    except ResourceNotFoundError:
        found = None
    print(json.dumps(found))
else:
    sys.exit(__doc__)
