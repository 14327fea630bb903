"""Makes a user who may do anything with S3 in a moto server, which from then on checks everybody's signature:
s3_user.py ENDPOINT. Prints the user's access key id and secret access key."""

import json
import sys
import urllib.request

import boto3

endpoint = sys.argv[1]
anybody = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
iam = boto3.client("iam", endpoint_url=endpoint, region_name="eu-central-1", **anybody)
iam.create_user(UserName="postrider")
policy = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}],
}
iam.put_user_policy(UserName="postrider", PolicyName="s3", PolicyDocument=json.dumps(policy))
key = iam.create_access_key(UserName="postrider")["AccessKey"]
check_everybody = urllib.request.Request(
    endpoint + "/moto-api/reset-auth", data=b"0", headers={"content-type": "text/plain"}
)
urllib.request.urlopen(check_everybody).close()
print(key["AccessKeyId"], key["SecretAccessKey"])
