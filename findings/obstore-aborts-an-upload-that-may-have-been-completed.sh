#!/usr/bin/env bash
# obstore 0.12.1: after an error for the completion of an upload in parts, it aborts that upload.
#
# Guess before the run: `close()` raises, and leaves the upload as it is. Nobody knows whether it was
# completed, so the caller looks.
# Seen: `close()` sends AbortMultipartUpload before it raises, also if the server has completed the upload,
# and only its answer was an error. On S3 that changes nothing. A service that still lists an upload whose
# object it shows already is asked to delete the parts of that object.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check obstore==0.12.1 'moto[server]==5.2.5' boto3
export AWS_ACCESS_KEY_ID=any AWS_SECRET_ACCESS_KEY=any
"$folder/venv/bin/python" - <<'PYTHON'
import logging
import sys
import threading

import boto3
import obstore
from moto.moto_server.werkzeug_app import create_backend_app
from obstore.store import S3Store
from werkzeug.serving import make_server

logging.getLogger("werkzeug").setLevel(logging.ERROR)
s3 = create_backend_app("s3")
sent = []


def lossy(environ, start_response):
    """S3, whose answer to a completion is lost: the client gets an error."""
    method, query = environ["REQUEST_METHOD"], environ["QUERY_STRING"]
    if "uploadId" in query:
        sent.append(method)
    answer = s3(environ, start_response)
    if method == "POST" and "uploadId" in query:
        list(answer)
        start_response("500 Internal Server Error", [("Content-Length", "0")])
        return [b""]
    return answer


def once(environ, start_response):
    """`lossy`, which may begin an answer twice."""
    begun = []
    body = lossy(environ, lambda *answer: begun.append(answer[:2]))
    start_response(*begun[-1])
    return body


server = make_server("127.0.0.1", 0, once, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
endpoint = f"http://127.0.0.1:{server.port}"
client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
client.create_bucket(Bucket="bucket")
store = S3Store(
    "bucket",
    endpoint=endpoint,
    region="us-east-1",
    virtual_hosted_style_request=False,
    client_options={"allow_http": True},
    retry_config={"max_retries": 0},
)
writer = obstore.open_writer(store, "key", buffer_size=5 << 20)
writer.write(bytes((5 << 20) + 1))
try:
    writer.close()
    raised = False
except Exception:
    raised = True
size = client.head_object(Bucket="bucket", Key="key")["ContentLength"]
print("close raised:", raised, "| requests of the upload:", sent, "| bytes of the object:", size)
sys.exit((raised, sent[-2:], size) != (True, ["POST", "DELETE"], (5 << 20) + 1))
PYTHON
