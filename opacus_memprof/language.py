# SPDX-License-Identifier: Apache-2.0
"""The language of what people read: English, or Chinese by the catalogue locale/zh.po.

The messages in the code are English, and a catalogue maps them to another language; a message that it does not have
stays English. What programs read has one language: keys, categories, and the sentences of a profile's findings, which
`tr_sentence` translates where they are shown.
"""

import ast
import codecs
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

_ENTRY = re.compile(r'^(?:msgctxt "(\w+)"\n)?msgid ((?:".*"\n)+)msgstr ((?:".*"\n)+)', re.MULTILINE)
ESCAPED = "opacus_memprof.escaped"  # how to encode what an encoding does not have: `errors` of a stream
_BARS = re.compile("[\u2580-\u259f]")  # block elements
_SIGNS = str.maketrans({"×": "x", "·": "-", "…": "...", "→": "->", "≤": "<="})  # noqa: RUF001
_SHAPES = {**dict.fromkeys(("count", "step", "logical"), "[0-9]+"), "size": "[0-9][0-9.]*(?: [KMGT]?i?B)?"}
_SHAPES |= {"phase": r"[\w ]+", "steps": "[0-9]+(?: [a-z ]+)?"}
_VERBATIM = {
    "category",
    "device",
    "largest",
    "layer",
    "line",
    "module",
    "modules",
    "name",
    "optimizer",
    "other",
}  # no messages
_NAME = re.compile(r"\{(\w+)\}")
_OF_TORCH = ("OutOfMemoryError: ", "torch.OutOfMemoryError: ")  # the message is torch's, not one of ours
_MORE = re.compile("(?<=, )[0-9]+ more$")  # the end of a list that is cut
_PUNCTUATION = re.compile("[，。；：、）](?=[^，。；：、）\\s])")
_BETWEEN_SENTENCES = re.compile(r"(?<=\.) (?=[A-Z])")

_of_process: str | None = None
_of_block: ContextVar[str | None] = ContextVar("language", default=None)


def tr(message: str, /, **values: object) -> str:
    """Returns a message in the current language, with the values in the places of its {names}."""
    translated = _catalogue(current_language()).get(message, message)
    return translated.format(**values) if values else translated


def tr_sentence(sentence: str, least_words: int = 0) -> str:
    """Returns a finished English sentence in the current language, with the parts of it that are messages, too.

    In the catalogue such messages have the context "sentence", and names for what varies. A paragraph is translated as
    a whole if the catalogue has it, otherwise sentence by sentence.

    Args:
        sentence: the sentence, or paragraph.
        least_words: messages with names and fewer words of their own are not used: they are parts of sentences.
    """
    exact, patterns = _sentences(current_language())
    if sentence in exact:
        return exact[sentence]
    if sentence.startswith(_OF_TORCH):
        return sentence
    found = (
        (match, translation)
        for pattern, translation, words in patterns
        if words >= least_words and (match := pattern.fullmatch(sentence))
    )
    spanning = None  # a name stands for the end of one sentence and the beginning of the next
    for match, translation in found:
        if not any(map(_BETWEEN_SENTENCES.search, match.groups())):
            return _filled(translation, match)
        spanning = spanning or (match, translation)
    if len(sentences := _BETWEEN_SENTENCES.split(sentence)) > 1:
        translated = [tr_sentence(each, least_words) for each in sentences]
        if translated[0] != sentences[0] and translated[-1] != sentences[-1]:
            return " ".join(translated).replace("。 ", "。")
    return sentence if spanning is None else _filled(spanning[1], spanning[0])


def _filled(translation: str, found: re.Match[str]) -> str:
    """Returns a translation with the parts of the sentence that its names stand for."""

    def of_reader(name: str, part: str) -> str:
        return _MORE.sub(lambda more: tr_sentence(more[0]), part) if name in _VERBATIM else tr_sentence(part)

    return translation.format(**{name: of_reader(name, part) for name, part in found.groupdict().items()})


