# SPDX-License-Identifier: Apache-2.0
"""Which values that a virtual GPU does not compute decide something in a program, by its source."""

from pathlib import Path

import pytest

from opacus_memprof.virtual_gpu.decisions import Frame, decides

# Source, and the lines on the stack when a value is read, the innermost first.
SHOWN = [
    ("x = loss.item()\nprint(x)", [1]),
    ("print(f'{loss:.3f}')", [1]),
    ("losses.append(loss.item())\nprint(sum(losses) / len(losses))", [1]),
    ("self.total += loss.item()\nlogger.info('%.2f', self.total)", [1]),
    ("losses[epoch] = x[i].item()", [1]),
    ("def f():\n    return loss.item()\nx = f()\nprint(x)", [2, 3]),
    ("def f():\n    return loss.item()\nf()", [2, 3]),
    ("if step % 10 == 0:\n    print(loss.item())", [2]),
    ("try:\n    x = loss.item()\nexcept ValueError:\n    pass", [2]),
]
DECIDING = [
    ("if loss.item() > 3:\n    pass", [1]),
    ("if flag:\n    pass", [1]),
    ("x = loss.item()\nif x > 3:\n    pass", [1]),
    ("losses.append(loss.item())\nif losses[-1] < best:\n    pass", [1]),
    ("losses.extend([loss.item()])\nif losses[-1] < best:\n    pass", [1]),
    ("correct += (p == y).sum().item()\naccuracy = correct / n\nif accuracy > best:\n    best = accuracy", [1]),
    ("while x < 3:\n    y = acc.item()\n    x = y + 1", [2]),
    ("assert loss.isfinite().all()", [1]),
    ("def f():\n    return loss.item()\nx = f()\nwhile x:\n    pass", [2, 3]),
    ("def f():\n    return loss.item()\nif f():\n    pass", [2, 3]),
    ("scheduler.step(loss.item())", [1]),
    ("y = x[i.item()]", [1]),
    ("y = table[i]", [1]),
    ("for k in t.tolist():\n    y = x[k]", [1]),
    ("n = t.item()\nx = torch.zeros(n)", [1]),
    ("y = 1 if loss.item() > 3 else 2", [1]),
    ("y = [x for x in a if x.item()]", [1]),
    ("def f():\n    yield loss.item()", [2]),
]


def found(folder: Path, source: str, lines: list[int]) -> bool:
    file = folder / "program.py"
    file.write_text(source + "\n")
    return decides([Frame(str(file), line) for line in lines])


@pytest.mark.parametrize(("source", "lines"), SHOWN)
def test_what_is_shown_or_kept_decides_nothing(tmp_path: Path, source: str, lines: list[int]) -> None:
    assert not found(tmp_path, source, lines)


@pytest.mark.parametrize(("source", "lines"), DECIDING)
def test_what_reaches_a_condition_an_index_or_a_shape_decides(tmp_path: Path, source: str, lines: list[int]) -> None:
    assert found(tmp_path, source, lines)


def test_without_a_source_a_value_decides() -> None:
    assert decides([Frame("<string>", 1)])
    assert decides([])  # read on a thread of autograd
