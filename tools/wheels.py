# SPDX-License-Identifier: Apache-2.0
"""One wheel from several, each of which was built beside another torch: `python tools/wheels.py OUT WHEEL...`.

What depends on torch goes into a folder of its own, opacus_memprof/builds/torch2.15-cu13-22705b50, of which the package
takes one when it is imported (opacus_memprof/versions.py). Everything else must be the same in all of them. With
`--platform`, auditwheel then gives the wheel the tag of the manylinux whose symbols it needs.
"""

import argparse
import base64
import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

_PACKAGE = "opacus_memprof"
# Built against torch. _core is not: it reads profiles.
_OF_TORCH = re.compile(rf"{_PACKAGE}/(?:_(?:C|clipping|virtual)\..*\.so$|_build_info\.py$|virtual_gpu/lib/)")
# What may differ: _core's bytes, by the same compiler, and setuptools in WHEEL, whose version a torch may bound.
_COMPILED = re.compile(rf"{_PACKAGE}/_core\..*\.so$")
_GENERATOR = re.compile(rb"^Generator: .*\n", re.MULTILINE)
# Libraries that torch has loaded before.
_OF_OTHERS = ("libtorch*", "libc10*", "libcudart.so.*")


def _name_of_build(build_info: bytes) -> str:
    """The folder for extensions with this _build_info.py."""
    said: dict[str, str | None] = {}
    exec(build_info, said)
    toolkit = f"cu{str(said['TORCH_CUDA']).partition('.')[0]}" if said["TORCH_CUDA"] else "cpu"
    minor = ".".join(str(said["TORCH_VERSION"]).split(".")[:2])
    return f"torch{minor}-{toolkit}-{str(said['ALLOCATOR_HEADERS'])[:8]}"


def _alike(name: str, content: bytes, other: bytes) -> bool:
    if name.endswith(".dist-info/WHEEL"):
        content, other = _GENERATOR.sub(b"", content), _GENERATOR.sub(b"", other)
    return content == other


def merge(wheels: list[Path], out: Path) -> Path:
    """Writes the wheel that has the extensions of all of these, and returns it.

    Raises:
        SystemExit: two of them are of the same torch, or of other Pythons or sources.
    """
    files: dict[str, tuple[zipfile.ZipInfo, bytes]] = {}
    for wheel in wheels:
        if wheel.name != wheels[0].name:
            raise SystemExit(f"{wheel.name} and {wheels[0].name} are not of one version, Python and architecture")
        with zipfile.ZipFile(wheel) as archive:
            build = _name_of_build(archive.read(f"{_PACKAGE}/_build_info.py"))
            for entry in archive.infolist():
                name, content = entry.filename, archive.read(entry)
                if name.endswith(".dist-info/RECORD"):
                    continue
                if _OF_TORCH.match(name):
                    name = f"{_PACKAGE}/builds/{build}/{name.removeprefix(f'{_PACKAGE}/')}"
                    if name in files:
                        raise SystemExit(f"{wheel} is of a torch that another one is of, too: {build}")
                elif name in files and not _COMPILED.match(name) and not _alike(name, content, files[name][1]):
                    raise SystemExit(f"{name} of {wheel} is not that of {wheels[0]}")
                files.setdefault(name, (entry, content))
    out.mkdir(parents=True, exist_ok=True)
    merged = out / wheels[0].name
    record = next(name for name in files if name.endswith(".dist-info/WHEEL")).replace("WHEEL", "RECORD")
    lines = []
    with zipfile.ZipFile(merged, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, (entry, content) in sorted(files.items(), key=lambda item: (".dist-info/" in item[0], item[0])):
            written = zipfile.ZipInfo(name, entry.date_time)
            written.external_attr, written.compress_type = entry.external_attr, zipfile.ZIP_DEFLATED
            archive.writestr(written, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(content)}\n")
        archive.writestr(record, "".join([*lines, f"{record},,\n"]))
    return merged


def repair(wheel: Path, out: Path, platform: str) -> None:
    """Has auditwheel write the wheel again into `out`, for a platform such as manylinux_2_28_x86_64, or "auto"."""
    excluded = [word for name in _OF_OTHERS for word in ("--exclude", name)]
    command = ["repair", "--plat", platform, *excluded, "--wheel-dir", str(out), str(wheel)]
    subprocess.run([sys.executable, "-m", "auditwheel", *command], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--platform", default="auto", help="what auditwheel shall make it for (default: %(default)s)")
    arguments = parser.parse_args()
    merged = merge(arguments.wheels, arguments.out / "plain")
    repair(merged, arguments.out, arguments.platform)
