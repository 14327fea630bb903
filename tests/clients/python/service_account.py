"""Prints the JSON key of a Google service account that nobody knows, its private key new."""

import json

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
pem = key.private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
)
account = {
    "type": "service_account",
    "client_email": "postrider@nowhere.iam.gserviceaccount.com",
    "private_key_id": "1",
    "private_key": pem.decode(),
}
print(json.dumps(account))
