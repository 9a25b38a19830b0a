#!/usr/bin/env bash
# s3fs 2026.9.0: an exception within `with fs.open(path, "wb")` publishes what was written so far.
#
# Guess before the run: the upload is given up, and the old object stays, as an object appears only when
# its upload is completed.
# Seen: leaving the block closes the file, and closing completes the upload. The object of before is
# replaced by the first bytes of the new one. `obstore.open_writer`, which looks the same, gives up.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check s3fs==2026.9.0 fsspec==2026.9.0 \
  obstore==0.12.1 'moto[server]==5.2.5'
export AWS_ACCESS_KEY_ID=any AWS_SECRET_ACCESS_KEY=any
"$folder/venv/bin/python" - <<'PYTHON'
import logging
import sys

import obstore
import s3fs
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(port=0)
server.start()
host, port = server.get_host_and_port()
endpoint = f"http://{host}:{port}"
files = s3fs.S3FileSystem(endpoint_url=endpoint)
files.mkdir("bucket")
store = S3Store(
    "bucket",
    endpoint=endpoint,
    region="us-east-1",
    virtual_hosted_style_request=False,
    client_options={"allow_http": True},
)
found = {}
for name, opened in {
    "s3fs": lambda: files.open("bucket/s3fs", "wb"),
    "obstore": lambda: obstore.open_writer(store, "obstore"),
}.items():
    files.pipe(f"bucket/{name}", b"the checkpoint of before")
    try:
        with opened() as file:
            file.write(b"torn")
            raise RuntimeError("the training is out of memory")
    except RuntimeError:
        files.invalidate_cache()
        found[name] = files.cat(f"bucket/{name}")
server.stop()
print(found)
sys.exit(found != {"s3fs": b"torn", "obstore": b"the checkpoint of before"})
PYTHON
