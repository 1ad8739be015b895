# SPDX-License-Identifier: Apache-2.0
"""What mkdocs adds to the pages in docs/.

README.md, CONTRIBUTING.md and CHANGELOG.md are pages of the site, so that their links are checked as strictly as those
in docs/. Other files of the repository become pages with their source where a page links to them. The commands come
from the command line itself, the glossary from CONTRIBUTING.md, and the categories' colours from their table.
"""

import json
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from opacus_memprof.profiles.categories import BY_NAME

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
HOME = re.compile(r"https://(?:raw\.githubusercontent|github)\.com/opacus-memprof/opacus-memprof/(?:blob/)?main/")
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s#]+)")
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">'
    r'\s*<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)

# What people search for, and the page that the search has to find.
SEARCHED = {
    "matching distribution": "troubleshooting.html",
    "nvidia-smi": "faq.html",
    "out of memory": "oom.html",
    "segfault": "troubleshooting.html",
    "slow": "faq.html",
}

# Addresses that pages, or headings of pages, have had, and what has their content now.
MOVED = {
    "comparing.html#what-a-change-has-changed": "comparing.html#before-and-after-a-change",
    "distributed.html#many-gpus-without-one": "distributed.html#many-virtual-gpus",
    "flash_clip.html#what-holds-in-every-step": "flash_clip.html#what-is-guaranteed",
    "index.html#from-python": "python.html",
    "index.html#how-it-works": "how_it_works.html",
    "index.html#in-tests": "pytest.html",
    "index.html#in-your-framework": "frameworks.html",
    "index.html#measured": "results/index.html",
    "index.html#several-gpus": "distributed.html",
    "index.html#the-plug-in-route": "python.html#the-plug-in-route",
    "index.html#two-commands": "index.html#install",
    "index.html#versions-and-when-something-is-wrong": "install.html#versions",
    "index.html#what-the-figures-mean": "how_it_works.html#what-the-figures-are",
    "index.html#where-to-read-on": "index.html#read-on",
    "index.html#without-a-gpu": "virtual_gpu.html",
    "install.html#does-it-work-here": "install.html#check-the-installation",
    "results/overhead_h200_large.html": "results/index.html#what-profiling-costs",
    "results/overhead_h200_large_ghost.html": "results/index.html#what-profiling-costs",
    "results/overhead_h200_small.html": "results/index.html#what-profiling-costs",
    "results/overhead_h200_small_2.html": "results/index.html#what-profiling-costs",
    "results/overhead_h200_small_3.html": "results/index.html#what-profiling-costs",
    "sweep.html#another-scheduler": "distributed.html#experiments-and-sweeps",
    "troubleshooting.html#events-are-not-in-the-event-file": (
        "troubleshooting.html#-of--events-are-not-in-the-event-files-which-hold-at-most--records"
    ),
    "troubleshooting.html#opacus-memprof-was-built-for-torch--but-torch--is-installed": (
        "troubleshooting.html#opacus-memprof-was-built-for--but-torch--is-installed"
    ),
    "virtual_gpu.html#the-mark": "virtual_gpu.html#how-reports-mark-it",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that have their source elsewhere."""
    for source, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    for source in sorted(set(_linked_sources(files))):
        files.append(File.generated(config, _source_page(source), content=_source(source)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links and pictures of the repository those of the site."""
    markdown = _relative(page.file, markdown)
    for marker, made in (("<!-- commands:", _commands), ("<!-- glossary:", _glossary)):
        if marker in markdown:
            markdown = markdown.partition(marker)[0] + made()
    markdown = PICTURE.sub(r"![\2](\3#only-light)![\2](\1#only-dark)", markdown)
    folder = posixpath.dirname(page.file.src_uri)
    markdown = LINK.sub(lambda link: posixpath.relpath(_page_of(_target(page.file, link[1])), folder), markdown)
    return _with_colors(markdown) if page.file.src_uri == "categories.md" else markdown


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keeps addresses of headings that have moved: a browser follows what stands behind # by itself."""
    moved = {anchor: new for old, new in MOVED.items() for at, _, anchor in [old.partition("#")] if at == page.url}
    script = "if (location.hash.slice(1) in moved) location.replace(moved[location.hash.slice(1)])"
    known = {anchor: posixpath.relpath(new, posixpath.dirname(page.url)) for anchor, new in moved.items() if anchor}
    return f"{html}\n<script>{{const moved = {json.dumps(known)}; {script}}}</script>" if known else html


def on_post_build(config: MkDocsConfig) -> None:
    """Writes pages that lead from old addresses to new ones. Refuses a site whose search misses what people want."""
    site = Path(config.site_dir)
    for old, new in MOVED.items():
        target, _, anchor = new.partition("#")
        if anchor and f'id="{anchor}"' not in (site / target).read_text(encoding="utf-8"):
            raise PluginError(f"{old} has moved to {new}, which is not there")
        if "#" not in old:
            address = posixpath.relpath(new, posixpath.dirname(old))
            head = f'<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={address}"><title>Moved</title>'
            (site / old).write_text(f'<!doctype html>{head}<a href="{address}">Moved</a>\n', encoding="utf-8")
    if 'href="/assets' in (site / "404.html").read_text(encoding="utf-8"):
        raise PluginError("404.html looks for its style at the server's root, where the site is not: set site_url")
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    for words, page in SEARCHED.items():
        found = (entry for entry in index["docs"] if words in f"{entry['title']} {entry['text']}".lower())
        if not any(entry["location"].startswith(page) for entry in found):
            raise PluginError(f"a search for {words!r} does not find {page}")


def _relative(file: File, markdown: str) -> str:
    """README.md's links to the repository are absolute, for PyPI."""
    return HOME.sub("", markdown) if file.src_uri == PAGES["README.md"] else markdown


def _target(file: File, link: str) -> str:
    """The file of the repository that a link leads to, as a path from its root."""
    sources = {uri: source for source, uri in PAGES.items()}
    source = sources.get(file.src_uri, f"docs/{file.src_uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _page_of(target: str) -> str:
    """The page of the site that shows a file of the repository."""
    if target in PAGES:
        return PAGES[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else _source_page(target)


def _linked_sources(files: Files) -> Iterator[str]:
    """The files outside docs/ that pages link to."""
    for file in files.documentation_pages():
        for link in LINK.findall(_relative(file, file.content_string)):
            target = _target(file, link)
            if target not in PAGES and not target.startswith("docs/") and (ROOT / target).is_file():
                yield target


def _source_page(path: str) -> str:
    return f"source/{path}.md"


def _source(path: str) -> str:
    language = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".yml": "yaml", ".sh": "bash", ".ipynb": "json"}
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n````{language.get(Path(path).suffix, 'text')}\n"
    return head + (ROOT / path).read_text(encoding="utf-8").rstrip("\n") + "\n````\n"


def _glossary() -> str:
    """The table under CONTRIBUTING's heading."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("\n## Glossary\n")[2].partition("\n## ")[0]


def _commands() -> str:
    """All commands and options, as their own help has them, each command under a heading of its own."""
    command = [sys.executable, "-m", "typer", "opacus_memprof.cli", "utils", "docs", "--name", "opacus-memprof"]
    made = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return made[made.index("\n## ") :]


def _with_colors(markdown: str) -> str:
    """Shows each category's colour before its name in the table."""
    return re.sub(
        r"(?<=^\| )`(\w+)`",
        lambda name: f'<span class="swatch" style="background:{BY_NAME[name[1]].color}"></span>{name[0]}',
        markdown,
        flags=re.MULTILINE,
    )
