"""Reads an object with Amazon's SDK: read_s3.py ENDPOINT ID SECRET BUCKET KEY. Prints what it is, then what it holds."""

import sys

import boto3

endpoint, key_id, secret, bucket, key = sys.argv[1:]
s3 = boto3.client(
    "s3",
    endpoint_url=endpoint,
    region_name="eu-central-1",
    aws_access_key_id=key_id,
    aws_secret_access_key=secret,
)
answer = s3.get_object(Bucket=bucket, Key=key)
print(answer["ContentType"])
print(answer["ETag"])
print(answer["Body"].read().decode())