def tr_help(text: str) -> str:
    """Returns the help of a command or an option in the current language.

    Its paragraphs are the entries of the context "help", each without its line breaks. Punctuation of Chinese is
    followed by a space, because --help breaks lines at spaces alone, and cuts off what is longer than a line.
    """
    catalogue = _catalogue(current_language(), "help")
    paragraphs = (catalogue.get(" ".join(part.split()), part) for part in text.split("\n\n"))
    return _PUNCTUATION.sub(r"\g<0> ", "\n\n".join(paragraphs))


def tr_usage(text: str) -> str:
    """Returns what typer says about a wrong call in the current language: the entries of the context "usage"."""
    exact, patterns = _sentences(current_language(), "usage")
    for pattern, translation, _ in patterns:
        if found := pattern.fullmatch(text):
            return translation.format(**{name: tr_usage(part) for name, part in found.groupdict().items()})
    return exact.get(text, text)


def page_labels() -> dict[str, str]:
    """Returns the labels of HTML pages with their translations: the entries of the context "page"."""
    return _catalogue(current_language(), "page")


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
    """Returns the text, in which `ESCAPED` has replaced characters that the encoding does not have."""
    return text.encode(encoding or "utf-8", ESCAPED).decode(encoding or "utf-8")


def _escape(error: UnicodeError) -> tuple[str, int]:
    r"""Handles characters that an encoding lacks: bars become #, other signs similar ones, the rest \u escapes.

    The first escape of a process prints how to avoid it.
    """
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    text = _BARS.sub("#", text).translate(_SIGNS)
    if not text.isascii() and error.encoding != "utf-8":  # which has all but surrogates, as in some file names
        _say_escaped(error.encoding)
    return text.encode("ascii", "backslashreplace").decode(), error.end


codecs.register_error(ESCAPED, _escape)


@functools.cache
def _say_escaped(encoding: str) -> None:
    print(
        rf"opacus-memprof: characters that {encoding} does not have are shown as \u....: set PYTHONIOENCODING=utf-8",
        file=sys.stderr,
    )


@functools.cache
def _entries(language: str) -> list[tuple[str, str, str]]:
    """Returns the context of each entry of a catalogue (mostly ""), its message, and the translation."""
    if language == "en":
        return []
    text = (resources.files("opacus_memprof") / "locale" / f"{language}.po").read_text(encoding="utf-8")
    return [(context, _joined(message), _joined(other)) for context, message, other in _ENTRY.findall(text)]


@functools.cache
def _catalogue(language: str, context: str = "") -> dict[str, str]:
    return {
        message: other for place, message, other in _entries(language) if place == context and message
    }  # "" is its head


@functools.cache
def _sentences(
    language: str, context: str = "sentence"
) -> tuple[dict[str, str], list[tuple[re.Pattern[str], str, int]]]:
    """Returns translations by sentence, and by a pattern for those with names; what has more words comes first.

    The last is the number of words beside the names.
    """
    sentences = _catalogue(language, context)
    named = sorted((message for message in sentences if "{" in message), key=lambda each: -len(_NAME.sub("", each)))
    words = [len(re.findall("[A-Za-z]+", _NAME.sub("", message))) for message in named]
    return sentences, [
        (_pattern(message), sentences[message], count) for message, count in zip(named, words, strict=True)
    ]


def _pattern(message: str) -> re.Pattern[str]:
    parts = _NAME.split(message)  # text, name, text, name, ..., text
    names = [
        f"(?P={name})" if name in parts[1 : 2 * i : 2] else f"(?P<{name}>{_SHAPES.get(name, '.+?')})"
        for i, name in enumerate(parts[1::2])
    ]
    return re.compile(
        "".join(text for pair in zip(map(re.escape, parts[::2]), [*names, ""], strict=True) for text in pair)
    )


def _joined(literals: str) -> str:
    """Returns the string of lines such as "one " and "two"."""
    return "".join(ast.literal_eval(line) for line in literals.splitlines())
