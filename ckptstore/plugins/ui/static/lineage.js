// The commits of all runs as a graph: time goes right, each branch of a run has a line, and links
// between lines bend once. A line is dashed where the parent is forgotten. Drawn from columns of numbers, so that thousands of commits stay fluid.

import { axis, chart, css, palette, zooms } from "./charts.js";
import { lineage, resolve } from "./data.js";
import { chips, card, h, number, plural, short, stepOf, when } from "./dom.js";
import { virtualTable } from "./table.js";

export const title = () => "Lineage";

const LANE = 26;

export async function render(context) {
  const found = await lineage(context.store, context.signal);
  const graph = found.id.length ? draw(context, found) : null;
  const listed = list(context, found);
  const count = h("span", { class: "quiet" }, plural(found.id.length, "commit"));
  const search = h("input", {
    type: "search",
    placeholder: "Search run, tag, message, step, id",
    "aria-label": "Search commits",
    class: "wide",
  });
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    const named = new Set(resolve(found, search.value));
    const accepts = (i) =>
      named.has(i) ||
      found.runs[found.run[i]].run.toLowerCase().includes(wanted) ||
      found.message[i].toLowerCase().includes(wanted) ||
      found.tags[i].some((tag) => tag.toLowerCase().includes(wanted));
    const matched = listed.filter(wanted ? (row) => accepts(found.id.length - 1 - row) : null);
    count.textContent = plural(matched, "commit");
    graph?.mark(wanted ? accepts : null);
  });
  return [
    h(
      "div",
      { class: "title" },
      h("h1", {}, "Lineage"),
      h(
        "span",
        { class: "quiet" },
        `${plural(found.runs.length, "run")}; wheel to zoom, drag to move, click a commit`,
      ),
    ),
    found.older > 0
      ? h("p", { class: "note" }, `${number(found.older)} older commits are not shown.`)
      : null,
    graph && card(null, graph.element),
    card(null, h("div", { class: "controls" }, search, count), listed.element),
  ];
}

// Lanes in the order of the runs' first commits, as many for a run as it has branches at once; a run
// reuses lanes that ended before it began.
function lanes(found) {
  const spans = found.runs.map(() => [Infinity, -1, 0]);
  found.run.forEach((run, i) => {
    const [first, last, depth] = spans[run];
    spans[run] = [Math.min(first, i), Math.max(last, i), Math.max(depth, found.lane[i] + 1)];
  });
  const order = spans.map((_, run) => run).sort((a, b) => spans[a][0] - spans[b][0]);
  const ends = [];
  const lane = [];
  const gap = order.length > 16 ? found.id.length / 30 : Infinity;
  for (const run of order) {
    const [first, last, depth] = spans[run];
    let free = 0;
    for (let i = 0; i < depth && free + i < ends.length; i += 1) {
      if (ends[free + i] + gap < first) continue;
      free += i + 1;
      i = -1;
    }
    ends.length = Math.max(ends.length, free + depth);
    ends.fill(last, free, free + depth);
    lane[run] = free;
  }
  return { lane, count: ends.length, spans };
}

