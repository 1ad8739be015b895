// SPDX-License-Identifier: Apache-2.0
// Modules by their names: `a.b` is inside `a`.

/**
 * The tree of {module: {category: bytes}}. Of each node: `name`, in full; `label`, what its parent's label lacks;
 * `parent`; `sizes` by category and `total`, of all modules inside as well; `children`, in order. What a module with
 * children holds itself is one of them, with `itself` set. A module that holds nothing but one other is one node with
 * it.
 */
function moduleTree(modules) {
  const root = emptyModule("", "all modules");
  for (const [name, sizes] of Object.entries(modules)) {
    const parts = name ? name.split(".") : [];
    const path = [root];
    parts.forEach((label, depth) => {
      const { inside } = path[depth];
      if (!inside.has(label)) inside.set(label, emptyModule(parts.slice(0, depth + 1).join("."), label));
      path.push(inside.get(label));
    });
    for (const module of path) addSizes(module.sizes, sizes);
    path[path.length - 1].own = sizes;
  }
  return treeNode(root, null);
}

function emptyModule(name, label) {
  return { name, label, sizes: {}, own: {}, inside: new Map() };
}

function addSizes(total, sizes) {
  for (const [category, size] of Object.entries(sizes)) total[category] = (total[category] ?? 0) + size;
}

function treeNode(module, parent) {
  const { name, label, sizes, own, inside } = parent ? endOfChain(module) : module;
  const node = { name, label, parent, sizes, total: sum(sizes) };
  node.children = [...inside.values()].map((child) => treeNode(child, node));
  if (node.children.length && sum(own)) {
    const itself = parent ? "(itself)" : "(no module)";
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

function endOfChain(module) {
  let end = module;
  while (end.inside.size === 1 && !sum(end.own)) {
    const [child] = end.inside.values();
    end = { ...child, label: `${end.label}.${child.label}` };
  }
  return end;
}
