"""What watches over a whole run of the suite, in every process of it.

Python's `site` has imported the guard already where it was on the path when the process began, as
in the workers of pytest-xdist: then that one is the only one.
"""

import sys
from pathlib import Path

_at_work = sys.modules.get("sitecustomize")
if _at_work is not None and getattr(_at_work, "__file__", None) == str(
    Path(__file__).with_name("sitecustomize.py")
):
    sys.modules["tests.support.guard.sitecustomize"] = _at_work
