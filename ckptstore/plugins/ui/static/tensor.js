// A leaf: what it is from metadata, and, for a tensor, what its numbers are like.

import { axis, chart, grid, heatMap, histogram, legend } from "./charts.js";
import { job, view } from "./data.js";
import { bytes, card, facts, h, number, short, stat, stepOf } from "./dom.js";
import { progressOf } from "./progress.js";

export const title = () => "Leaf";

const READ_AT_ONCE = 256 * 1024 * 1024;

const asked = (context, id, place) =>
  view(context.store, `leaf/${id}/${place}.json`, context.signal);

// An export has no file for each leaf; what it has is in those of the commit.
async function exported(context, id, place) {
  const of = (part) => view(context.store, `leaves/${id}/${part}.json`, context.signal);
  const commit = await view(context.store, `commit/${id}.json`, context.signal);
  const first = await of(0);
  const part = Math.floor(place / first.part);
  const leaves = part ? await of(part) : first;
  const i = place - leaves.start;
  const tensor = leaves.shape[i] !== null;
  return {
    ...commit,
    path: leaves.path[i],
    kind: tensor ? "tensor" : leaves.type[i],
    dtype: tensor ? leaves.type[i] : "",
    shape: leaves.shape[i],
    value: leaves.value[i],
    bytes: leaves.bytes[i],
    alias: leaves.alias[i],
    gone: leaves.gone[i],
    chunks: null,
    boxes: 1,
    numbers: tensor && !leaves.gone[i],
  };
}

export async function render(context) {
  const [id, place] = context.parts;
  const found = await (context.site.static ? exported : asked)(context, id, place);
  const file = (ending) =>
    h("a", { href: `download/${context.store}/${found.id}/${place}.${ending}` }, `.${ending}`);
  const box = h("div", {});
  const look = async () => {
    const shown = progressOf(context.signal);
    box.replaceChildren(card(null, shown.element));
    try {
      box.replaceChildren(
        ...numbers(
          await job(context.store, `tensor/${found.id}/${place}.json`, shown.signal, shown.tell),
        ),
      );
    } catch (error) {
      box.replaceChildren(
        card(
          null,
          h(
            "p",
            { class: error.name === "AbortError" ? "quiet" : "error" },
            error.name === "AbortError" ? "Stopped." : error.message,
          ),
          h("button", { onclick: look }, "Read it again"),
        ),
      );
    }
  };
  const readable = found.numbers && found.bytes && !context.site.static;
  if (readable && found.bytes <= READ_AT_ONCE) look();
  else if (readable)
    box.append(
      card(
        null,
        h("p", {}, `Reading this tensor takes ${bytes(found.bytes)}.`),
        h("button", { class: "main", onclick: look }, "Read it"),
      ),
    );
  else if (context.site.static && found.numbers)
    box.append(
      h("p", { class: "quiet" }, "An export has no numbers of tensors; `ckptstore ui` shows them."),
    );
  return [
    h(
      "div",
      { class: "title" },
      h(
        "div",
        {},
        h("h1", { class: "mono" }, found.path),
        h("a", { href: `#/${context.store}/commit/${found.id}` }, `${found.run}, ${stepOf(found)}`),
      ),
      context.site.static || found.gone || found.kind !== "tensor"
        ? null
        : h(
            "span",
            { class: "actions" },
            "Download",
            found.npy ? file("npy") : null,
            file("safetensors"),
          ),
    ),
    card(
      null,
      facts([
        ["Kind", found.dtype || found.kind],
        ["Shape", found.kind === "tensor" ? `[${found.shape.join(", ")}]` : null],
        ["Value", found.gone ? "thinned away" : found.value],
        ["Bytes", bytes(found.bytes)],
        [
          "Chunks",
          found.chunks === 0 ? "none; it lies in a page" : found.chunks && number(found.chunks),
          found.boxes > 1 ? `in ${found.boxes} boxes` : "",
        ],
        ["Memory", found.alias ? `shared with ${found.alias}` : null],
        ["Commit", h("span", { class: "mono" }, short(found.id))],
      ]),
    ),
    box,
    readable ? moves(context, found, place) : null,
  ];
}

// How the tensor moved over the commits of its run; read when it is asked for.
function moves(context, found, place) {
  const box = h("div", {});
  const look = async () => {
    const shown = progressOf(context.signal);
    box.replaceChildren(shown.element);
    try {
      const told = await job(
        context.store,
        `moves/${found.id}/${place}.json`,
        shown.signal,
        shown.tell,
      );
      box.replaceChildren(
        h("p", { class: "quiet" }, `${number(told.rows.length)} of ${number(told.total)} commits`),
        movesChart(context, found, told.rows),
      );
    } catch (error) {
      const stopped = error.name === "AbortError";
      box.replaceChildren(
        h("p", { class: stopped ? "quiet" : "error" }, stopped ? "Stopped." : error.message),
        button,
      );
    }
  };
  const button = h("button", { onclick: look }, "Read its history");
  box.append(
    h("p", { class: "quiet" }, "Reads this tensor in every commit of the run, once."),
    button,
  );
  return card(`${found.path.slice(0, 80)} over run ${found.run}`, box);
}

function movesChart(context, found, rows) {
  const line = (name, column, yAxisIndex) => ({
    name,
    type: "line",
    symbolSize: 5,
    yAxisIndex,
    data: rows.map((row, i) => ({ value: [row[1] ?? i, row[column]], id: row[0] })),
  });
  return chart(
    `Norm and drift of ${found.path} over the commits of run ${found.run}`,
    {
      grid: grid({ top: 56 }),
      legend: legend(),
      tooltip: {
        trigger: "axis",
        formatter: (points) =>
          [
            `step ${points[0].value[0]}`,
            ...points.map((point) => `${point.seriesName}: ${number(point.value[1])}`),
          ].join("\n"),
      },
      xAxis: axis("value", { min: "dataMin", splitLine: { show: false } }),
      yAxis: [
        axis("value", { scale: true, name: "norm" }),
        axis("value", { name: "drift", splitLine: { show: false } }),
      ],
      series: [
        line("norm", 2, 0),
        line("drift from the commit before", 3, 1),
        line("from the first", 4, 1),
      ],
    },
    {
      onclick: (event) => {
        if (event.data?.id) location.hash = `#/${context.store}/commit/${event.data.id}`;
      },
    },
  ).element;
}

function numbers(found) {
  const share = (count) =>
    count ? `${number(count)} (${((100 * count) / found.elements).toPrecision(3)} %)` : "none";
  const bad = found.nan || found.inf;
  return [
    bad
      ? h(
          "p",
          { class: "note" },
          `This tensor has ${number(found.nan)} NaN and ${number(found.inf)} infinities.`,
        )
      : null,
    card(
      "Numbers",
      h(
        "div",
        { class: "stats" },
        stat("Norm", number(found.norm)),
        stat("Mean", number(found.mean)),
        stat("Std", number(found.std)),
        stat("Min", number(found.min)),
        stat("Max", number(found.max)),
        stat("Zeros", share(found.zeros)),
        stat("NaN", share(found.nan)),
        stat("Inf", share(found.inf)),
      ),
    ),
    h(
      "div",
      { class: "cards" },
      found.histogram ? card("Histogram", histogram(found.histogram).element) : null,
      card(
        `Means of blocks, ${found.heat.of.map(number).join(" × ")} elements`,
        heatMap(found.heat).element,
      ),
    ),
  ].filter(Boolean);
}
