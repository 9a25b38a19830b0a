"""Where a log may lie."""

from pathlib import Path
from uuid import uuid4

import pytest

from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "memory":
        return open_storage(f"memory://{uuid4()}")
    return open_storage(tmp_path / "store", fsync=False)
