# SPDX-License-Identifier: Apache-2.0
"""What all pages have in common: template, style, scripts and figures are joined to one file."""

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import opacus_memprof
from opacus_memprof.profiles.categories import CATEGORIES, stack_order
from opacus_memprof.reports.palette import THEMES, category_color

_HERE = Path(__file__).parent


def joined(
    title: str, scripts: Sequence[str], content: Mapping[str, Any], categories: Iterable[str], elsewhere: str
) -> str:
    """A page.

    Args:
        title: what the browser calls it.
        scripts: names of files. Each uses names of those before it when it is loaded; functions may use names of any.
        content: what the scripts find in REPORT (data.js), beside the version, the colours of `categories` and what
            each category means.
        elsewhere: who runs no scripts finds the same figures there.
    """
    style = _theme_variables() + (_HERE / "report.css").read_text(encoding="utf-8")
    script = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in scripts)
    colors = [[name, category_color(name)] for name in stack_order(categories)]
    meanings = {category.name: category.meaning for category in CATEGORIES}
    template = Template((_HERE / "template.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(f"{title} · opacus-memprof"),
        elsewhere=html.escape(elsewhere),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=_embedded({"version": opacus_memprof.__version__, "colors": colors, "meanings": meanings, **content}),
    )


def _theme_variables() -> str:
    light, dark = THEMES["light"], THEMES["dark"]
    lines = [f"  --{name}: light-dark({color}, {getattr(dark, name)});\n" for name, color in vars(light).items()]
    return f":root {{\n{''.join(lines)}}}\n"


def _hash(text: str) -> str:
    """For the page's Content-Security-Policy: nothing but these scripts and styles is run, whatever a name contains."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _embedded(content: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element: no `<` can end it or begin a comment."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
