# SPDX-License-Identifier: Apache-2.0
"""What a refusal has to say."""

import re

_PLACES = re.compile(r"'[\w.]+'|\(\d[\d, ]*\)|\b\w+\.\w+|\b[Mm]odel\b")
_ADVICE = re.compile(
    r"\b(use|freeze|call|return|compute|replace|give|pass|set|build|register|write|lower|train|put|move|keep|make|run|"
    r"add|remove|leave|divide|average|sum|look|unfreeze|create|construct|wrap|reduce|split|drop|derive|let|do not)\b",
    re.IGNORECASE,
)


def lacks(message: str) -> str:
    """Returns what a refusal does not say: where, or what to change. Empty if it says both."""
    if not _PLACES.search(message):
        return "names no module or shape"
    return "" if _ADVICE.search(message) else "does not say what to change"
