# SPDX-License-Identifier: Apache-2.0
"""check= with Opacus' modes on several ranks: exact steps pass, and what one rank finds stops all before they step."""

import subprocess
from pathlib import Path

from tests.integration.scripts.check_ranks import CASES
from tests.integration.test_distributed import ENVIRONMENT
from tests.warm_python import interpreter

SCRIPT = Path(__file__).parent / "scripts" / "check_ranks.py"


def test_ranks_are_checked_together() -> None:
    done = subprocess.run([*interpreter(), str(SCRIPT)], capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    endings: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        case, _, words = line.split(" | ")
        endings.setdefault(case, []).append(words)
    assert list(endings) == [" ".join(case) for case in CASES]
    elsewhere = "rank 1 could not take this step and reports the reason; the other ranks stop too. Unchanged."
    for case, (first, second) in endings.items():
        wrap, mode, kind = case.split(" ", 2)
        if kind not in ("fault", "mixing", "mixing on rank 1", "late mixing", "late mixing on rank 1"):
            assert (first, second) == ("trained", "trained"), case
            continue
        assert second.endswith(" Unchanged."), case
        words = "the samples of a batch influence one another in Model: the output of shape [4, 3] changed"
        if kind.startswith("late"):
            words = "the gradients of layer 'second' (Linear) need its forward repeated"
        elif kind == "fault":
            words = (
                f"grad_sample_mode={mode!r} does not clip this model exactly: in step 1 the clipped gradient of second"
            )
        assert second.startswith(words), case
        # Shards of a sum are wrong on both ranks; a sum of their own, and outputs, are wrong on one.
        assert first == (second if wrap == "fsdp2" and "rank 1" not in kind else elsewhere), case
