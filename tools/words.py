# SPDX-License-Identifier: Apache-2.0
"""Finds words that make a reader of the project's English stop, and says what to write instead.

Reads code, comments, docstrings, help, messages and documentation, but not names in code. The list grows whenever a
reviewer stumbles. Paths on the command line limit the search: `python tools/words.py docs README.md`.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = [".ci", ".github", "benchmarks", "contrib", "docs", "examples", "news", "tools", "mkdocs.yml", "setup.py"]
PLACES += ["opacus_memprof", "csrc", "pyproject.toml", *(path.name for path in ROOT.glob("*.md"))]
# Results are what programs printed.
SKIPPED = re.compile(r"tools/words\.py|docs/results/(?!README)")
SUFFIXES = {".py", ".pyi", ".md", ".h", ".cpp", ".toml", ".yml", ".yaml", ".cff", ".js", ".html", ".css"}

# A space stands for any white space, with the marks of a comment that goes on in the next line.
WORDS = {
    r"mend(s|ed|ing)?": "fix",
    r"(carry|carries|carried|carrying) out": "run, execute, compute",
    r"(hold|holds|held|holding) against": "compare with",
    r"be (it|they)": "whether",
    r"but for": "except",
    r"(?<!there.)is no (?!longer|more|such|\w+er\b)\w+": "is not a ...",
    r"those that": "a noun: 'tensors that', 'the others'",
    r"in (the|its|their) place of": "instead of",
    r"(take|takes|took|taking) (the|its|their) place( of)?": "replace, wrap",
}
GAP = r"(?:\s|#|//|\* )+"
PATTERNS = {re.compile(rf"\b(?:{words.replace(' ', GAP)})\b", re.IGNORECASE): say for words, say in WORDS.items()}


def files(places: list[str]) -> Iterator[Path]:
    """Yields the files in these places whose text people read."""
    for place in places:
        path = ROOT / place
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in SUFFIXES and not SKIPPED.match(file.relative_to(ROOT).as_posix()):
                yield file


def main() -> None:
    """Prints each place that should be rewritten, and exits with 1 if there is any."""
    found = False
    for path in files(sys.argv[1:] or PLACES):
        text = path.read_text(encoding="utf-8")
        for pattern, say in PATTERNS.items():
            for match in pattern.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                print(f"{path.relative_to(ROOT)}:{line}: {' '.join(match[0].split())!r}: {say}")
                found = True
    sys.exit(found)


if __name__ == "__main__":
    main()
