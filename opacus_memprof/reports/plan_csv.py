# SPDX-License-Identifier: Apache-2.0
"""The runs of a plan as a table, for spreadsheets and data frames."""

import csv
import os

from opacus_memprof.profiles.files import replacing
from opacus_memprof.profiles.plan import Plan
from opacus_memprof.reports.plan import rows

_OF_RUN = (
    "fits",
    "status",
    "steps",
    "samples",
    "requested_bytes",
    "reserved_bytes",
    "may_reserve_bytes",
    "context_bytes",
    "retries",
    "category",
    "module",
    "phase",
)
COLUMNS = ("candidate", "gpu", "value", *_OF_RUN)


def write_plan_csv(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a row for each run: COLUMNS, and the bytes by category at its peak as `CATEGORY_bytes`.

    `value` is that of the argument that is searched, and empty where none is.

    Raises:
        MemprofError: `path` cannot be written.
    """
    found = list(rows(plan))
    categories = sorted({category for _, _, run in found for category in run.categories})
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*COLUMNS, *(f"{category}_bytes" for category in categories)))
        for label, gpu, run in found:
            own = [run.get(name) for name in _OF_RUN]
            writer.writerow((label, gpu, run.get("value") or "", *own, *(run.categories.get(c, 0) for c in categories)))
