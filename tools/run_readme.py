# SPDX-License-Identifier: Apache-2.0
"""Runs README's commands from top to bottom, as somebody who has installed a wheel: `python run_readme.py SCRIPT`.

README is the one of the installed package, as an index shows it. Its train.py runs SCRIPT, whatever its arguments, in
an empty folder; for WITHOUT, a training without privacy, SCRIPT runs with `--mode vanilla`. No compiler is found: PATH
has the environment's programs only.
"""

import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import metadata
from pathlib import Path

# What README calls profiles: the first is written where `run` writes by itself.
PROFILES = {"DIR": "memprof_profile", "WITH": "memprof_profile", "WITHOUT": "memprof_vanilla"}


def commands(readme: str) -> list[list[str]]:
    """The words of each command, in which profiles have the names that they have here."""
    found = re.findall(r"`(opacus-memprof [^`]+)`", readme)
    return [[PROFILES.get(word, word) for word in line.split()] for line in found]


if __name__ == "__main__":
    readme = metadata("opacus-memprof").get_payload()
    assert isinstance(readme, str)
    wanted = commands(readme)
    assert {words[1] for words in wanted} >= {"doctor", "run", "report", "tax", "plan"}, wanted
    with tempfile.TemporaryDirectory() as folder:
        run_script = f"import runpy, sys\ndel sys.argv[1:]\nrunpy.run_path({sys.argv[1]!r}, run_name='__main__')\n"
        Path(folder, "train.py").write_text(run_script)
        vanilla = ["opacus-memprof", "run", "-o", PROFILES["WITHOUT"], sys.argv[1], "--mode", "vanilla"]
        for words in [vanilla, *wanted]:
            print("$", *words, flush=True)
            environment = {**os.environ, "PATH": str(Path(sys.executable).parent)}
            ran = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            printed = ran.stdout.decode()
            failed = re.search(r"  (failed|killed)  [\d ]+s$", printed, re.MULTILINE)  # a virtual training of a plan
            if ran.returncode or failed:
                raise SystemExit(printed)
