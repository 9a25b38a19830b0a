// The bytes of a commit's leaves by module, two levels at a time, so that a hundred thousand leaves
// stay quick.

import { chart, css, palette } from "./charts.js";
import { bytes, h, number, plural } from "./dom.js";

const TILES = 250;

// `choose` hears the prefix of the module that was clicked.
export function treemap(leaves, choose) {
  const root = { name: "", children: new Map(), bytes: 0, leaves: 0 };
  leaves.path.forEach((path, i) => {
    let node = root;
    node.bytes += leaves.bytes[i];
    const parts = path.split(/[/.]/);
    let end = 0;
    parts.forEach((part) => {
      end += part.length + 1;
      if (!node.children.has(part))
        node.children.set(part, {
          name: part,
          prefix: path.slice(0, end - 1),
          children: new Map(),
          bytes: 0,
          leaves: 0,
          parent: node,
        });
      node = node.children.get(part);
      node.bytes += leaves.bytes[i];
      node.leaves += 1;
    });
  });
  // A module with nearly all bytes of the one above it is shown in its place.
  const inner = (node) => {
    const main = [...node.children.values()].find(
      (child) => child.bytes > 0.97 * node.bytes && child.children.size,
    );
    return main ? inner(main) : node;
  };
  const colors = palette();
  const [line, text] = [css("--card"), css("--text")];
  const tiles = (node, depth, color) => {
    const sorted = [...node.children.values()]
      .filter((child) => child.bytes)
      .sort((a, b) => b.bytes - a.bytes);
    const made = sorted.slice(0, TILES).map((child, i) => {
      const own = color ?? colors[i % colors.length];
      const below =
        depth > 1 && child.children.size
          ? tiles(inner(child), depth - 1, own).slice(0, 40)
          : undefined;
      return {
        name: child.name,
        value: child.bytes,
        node: child,
        children: below,
        itemStyle: { color: own, borderColor: line, borderWidth: 1 },
      };
    });
    const rest = sorted.slice(TILES).reduce((sum, child) => sum + child.bytes, 0);
    return rest
      ? [...made, { name: `${number(sorted.length - TILES)} others`, value: rest }]
      : made;
  };
  const option = (node) => ({
    tooltip: {
      formatter: (point) =>
        `${point.data?.node?.prefix ?? point.name}\n${bytes(point.value)}` +
        (point.data?.node ? `, ${plural(point.data.node.leaves, "leaf", "leaves")}` : ""),
    },
    series: [
      {
        type: "treemap",
        roam: false,
        nodeClick: false,
        colorMappingBy: "id",
        breadcrumb: { show: false },
        left: 0,
        right: 0,
        top: 0,
        bottom: 0,
        data: tiles(node, 2),
        label: { formatter: (point) => point.name.slice(0, 40), fontSize: 11 },
        upperLabel: {
          show: true,
          height: 18,
          fontSize: 11,
          color: text,
          formatter: (point) => point.name.slice(0, 40),
        },
        itemStyle: { gapWidth: 1, borderWidth: 1, borderColor: line },
        levels: [
          {
            upperLabel: { show: false },
            itemStyle: { gapWidth: 3, borderWidth: 0, borderColor: line },
          },
        ],
      },
    ],
  });
  const crumbs = h("nav", { class: "crumbs", "aria-label": "Modules" });
  const made = chart("Treemap of bytes by module", option(inner(root)), {
    height: 300,
    onclick: (event) => go(event.data?.node),
  });
  function go(node, filter = true) {
    if (!node) return;
    const at = node.children.size ? inner(node) : node;
    if (at.children.size) made.show(option(at));
    const line = [];
    for (let each = at; each; each = each.parent) line.unshift(each);
    crumbs.replaceChildren(
      ...line
        .flatMap((each) => [
          h("button", { class: "plain", onclick: () => go(each) }, each.name || "all leaves"),
          h("span", { class: "quiet" }, "›"),
        ])
        .slice(0, -1),
    );
    if (filter) choose(at.prefix || "");
  }
  go(inner(root), false);
  return h("div", {}, crumbs, made.element);
}