function draw(context, found) {
  const { lane, count, spans } = lanes(found);
  const colors = palette();
  const y = (i) => lane[found.run[i]] + found.lane[i];
  const links = [];
  found.parents.forEach((parents, i) =>
    parents.forEach((parent, place) => {
      if (typeof parent !== "number") return;
      const bend = place ? [] : [[parent + Math.min(1, (i - parent) / 2), y(i)]];
      if (y(parent) !== y(i))
        links.push({
          coords: [[parent, y(parent)], ...bend, [i, y(i)]],
          lineStyle: { color: colors[found.run[i] % colors.length] },
        });
    }),
  );
  // Neighbours on one lane are one line: fewer things to draw.
  const tracks = found.tracks.map(([from, to, known]) => ({
    coords: [
      [from, y(from)],
      [to, y(to)],
    ],
    lineStyle: { color: colors[found.run[from] % colors.length], type: known ? "solid" : "dashed" },
  }));
  const points = found.id.map((_, i) => [i, y(i), found.run[i]]);
  const named = found.runs.map((run, place) => ({
    value: [spans[place][0], lane[place] - 0.36],
    name: run.run,
  }));
  const tagged = points
    .filter((_, i) => found.tags[i].length)
    .map((point) => ({ value: point, name: found.tags[point[0]][0] }));
  const height = Math.min(560, Math.max(200, count * LANE + 90));
  const made = chart(
    `Graph of ${found.id.length} commits in ${found.runs.length} runs`,
    {
      grid: { left: 16, right: 16, top: 24, bottom: 44 },
      tooltip: {
        trigger: "item",
        formatter: (point) => (point.seriesType === "scatter" ? about(found, point.value[0]) : ""),
      },
      xAxis: axis("value", { min: -0.5, max: found.id.length - 0.5, show: false }),
      yAxis: axis("value", { min: -0.8, max: count - 0.3, inverse: true, show: false }),
      dataZoom: [
        ...zooms({ filterMode: "none", zoomOnMouseWheel: true }),
        ...(count * LANE > 560
          ? [
              {
                type: "inside",
                yAxisIndex: 0,
                filterMode: "none",
                zoomOnMouseWheel: "shift",
                moveOnMouseWheel: false,
                end: (100 * 560) / (count * LANE),
              },
            ]
          : []),
      ],
      series: [
        {
          type: "lines",
          coordinateSystem: "cartesian2d",
          data: tracks,
          silent: true,
          polyline: true,
          lineStyle: { width: 2, opacity: 0.55 },
        },
        {
          type: "lines",
          coordinateSystem: "cartesian2d",
          data: links.slice(-4000),
          silent: true,
          polyline: true,
          lineStyle: { width: 1.5, opacity: 0.8 },
        },
        {
          type: "scatter",
          data: points,
          symbolSize: found.id.length > 2000 ? 5 : 8,
          large: found.id.length > 3000,
          largeThreshold: 3000,
          itemStyle: {
            color:
              found.id.length > 3000
                ? colors[0]
                : (point) => colors[point.value[2] % colors.length],
          },
          progressive: 0,
        },
        {
          type: "scatter",
          data: named,
          silent: true,
          symbolSize: 2,
          itemStyle: { color: "transparent" },
          labelLayout: { hideOverlap: true },
          label: {
            show: true,
            position: "right",
            formatter: (point) => point.name.slice(0, 28),
            color: css("--quiet"),
            fontSize: 11,
          },
        },
        {
          type: "scatter",
          data: tagged,
          symbol: "pin",
          symbolSize: 18,
          labelLayout: { hideOverlap: true },
          label: {
            show: true,
            position: "top",
            formatter: (point) => point.name.slice(0, 24),
            color: colors[1],
            fontSize: 11,
          },
          itemStyle: { color: colors[1] },
        },
        {
          type: "scatter",
          data: [],
          symbol: "circle",
          symbolSize: 14,
          silent: true,
          itemStyle: { color: "transparent", borderColor: colors[5], borderWidth: 2 },
        },
      ],
    },
    {
      height,
      onclick: (event) => {
        if (event.seriesType === "scatter")
          location.hash = `#/${context.store}/commit/${found.id[event.value[0]]}`;
      },
    },
  );
  const mark = (accepts) =>
    made.add({
      series: [
        {},
        {},
        {},
        {},
        {},
        { data: accepts ? points.filter((_, i) => accepts(i)).slice(-2000) : [] },
      ],
    });
  return { element: made.element, mark };
}

function about(found, i) {
  return [
    `${found.runs[found.run[i]].run}, ${stepOf({ id: found.id[i], step: found.step[i] })}`,
    when(found.time[i]),
    found.tags[i].join(", "),
    found.message[i],
  ]
    .filter(Boolean)
    .join("\n");
}

function list(context, found) {
  const last = found.id.length - 1;
  const to = (i) => `#/${context.store}/commit/${found.id[i]}`;
  const run = (i) => found.runs[found.run[i]];
  const columns = [
    {
      name: "Commit",
      cell: (i) => h("a", { href: to(i), class: "mono" }, short(found.id[i])),
      width: "8rem",
    },
    {
      name: "Run",
      cell: (i) => h("a", { href: `#/${context.store}/run/${run(i).key}` }, run(i).run),
      sort: (i) => run(i).run,
      wide: true,
    },
    { name: "Step", right: true, cell: (i) => number(found.step[i]), sort: (i) => found.step[i] },
    { name: "When", cell: (i) => when(found.time[i]), sort: (i) => found.time[i], width: "9rem" },
    {
      name: "Parents",
      cell: (i) =>
        found.parents[i].map((parent) =>
          typeof parent === "number"
            ? h("a", { href: to(parent), class: "mono" }, `${short(found.id[parent])} `)
            : `${parent} `,
        ),
      width: "9rem",
    },
    { name: "Tags, message", wide: true, cell: (i) => [...chips(found.tags[i]), found.message[i]] },
  ].map((column) => ({
    ...column,
    cell: (row) => column.cell(last - row),
    sort: column.sort && ((row) => column.sort(last - row)),
  }));
  return virtualTable(columns, found.id.length, {
    label: "All commits",
    open: (row) => {
      location.hash = to(last - row);
    },
  });
}
