# SPDX-License-Identifier: Apache-2.0
"""The language of what people read: English, or Chinese by the catalogue locale/zh.po.

The messages in the code are English, and a catalogue maps them to another language; a message that it does not have
stays English. Names in files that programs read (keys, categories, kinds of findings) have one language.
"""

import ast
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import resources
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from opacus_memprof.errors import MemprofError

LANGUAGES = ("en", "zh")
VARIABLE = "OPACUS_MEMPROF_LANGUAGE"

_ENTRY = re.compile(r'^msgid ((?:".*"\n)+)msgstr ((?:".*"\n)+)', re.MULTILINE)

_of_process: str | None = None
_of_block: ContextVar[str | None] = ContextVar("language", default=None)


def tr(message: str, /, **values: object) -> str:
    """Returns a message in the current language, with the values in the places of its {names}."""
    translated = _catalogue(current_language()).get(message, message)
    return translated.format(**values) if values else translated


def current_language() -> str:
    """Returns "en" or "zh": of the running `in_language`, of `set_language`, or of OPACUS_MEMPROF_LANGUAGE.

    Raises:
        MemprofError: the variable names another language.
    """
    return _of_block.get() or _of_process or checked(os.environ.get(VARIABLE) or "en", VARIABLE)


def set_language(language: str | None) -> None:
    """Sets the language of this process: "en", "zh", or None for that of OPACUS_MEMPROF_LANGUAGE.

    Raises:
        MemprofError: there is no such language.
    """
    global _of_process
    _of_process = None if language is None else checked(language)


@contextmanager
def in_language(language: str | None) -> Iterator[None]:
    """Sets the language of a block. None changes nothing.

    Raises:
        MemprofError: there is no such language.
    """
    token = _of_block.set(_of_block.get() if language is None else checked(language))
    try:
        yield
    finally:
        _of_block.reset(token)


def checked(language: str, source: str = "the language") -> str:
    """Returns "zh" for "zh", "zh_CN.UTF-8" or "ZH-Hans", and so on.

    Raises:
        MemprofError: there is no such language.
    """
    short = re.split(r"[-_.]", str(language))[0].lower()
    if short not in LANGUAGES:
        raise MemprofError(f"{source} {language!r} is not known: choose one of {', '.join(LANGUAGES)}")
    return short


class _HasLanguage(Protocol):
    @property
    def language(self) -> str | None: ...


S = TypeVar("S", bound=_HasLanguage)
P = ParamSpec("P")
R = TypeVar("R")


def localized(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Returns the method, in the language that its object has as `language`."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with in_language(self.language):
            return method(self, *args, **kwargs)

    return call


def encodable(text: str, encoding: str | None) -> str:
    r"""Returns the text with \u escapes for characters that the encoding does not have.

    The first time it says so on stderr, and names the remedy.
    """
    shown = text.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")
    if shown != text:
        _say_escaped(encoding or "utf-8")
    return shown


@functools.cache
def _say_escaped(encoding: str) -> None:
    print(
        rf"opacus-memprof: characters that {encoding} does not have are shown as \u....: set PYTHONIOENCODING=utf-8",
        file=sys.stderr,
    )


@functools.cache
def _catalogue(language: str) -> dict[str, str]:
    if language == "en":
        return {}
    text = (resources.files("opacus_memprof") / "locale" / f"{language}.po").read_text(encoding="utf-8")
    return {_joined(message): _joined(translation) for message, translation in _ENTRY.findall(text)}


def _joined(literals: str) -> str:
    """Returns the string of lines such as "one " and "two"."""
    return "".join(ast.literal_eval(line) for line in literals.splitlines())
