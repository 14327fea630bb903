"""Reads a blob with Azure's SDK: read_blob.py ENDPOINT KEY CONTAINER PATH. Prints what it is, then what it holds."""

import sys

from azure.storage.blob import BlobServiceClient

endpoint, key, container, path = sys.argv[1:]
blob = BlobServiceClient(endpoint, credential=key, api_version="2025-11-05").get_blob_client(container, path)
properties = blob.get_blob_properties()
print(properties.content_settings.content_type)
print(properties.blob_type)
print(properties.etag)
print(blob.url)
print(blob.download_blob().readall().decode())
