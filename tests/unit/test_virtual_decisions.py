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
    ("if step == 3: print(loss.item())", [1]),
    ("match step:\n    case 1:\n        print(loss.item())", [3]),
    ("with tqdm(loader) as bar:\n    bar.set_postfix(loss=loss.item())", [2]),
    ("def f(self):\n    self.last = loss.item()\ndef g(self):\n    if self.done:\n        print(self.last)", [2]),
    ("x = loss.item()\ndef f(x):\n    if x:\n        pass", [1]),
    ("def f():\n    x = loss.item()\ndef g():\n    x = 1\n    if x:\n        pass", [2]),
    ("raise ValueError(f'{loss}')", [1]),
    ("losses[epoch] = loss", [1]),
    ("torch.save(model.state_dict(), path)", [1]),
    ("losses.append(loss.item())\nif losses:\n    print(losses[-1])", [1]),
    ("x = y.cpu()\nif x.dtype == torch.bfloat16 or x.shape[0] > 3:\n    x = x.float()", [1]),
    ("logs[f'{name}_loss'] = loss.mean().item()\nif 'loss' in logs:\n    print(logs)", [1]),
    ("x = {'loss': loss.item()}\nfor name, value in x.items():\n    print(table[name], value)", [1]),
    ("assert loss.isfinite().all()", [1]),
    ("if (\n    first\n    and (torch.isnan(loss) or torch.isinf(loss))\n):\n    pass", [1]),
    ("x = loss.item()\nif not math.isfinite(x):\n    raise ValueError(x)", [1]),
    ("x = loss.item()\nif x is not None:\n    print(x)", [1]),
    ("losses.append(loss.item())\nif len(losses) > 3:\n    print(losses)", [1]),
    ("raise failure(loss.item())", [1]),
    ("dist.gather_object(x, found)\nprint(found)", [1]),
    ("dist.gather_object(x, found if rank == 0 else None)\nprint(found)", [1]),
    ("dist.broadcast_object_list([x.item()])", [1]),
    ("x = ready() and check() and loss.item()\nprint(x)", [1]),
    ("x = torch.full((2,), loss.item())\nprint(x)", [1]),
    ("log_loss(loss.item())", [1]),
    ("x = Result(loss.item())\nprint(x)", [1]),
    ("csv.writer(file).writerow([step, loss.item()])", [1]),
    ("np.savez(file, loss=np.array([loss.item()]))", [1]),
]
DECIDING = [
    ("dist.gather_object(x, found)\nif found[0] > 3:\n    pass", [1]),
    ("dist.gather_object(x, found if rank == 0 else None)\nif found[0] > 3:\n    pass", [1]),
    ("losses = loss.tolist()\nbest = max(names, key=losses.index)", [1]),
    ("x = i.item() * [0]", [1]),
    ("if loss.item() > 3:\n    pass", [1]),
    ("if flag:\n    pass", [1]),
    ("x = loss.item()\nif x > 3:\n    pass", [1]),
    ("losses.append(loss.item())\nif losses[-1] < best:\n    pass", [1]),
    ("losses.extend([loss.item()])\nif losses[-1] < best:\n    pass", [1]),
    ("correct += (p == y).sum().item()\naccuracy = correct / n\nif accuracy > best:\n    best = accuracy", [1]),
    ("while x < 3:\n    y = acc.item()\n    x = y + 1", [2]),
    ("assert loss > 3", [1]),
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
    ("match int(x):\n    case 1:\n        pass", [1]),
    ("print(x := loss.item())\nif x > 3:\n    pass", [1]),
    ("a, (b, *c) = 1, (loss.item(), 2)\nif b > 3:\n    pass", [1]),
    ("loss.item() < 3 and stop()", [1]),
    ("with first() if loss.item() < 3 else second():\n    pass", [1]),
    ("x = loss.item()\nwith torch.autocast('cuda', enabled=x):\n    pass", [1]),
    ("x[i.item()] = 5", [1]),
    ("x[i] = 5", [1]),
    ("losses.append(loss.item())\nif f(losses):\n    pass", [1]),
    ("x = {'loss': loss.item()}\nfor name, value in x.items():\n    y = z[value]", [1]),
    ("if (\n    first\n    and loss > 3\n):\n    pass", [1]),
    ("if loss.isnan() or loss.item() > 3:\n    pass", [1]),
    ("n = i.item()\nx[:n] += 1", [1]),
    ("del x[i.item()]", [1]),
    ("x = [0] * i.item()", [1]),
    ("if (a and\n    loss.item()): pass", [2]),
    ("x = torch.full((i.item(), 2), 0)", [1]),
    ("f = lambda: x[i.item()]\nprint(f())", [1, 2]),
    ("trial.report(loss.item(), step)\nif trial.should_prune():\n    pass", [1]),
    ("def f(self):\n    self.last = loss.item()\ndef g(self):\n    if self.last > 3:\n        pass", [2]),
    ("def f():\n    global x\n    x = loss.item()\ndef g():\n    if x:\n        pass", [3]),
    ("def f():\n    losses.append(loss.item())\ndef g():\n    if losses[-1] > 3:\n        pass", [2]),
    ("def f():\n    x = 0\n    def g():\n        nonlocal x\n        x = loss.item()\n    if x:\n        pass", [5]),
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


# Source, and what of it is evaluated when a value is read.
SHOWN_THERE = [
    ("if step > 3: print(loss.item())", "loss.item()"),
    ("start = time(); x = loss.item(); took = time() - start\nif took > 3:\n    pass", "loss.item()"),
    ("count = 0; x = loss.item(); print(x, count)\nif count:\n    pass", "loss.item()"),
    ("for x in a: total += x.item(); n += 1\nprint(total / n)", "x.item()"),
    ("if ready() and not torch.isnan(loss): pass", "torch.isnan(loss)"),
    ("print(type(loss.item()))", "loss.item()"),
    ("x = table[place(2)] + loss.item()\nprint(x)", "loss.item()"),
]
DECIDING_THERE = [
    ("if mean() > 3: print('high')", "mean() > 3"),
    ("if loss > 3: print(str(loss))", "loss > 3"),
    ("x = [i for i in range(3) if loss.item() > i]; print(x)", "loss.item()"),
    ("x = loss.item(); y = 'ab'[x > 3:]; print(len(y))", "loss.item()"),
    ("x = 'good' if loss() < 3 else 'bad'; print(x)", "loss() < 3"),
    ("while mean() > 3: print(step)", "mean() > 3"),
]


def decides_at(folder: Path, source: str, part: str) -> bool:
    file = folder / "program.py"
    file.write_text(source + "\n")
    column = source.index(part)
    return decides([Frame(str(file), 1, "<module>", (column, 1, column + len(part)))])


@pytest.mark.parametrize(("source", "part"), SHOWN_THERE)
def test_a_reading_statement_beside_others_decides_nothing(tmp_path: Path, source: str, part: str) -> None:
    assert not decides_at(tmp_path, source, part)


@pytest.mark.parametrize(("source", "part"), DECIDING_THERE)
def test_a_reading_statement_among_others_decides(tmp_path: Path, source: str, part: str) -> None:
    assert decides_at(tmp_path, source, part)


def test_a_function_beside_a_lambda_is_told_by_name(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("x = max(models, key=lambda model: loss(model).item())\nif f(lambda: x).item():\n    pass\n")
    assert decides([Frame(str(file), 1, "<lambda>"), Frame(str(file), 1, "<module>")])
    assert decides([Frame(str(file), 2, "<module>")])


def test_without_a_source_a_value_decides() -> None:
    assert decides([Frame("<string>", 1)])
    assert decides([])  # read on a thread of autograd
