// Two commits: what changed, leaf by leaf, from metadata; and by how much, if tensors are read.

import { axis, chart, grid, palette, zooms } from "./charts.js";
import { job, view } from "./data.js";
import { bytes, card, h, number, plural, short, stat, stepOf, when } from "./dom.js";
import { progressOf } from "./progress.js";
import { virtualTable } from "./table.js";

export const title = ({ parts }) => `${short(parts[0])} → ${short(parts[1] || "")}`;

export async function render(context) {
  const [a, b] = context.parts;
  const shown = progressOf(context.signal);
  const box = h("div", {}, card(null, shown.element));
  const [from, to] = await Promise.all(
    [a, b].map((id) => view(context.store, `commit/${id}.json`, context.signal)),
  );
  job(context.store, `diff/${from.id}/${to.id}.json`, shown.signal, shown.tell)
    .then((found) => box.replaceChildren(...changes(context, found)))
    .catch((error) =>
      box.replaceChildren(
        h("p", { class: "error" }, error.name === "AbortError" ? "Stopped." : error.message),
      ),
    );
  const end = (each) =>
    h("a", { href: `#/${context.store}/commit/${each.id}` }, `${each.run}, ${stepOf(each)}`);
  return [
    h(
      "div",
      { class: "title" },
      h("h1", {}, end(from), " → ", end(to)),
      h("a", { href: `#/${context.store}/diff/${to.id}/${from.id}` }, "turn around"),
    ),
    box,
    beside(from, to),
  ];
}

function beside(from, to) {
  const pairs = [
    ["Id", short(from.id), short(to.id)],
    ["Run", from.run, to.run],
    ["Step", number(from.step), number(to.step)],
    ["When", when(from.time), when(to.time)],
    ["Tags", from.tags.join(", "), to.tags.join(", ")],
    ["Logical", bytes(from.logical_bytes), bytes(to.logical_bytes)],
    ["New", bytes(from.new_bytes), bytes(to.new_bytes)],
    ["Leaves", number(from.leaves), number(to.leaves)],
    ["Ranks", number(from.world), number(to.world)],
    ["Message", from.message, to.message],
  ];
  const values = [from, to].map(
    (each) =>
      new Map([...each.metrics.map(([name, value]) => [name, number(value)]), ...each.links]),
  );
  for (const name of new Set([...values[0].keys(), ...values[1].keys()]))
    pairs.push([name, values[0].get(name) ?? "–", values[1].get(name) ?? "–"]);
  return card(
    "Beside each other",
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["", "Before", "After"].map((name) => h("th", { scope: "col" }, name)),
          ),
        ),
        h(
          "tbody",
          {},
          pairs.map(([name, x, y]) =>
            h(
              "tr",
              { class: x === y ? "" : "different" },
              h("td", { class: "quiet" }, name),
              h("td", {}, x),
              h("td", {}, y),
            ),
          ),
        ),
      ),
    ),
  );
}

function thinned(found) {
  const left = plural(found.thinned, "leaf", "leaves");
  return found.thinned
    ? h("p", { class: "quiet" }, `${left} cannot be compared: a commit was thinned.`)
    : null;
}

function changes(context, found) {
  if (!found.total)
    return [
      card(
        null,
        h("p", {}, `No difference: ${plural(found.unchanged, "leaf", "leaves")} are the same.`),
        thinned(found),
      ),
    ];
  const relative = new Map();
  const option = () => strip(found, relative);
  const made = chart("Change of each leaf, in the order of the state", option(), {
    height: 240,
    onclick: (event) => open(event.dataIndex),
  });
  const open = (i) => {
    if (found.number[i] !== null)
      location.hash = `#/${context.store}/tensor/${found.b.id}/${found.number[i]}`;
  };
  const most = Math.max(1, ...found.changed);
  const listed = virtualTable(
    [
      {
        name: "",
        cell: (i) => ({ added: "+", removed: "−", changed: "~" })[found.change[i]],
        sort: (i) => found.change[i],
        width: "24px",
      },
      {
        name: "Leaf",
        wide: true,
        cell: (i) =>
          found.number[i] === null
            ? found.path[i]
            : h(
                "a",
                { href: `#/${context.store}/tensor/${found.b.id}/${found.number[i]}` },
                found.path[i],
              ),
        sort: (i) => found.path[i],
      },
      {
        name: "What",
        wide: true,
        cell: (i) =>
          found.before[i] === found.after[i]
            ? found.after[i]
            : [found.before[i], found.after[i]].filter((side) => side !== null).join(" → "),
      },
      {
        name: "Changed bytes",
        right: true,
        cell: (i) => bytes(found.changed[i]),
        sort: (i) => found.changed[i],
      },
      {
        name: "",
        cell: (i) => h("span", { class: "bar", share: found.changed[i] / most }),
        width: "90px",
      },
      {
        name: "Relative change",
        right: true,
        cell: (i) =>
          relative.has(found.path[i])
            ? number(relative.get(found.path[i])[0])
            : h("span", { class: "quiet" }, "–"),
        sort: (i) => relative.get(found.path[i])?.[0],
      },
      {
        name: "Largest",
        right: true,
        cell: (i) => (relative.has(found.path[i]) ? number(relative.get(found.path[i])[1]) : ""),
        sort: (i) => relative.get(found.path[i])?.[1],
      },
    ],
    found.path.length,
    { label: "Changed leaves", open, height: 460 },
  );
  const kinds = h(
    "select",
    {
      "aria-label": "Kind of change",
      onchange: (event) =>
        listed.filter(event.target.value && ((i) => found.change[i] === event.target.value)),
    },
    h("option", { value: "" }, "all changes"),
    ["changed", "added", "removed"].map((kind) =>
      h("option", { value: kind }, `${kind} (${number(found.counts[kind] || 0)})`),
    ),
  );
  const note = (more) => {
    for (const [path, far, largest] of more) relative.set(path, [far, largest]);
    made.show(option(), true);
    listed.redraw();
  };
  return [
    card(
      null,
      h(
        "div",
        { class: "stats" },
        ["changed", "added", "removed"].map((kind) => stat(kind, number(found.counts[kind] || 0))),
        stat("unchanged", number(found.unchanged)),
        stat("changed bytes", bytes(found.changed_bytes)),
      ),
      thinned(found),
    ),
    card("Over depth", context.site.static ? null : measure(context, found, note), made.element),
    card(
      "Leaves",
      found.total > found.path.length
        ? h(
            "p",
            { class: "note" },
            `The first ${number(found.path.length)} of ${number(found.total)} changes.`,
          )
        : null,
      h("div", { class: "controls" }, kinds),
      listed.element,
    ),
  ].filter(Boolean);
}

