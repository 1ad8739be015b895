# SPDX-License-Identifier: Apache-2.0
"""The rooms of the project and the imports between them. `python tests/rooms.py` prints them, top floor first.

A room is a folder of the package or of csrc, or a file at the package's root. A room stands one floor above the highest
room that it imports from, wherever in a file the import is written. The units inside a room, which are its folders and
its files, have floors in the same way; `python tests/rooms.py clipping` prints those of a room.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "opacus_memprof"
CSRC = ROOT / "csrc"
GENERATED = {"_build_info"}  # setup.py writes it


def python_files() -> dict[str, Path]:
    """Module → file; a package is named as it is imported."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)] = file
    return found


def room(module: str) -> str:
    """`hooks` of `opacus_memprof.hooks.modules`, and `__init__` of `opacus_memprof`."""
    return [*module.split("."), "__init__"][1]


def imported_names(source: str, package: str) -> Iterator[str]:
    """The dotted names of ours that this source in `package` imports, wherever in it that stands.

    What may be a module or something in one, as `c` of `from a.b import c`, is given whole.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "opacus_memprof" and name != "opacus_memprof")


@cache
def module_imports() -> Mapping[str, frozenset[str]]:
    """Module → the modules of ours that it imports. Extensions and generated modules are no sources, and left out."""
    files = python_files()
    found = {}
    for module, file in files.items():
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        names = set()
        for name in imported_names(file.read_text(), package):
            while name not in files and "." in name:
                name = name.rpartition(".")[0]
            names.add(name)
        found[module] = frozenset(names - {module, "opacus_memprof"})
    return found


def included_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """(file, what it includes) of a folder of csrc, brackets and quotes as they are written."""
    directive = re.compile(r'^\s*#\s*include\s*(<[^>]+>|"[^"]+")', re.MULTILINE)
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".h", ".cpp"):
            yield from ((file, name) for name in directive.findall(file.read_text()))


def room_imports() -> dict[str, set[str]]:
    """Room → the other rooms that it imports from."""
    found: dict[str, set[str]] = {}
    for module, names in module_imports().items():
        if room(module) not in GENERATED:
            found.setdefault(room(module), set()).update(room(name) for name in names)
    for folder in sorted(path for path in CSRC.iterdir() if path.is_dir()):
        names = {name.strip('"').split("/")[0] for _, name in included_files(folder) if name.startswith('"')}
        found[f"csrc/{folder.name}"] = {f"csrc/{name}" for name in names if (CSRC / name).is_dir()}
    return {name: others - {name, *GENERATED} for name, others in found.items()}


def unit_imports(name: str) -> dict[str, set[str]]:
    """Returns, for each unit in a room of the package, the other units of the room that it imports from.

    The room's `__init__` is no unit: it names what the room offers.
    """
    prefix = f"opacus_memprof.{name}."
    found: dict[str, set[str]] = {}
    for module, names in module_imports().items():
        if module.startswith(prefix):
            others = {other.removeprefix(prefix).split(".")[0] for other in names if other.startswith(prefix)}
            found.setdefault(module.removeprefix(prefix).split(".")[0], set()).update(others)
    return {unit: others - {unit} for unit, others in found.items()}


def find_circle(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """One circle, its first member again at the end; [] where there is none."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(arrows.get(name, ())):
            if circle := search(other, [*path, name]):
                return circle
        done.add(name)
        return []

    return next((circle for name in sorted(arrows) if (circle := search(name, []))), [])


def floors(arrows: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Room → its floor, the lowest being 1. There must be no circle."""

    @cache
    def floor(name: str) -> int:
        return 1 + max((floor(other) for other in arrows.get(name, ())), default=0)

    return {name: floor(name) for name in arrows}


def print_floors(arrows: Mapping[str, set[str]]) -> None:
    """Prints rooms or units, top floor first, each with its floor and what it imports from."""
    if circle := find_circle(arrows):
        sys.exit(f"they import each other: {' -> '.join(circle)}")
    found = floors(arrows)
    for name in sorted(arrows, key=lambda name: (-found[name], name)):
        print(f"{found[name]:2}  {name:24} {' '.join(sorted(arrows[name]))}")


def main() -> None:
    if sys.argv[1:]:
        for name in sys.argv[1:]:
            print_floors(unit_imports(name))
        return
    arrows = room_imports()
    print_floors(arrows)
    print(f"{len(arrows)} rooms on {max(floors(arrows).values())} floors, {sum(map(len, arrows.values()))} arrows")
    for name in sorted(arrows):
        units = unit_imports(name)
        if units:
            inside = (
                f"a circle: {' -> '.join(circle)}" if (circle := find_circle(units)) else max(floors(units).values())
            )
            print(f"    {name:22} {len(units):2} units, floors: {inside}")


if __name__ == "__main__":
    main()
