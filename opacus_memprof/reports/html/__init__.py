# SPDX-License-Identifier: Apache-2.0
"""Builds HTML pages: template, style, scripts and data in one file, which needs no network, server or library."""

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from opacus_memprof.language import current_language, page_labels, tr, tr_sentence
from opacus_memprof.profiles.categories import CATEGORIES, stack_order
from opacus_memprof.profiles.json_object import JsonObject, to_json
from opacus_memprof.reports.figures import THEMES, category_color
from opacus_memprof.versions import VERSION

_HERE = Path(__file__).parent
# Where content has sentences, which are stored in English and shown in the language of who reads them.
_SENTENCES = {
    "computed", "details", "effect", "evidence", "explanation", "headline", "heading", "lead", "lines", "note",
    "remedy", "title", "virtual_mark", "warnings", "where",
}  # fmt: skip


def build_page(
    title: str, scripts: Sequence[str], content: Mapping[str, Any], categories: Iterable[str], fallback: str
) -> str:
    """Returns the text of an HTML page that needs no other file.

    Args:
        title: the title of the browser's tab.
        scripts: names of files, in the order in which they are loaded.
        content: the object REPORT of data.js, to which the version, colours and meanings of categories are added.
        categories: the categories whose colours the page needs.
        fallback: shown if scripts are disabled: a file or command with the same figures.
    """
    style = _theme_variables() + (_HERE / "report.css").read_text(encoding="utf-8")
    script = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in scripts)
    colors = [[name, category_color(name)] for name in stack_order(categories)]
    meanings = {category.name: tr_sentence(category.meaning) for category in CATEGORIES}
    said = content if current_language() == "en" else _in_words_of_the_reader({**content})
    words = {"colors": colors, "meanings": meanings, "labels": page_labels()}
    template = Template((_HERE / "template.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(f"{title} · opacus-memprof"),
        language=current_language(),
        noscript=html.escape(tr("This report needs JavaScript. The same figures: {fallback}.", fallback=fallback)),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=_json_in_script({"version": VERSION, **words, **said}),
    )


def _in_words_of_the_reader(content: Any, is_sentence: bool = False) -> Any:
    """Returns content with its sentences translated."""
    match {**content} if isinstance(content, JsonObject) else content:
        case str():
            return tr_sentence(content) if is_sentence else content
        case list() | tuple():
            return [_in_words_of_the_reader(part, is_sentence) for part in content]
        case dict():
            return {key: _in_words_of_the_reader(part, key in _SENTENCES) for key, part in content.items()}
    return content


def _theme_variables() -> str:
    light, dark = THEMES["light"], THEMES["dark"]
    lines = [f"  --{name}: light-dark({color}, {getattr(dark, name)});\n" for name, color in vars(light).items()]
    return f":root {{\n{''.join(lines)}}}\n"


def _hash(text: str) -> str:
    """Returns the hash of a script or style for the page's Content-Security-Policy.

    Nothing else is run, whatever a name contains.
    """
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _json_in_script(content: Mapping[str, Any]) -> str:
    """Returns JSON for the inside of a script element: no `<` can end the element or begin a comment."""
    return to_json(content).replace("<", "\\u003c")