function measure(context, found, note) {
  const box = h("div", { class: "controls" });
  const start = async () => {
    const shown = progressOf(context.signal);
    box.replaceChildren(shown.element);
    try {
      const rows = await job(
        context.store,
        `distances/${found.a.id}/${found.b.id}.json`,
        shown.signal,
        (progress, partial) => {
          shown.tell(progress);
          if (partial) note(partial);
        },
      );
      note(rows);
      box.replaceChildren(h("span", { class: "quiet" }, measured(rows)));
    } catch (error) {
      box.replaceChildren(
        h("span", { class: "quiet" }, error.name === "AbortError" ? "Stopped. " : error.message),
        h("button", { onclick: start }, "Measure relative change"),
      );
    }
  };
  box.append(
    h("span", { class: "quiet" }, "share of each leaf's bytes in changed chunks"),
    h("button", { onclick: start }, "Measure relative change"),
  );
  return box;
}

const hasBar = (far) => typeof far === "number" && far > 0;

// What was measured, and for how much of it a logarithmic axis has no place.
function measured(rows) {
  if (!rows.length) return "No tensor of floats changed: nothing was measured.";
  const without = rows.filter(([, far]) => !hasBar(far)).length;
  return (
    "relative change: norm of the difference by norm of the tensor before" +
    (without
      ? `; ${plural(without, "tensor")} without a bar: the change is 0, infinite or NaN`
      : "")
  );
}

function strip(found, relative) {
  const isMeasured = relative.size > 0;
  const colors = palette();
  const kinds = { changed: colors[0], added: colors[6], removed: colors[1] };
  const value = (i) => {
    const far = relative.get(found.path[i])?.[0];
    if (isMeasured) return hasBar(far) ? far : null;
    return found.bytes[i] ? found.changed[i] / found.bytes[i] : 1;
  };
  const least = Math.min(...found.path.map((_, i) => value(i) ?? Infinity));
  const floor = least < Infinity ? 10 ** Math.floor(Math.log10(least)) : 1;
  return {
    grid: grid({ bottom: 34, top: 12 }),
    tooltip: {
      trigger: "axis",
      axisPointer: { type: "shadow" },
      formatter: ([point]) => {
        const i = point.dataIndex;
        const far = relative.get(found.path[i]);
        return [
          found.path[i],
          `${found.change[i]}, ${bytes(found.changed[i])} of ${bytes(found.bytes[i])}`,
          ...(far ? [`relative change ${number(far[0])}`] : []),
        ].join("\n");
      },
    },
    xAxis: axis("category", {
      data: found.path.map((_, i) => i),
      axisLabel: { show: false },
      splitLine: { show: false },
    }),
    yAxis: isMeasured
      ? axis("log", { min: floor, startValue: floor })
      : axis("value", {
          max: 1,
          axisLabel: { formatter: (share) => `${Math.round(100 * share)} %` },
        }),
    dataZoom: zooms(),
    series: [
      {
        type: "bar",
        barMaxWidth: 14,
        large: found.path.length > 3000,
        data: found.path.map((_, i) => ({
          value: value(i),
          itemStyle: { color: kinds[found.change[i]] },
        })),
      },
    ],
  };
}
