// SPDX-License-Identifier: Apache-2.0
// Modules by their names: `a.b` is inside `a`. Lines by their callers: `a < b` is inside `b`.

/**
 * The tree of {module: {category: bytes}}. Of each node: `name`, in full; `label`, what its parent's label lacks;
 * `parent`; `sizes` by category and `total`, of all modules inside as well; `children`, in order. What a module with
 * children holds itself is one of them, with `itself` set. A module that holds nothing but one other is one node with
 * it.
 */
function moduleTree(modules) {
  const named = Object.entries(modules).map(([name, sizes]) => [name ? name.split(".") : [], sizes]);
  return treeOf(named, translated("all modules"), translated("(no module)"), ".");
}

/** The tree of the program's lines, `{"innermost < its caller < …": {category: bytes}}`; the rest has no known line. */
function lineTree(lines, categories) {
  const rest = { ...categories };
  for (const sizes of Object.values(lines)) {
    for (const [category, size] of Object.entries(sizes)) rest[category] -= size;
  }
  const named = Object.entries(lines).map(([calls, sizes]) => [calls.split(" < ").reverse(), sizes]);
  return treeOf([...named, [[], rest]], translated("all lines"), translated("(no known line)"), " → ");
}

function treeOf(named, all, none, separator) {
  const root = emptyModule("", all);
  for (const [parts, sizes] of named) {
    const path = [root];
    parts.forEach((label, depth) => {
      const { inside } = path[depth];
      if (!inside.has(label)) inside.set(label, emptyModule(parts.slice(0, depth + 1).join(separator), label));
      path.push(inside.get(label));
    });
    for (const module of path) addSizes(module.sizes, sizes);
    path[path.length - 1].own = sizes;
  }
  return treeNode(root, null, none, separator);
}

function emptyModule(name, label) {
  return { name, label, sizes: {}, own: {}, inside: new Map() };
}

function addSizes(total, sizes) {
  for (const [category, size] of Object.entries(sizes)) total[category] = (total[category] ?? 0) + size;
}

function treeNode(module, parent, none, separator) {
  const { name, label, sizes, own, inside } = parent ? endOfChain(module, separator) : module;
  const node = { name, label, parent, sizes, total: sum(sizes) };
  node.children = [...inside.values()].map((child) => treeNode(child, node, none, separator));
  if (node.children.length && sum(own)) {
    const itself = parent ? translated("(itself)") : none;
    node.children.push({ name, label: itself, parent: node, sizes: own, total: sum(own), children: [], itself: true });
  }
  node.children = node.children.filter(({ total }) => total > 0).sort(inOrder);
  return node;
}

/** Numbered layers by their number, others the largest first. */
function inOrder(a, b) {
  const [first, second] = [a, b].map(({ label }) => Number(label.split(".")[0]));
  return Number.isNaN(first) - Number.isNaN(second) || first - second || b.total - a.total;
}

function endOfChain(module, separator) {
  let end = module;
  while (end.inside.size === 1 && !sum(end.own)) {
    const [child] = end.inside.values();
    end = { ...child, label: `${end.label}${separator}${child.label}` };
  }
  return end;
}
