"""Looks into the queues of a storage account with the unmodified Azure SDK.

queues.py make ENDPOINT ACCOUNT KEY QUEUE   makes a queue
queues.py read ENDPOINT ACCOUNT KEY QUEUE   prints the events in its messages and how long the messages stay, as a
                                            JSON list; the messages remain
"""

import json
import sys

from azure.core.exceptions import ResourceNotFoundError
from azure.storage.queue import QueueServiceClient, TextBase64DecodePolicy

what, endpoint, account, key, name = sys.argv[1:]
service = QueueServiceClient(endpoint, credential={"account_name": account, "account_key": key})
queue = service.get_queue_client(name, message_decode_policy=TextBase64DecodePolicy())

if what == "make":
    queue.create_queue()
elif what == "read":
    try:
        found = [
            {
                "event": json.loads(message.content),
                "seconds": round((message.expires_on - message.inserted_on).total_seconds()),
            }
            for message in queue.peek_messages(max_messages=32)
        ]
    except ResourceNotFoundError:
        found = None
    print(json.dumps(found))
else:
    sys.exit(__doc__)
