"""Reads the description of Postrider's own API as others would, and tries it: openapi.py URL SECRET

First whether it is OpenAPI at all; then Schemathesis makes up requests by it and judges the answers by it.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

from openapi_spec_validator import validate

url, secret = sys.argv[1:]
place = f"{url}/postrider/v1/openapi.json"
with urllib.request.urlopen(place) as answer:
    validate(json.load(answer))

# Streams go on until somebody leaves them, and a session has a cookie of its own.
OTHERWISE_TRIED = ["streamEvents", "listen", "answerDelivery", "getSession", "signIn", "signOut"]
command = [
    str(pathlib.Path(sys.executable).parent / "schemathesis"),
    "run",
    place,
    "--url", url,
    "--header", f"Authorization: Bearer {secret}",
    "--phases", "examples,coverage,fuzzing",
    "--mode", "all",
    "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,negative_data_rejection",
    "--max-examples", "8",
    "--seed", "1",
    "--request-timeout", "20",
    "--generation-database", "none",
    "--no-color",
]
for one in OTHERWISE_TRIED:
    command += ["--exclude-operation-id", one]
# It keeps notes where it is run.
with tempfile.TemporaryDirectory() as directory:
    ended = subprocess.run(command, check=False, cwd=directory)
sys.exit(ended.returncode)
