// A run: metrics against steps, over other runs if wanted; its commits; what a policy would keep.

import { axis, chart, grid, legend, palette, zooms } from "./charts.js";
import { forget } from "./changes.js";
import { job, view } from "./data.js";
import { bytes, card, chips, h, number, plural, short, when } from "./dom.js";
import { progressOf } from "./progress.js";
import { virtualTable } from "./table.js";

export const title = () => "Run";

// What was chosen stays while the page is open, so that a refresh does not change it.
const chosen = {
  metric: null,
  over: new Map(),
  smooth: 0,
  log: false,
  by: "step",
  order: {},
  policy: [["keep-last", "5"]],
  previewed: null,
};
const LARGE_IS_GOOD = /acc|score|f1|auc|bleu|rouge|reward|recall|precision|success/i;

export async function render(context) {
  const [key] = context.parts;
  const [found, store] = await Promise.all([
    view(context.store, `run/${key}.json`, context.signal),
    view(context.store, "store.json", context.signal),
  ]);
  const names = found.metrics.map((metric) => metric.name);
  if (!names.includes(chosen.metric)) chosen.metric = names[0] || null;
  const runs = [found];
  const here = new Set(store.runs.map((run) => run.key)); // others were chosen in another store
  for (const other of chosen.over.keys()) {
    if (other !== key && here.has(other))
      runs.push(await view(context.store, `run/${other}.json`, context.signal));
  }
  const plan = { kept: null };
  const commits = commitTable(context, found, plan);
  const policy = context.site.static
    ? null
    : retention(context, found, plan, () => {
        commits.redraw();
      });
  return [
    h(
      "div",
      { class: "title" },
      h("h1", {}, found.run),
      h(
        "span",
        { class: "quiet" },
        plural(found.id.length, "commit"),
        `, ${bytes(found.new_bytes.reduce((a, b) => a + b, 0))} new`,
      ),
    ),
    names.length ? card("Metrics", curves(context, found, runs, names, store)) : null,
    policy,
    card("Commits", commits.element),
  ];
}

function curves(context, found, runs, names, store) {
  const made = chart(`${chosen.metric} of ${runs.length} runs`, optionOf(found, runs), {
    height: 340,
    onclick: (event) => {
      if (event.data?.id) location.hash = `#/${context.store}/commit/${event.data.id}`;
    },
  });
  const again = () => made.show(optionOf(found, runs), true);
  const set = (name, read) => (event) => {
    chosen[name] = read(event.target);
    again();
  };
  const others = store.runs.filter((run) => run.key !== found.key);
  return [
    h(
      "div",
      { class: "controls" },
      h(
        "label",
        {},
        "Metric",
        h(
          "select",
          { onchange: set("metric", (input) => input.value) },
          names.map((name) => h("option", { value: name, selected: name === chosen.metric }, name)),
        ),
      ),
      h(
        "label",
        {},
        "Smoothing",
        h("input", {
          type: "range",
          min: 0,
          max: 0.98,
          step: 0.02,
          value: chosen.smooth,
          oninput: set("smooth", (input) => Number(input.value)),
        }),
      ),
      h(
        "label",
        {},
        h("input", {
          type: "checkbox",
          checked: chosen.log,
          onchange: set("log", (input) => input.checked),
        }),
        "log scale",
      ),
      h(
        "label",
        {},
        "Against",
        h(
          "select",
          { onchange: set("by", (input) => input.value) },
          ["step", "time"].map((by) => h("option", { value: by, selected: by === chosen.by }, by)),
        ),
      ),
      h(
        "label",
        {},
        "Best is",
        h(
          "select",
          {
            onchange: (event) => {
              chosen.order[chosen.metric] = event.target.value;
              again();
            },
          },
          ["smallest", "largest"].map((order) =>
            h("option", { value: order, selected: order === orderOf() }, order),
          ),
        ),
      ),
    ),
    made.element,
    others.length
      ? h(
          "fieldset",
          { class: "legendlist", "aria-label": "Runs to lay over" },
          h("span", { class: "quiet" }, "Lay over"),
          others.map((run) =>
            h(
              "label",
              {},
              h("input", {
                type: "checkbox",
                checked: chosen.over.has(run.key),
                onchange: (event) => {
                  if (event.target.checked) chosen.over.set(run.key, run.run);
                  else chosen.over.delete(run.key);
                  context.refresh();
                },
              }),
              run.run,
            ),
          ),
        )
      : null,
  ];
}

const orderOf = () =>
  chosen.order[chosen.metric] || (LARGE_IS_GOOD.test(chosen.metric || "") ? "largest" : "smallest");

function optionOf(found, runs) {
  const series = [];
  const x = (run, i) => (chosen.by === "time" ? run.time[i] : (run.step[i] ?? i));
  const colors = palette();
  runs.forEach((run, place) => {
    const values = run.metrics.find((metric) => metric.name === chosen.metric)?.values || [];
    const points = values.map((value, i) => ({
      value: [x(run, i), typeof value === "number" && (!chosen.log || value > 0) ? value : null],
      id: run.id[i],
      tags: run.tags[i],
      run: run.run,
    }));
    const color = colors[place % colors.length];
    const some = points.filter((point) => point.value[1] !== null);
    const best = some.reduce(
      (a, b) =>
        !a || (orderOf() === "largest" ? b.value[1] > a.value[1] : b.value[1] < a.value[1]) ? b : a,
      null,
    );
    series.push({
      name: run.run,
      type: "line",
      data: points,
      showSymbol: points.length < 600,
      symbolSize: 6,
      lineStyle: { width: chosen.smooth ? 1 : 2, opacity: chosen.smooth ? 0.3 : 1, color },
      itemStyle: { color },
      sampling: points.length > 5000 ? "lttb" : undefined,
    });
    if (chosen.smooth)
      series.push({
        name: run.run,
        type: "line",
        data: smoothed(points),
        showSymbol: false,
        silent: true,
        lineStyle: { width: 2, color },
        itemStyle: { color },
      });
    const marks = some
      .filter((point) => point.tags.length)
      .map((point) => ({
        ...point,
        symbol: "pin",
        symbolSize: 22,
        label: { show: true, position: "top", formatter: () => point.tags[0].slice(0, 24), color },
      }));
    if (best)
      marks.push({
        ...best,
        symbol: "diamond",
        symbolSize: 14,
        label: { show: true, position: "bottom", formatter: () => "best", color },
      });
    series.push({
      name: run.run,
      type: "scatter",
      data: marks,
      itemStyle: { color },
      labelLayout: { hideOverlap: true },
      z: 5,
    });
  });
  return {
    grid: grid({ bottom: 40 }),
    legend: legend({ data: runs.map((run) => run.run) }),
    tooltip: {
      trigger: "item",
      formatter: (point) =>
        [
          point.data.run,
          chosen.by === "time" ? when(point.value[0]) : `step ${number(point.value[0])}`,
          `${chosen.metric}: ${number(point.value[1])}`,
          ...(point.data.tags || []),
        ].join("\n"),
    },
    xAxis: axis(chosen.by === "time" ? "time" : "value", {
      min: "dataMin",
      max: "dataMax",
      splitLine: { show: false },
    }),
    yAxis: axis(chosen.log ? "log" : "value", { scale: true }),
    dataZoom: zooms(),
    series,
  };
}

// An exponential average without the bias of its beginning, as TensorBoard has it.
function smoothed(points) {
  let mean = 0;
  let weight = 0;
  return points
    .filter((point) => point.value[1] !== null)
    .map((point) => {
      mean = chosen.smooth * mean + (1 - chosen.smooth) * point.value[1];
      weight = chosen.smooth * weight + (1 - chosen.smooth);
      return { ...point, value: [point.value[0], mean / weight] };
    });
}

function commitTable(context, found, plan) {
  const metric = found.metrics.find((each) => each.name === chosen.metric);
  const to = (i) => `#/${context.store}/commit/${found.id[i]}`;
  const kept = (i) => plan.kept?.get(found.id[i]);
  const columns = [
    {
      name: "Commit",
      cell: (i) => h("a", { href: to(i), class: "mono" }, short(found.id[i])),
      width: "8rem",
    },
    { name: "Step", right: true, cell: (i) => number(found.step[i]), sort: (i) => found.step[i] },
    { name: "When", cell: (i) => when(found.time[i]), sort: (i) => found.time[i], width: "9rem" },
    ...(metric
      ? [
          {
            name: metric.name.slice(0, 24),
            right: true,
            cell: (i) => number(metric.values[i]),
            sort: (i) => (typeof metric.values[i] === "number" ? metric.values[i] : NaN),
          },
        ]
      : []),
    {
      name: "New",
      right: true,
      cell: (i) => bytes(found.new_bytes[i]),
      sort: (i) => found.new_bytes[i],
    },
    { name: "Tags, message", wide: true, cell: (i) => [...chips(found.tags[i]), found.message[i]] },
    {
      name: "Policy",
      wide: true,
      cell: (i) =>
        plan.kept
          ? kept(i)?.length
            ? `stays: ${kept(i).join(", ")}`
            : h("span", { class: "error" }, "would be forgotten")
          : h("span", { class: "quiet" }, "–"),
    },
  ];
  const last = found.id.length - 1;
  const turned = columns.map((column) => ({
    ...column,
    cell: (i) => column.cell(last - i),
    sort: column.sort && ((i) => column.sort(last - i)),
  }));
  return virtualTable(turned, found.id.length, {
    label: `Commits of ${found.run}`,
    open: (i) => {
      location.hash = to(last - i);
    },
  });
}

function retention(context, found, plan, redraw) {
  const answer = h("div", { "aria-live": "polite" });
  const metrics = found.metrics.map((metric) => metric.name);
  const metricOf = (name, label, [was]) =>
    h(
      "select",
      { name, "aria-label": `${label} by` },
      h("option", { value: "" }, "–"),
      metrics.map((metric) => {
        const value = `${metric}:${LARGE_IS_GOOD.test(metric) ? "max" : "min"}`;
        return h("option", { value, selected: value === was }, metric);
      }),
    );
  // A field for each word of an option's value. The first of several is a metric.
  const field = ([name, { help, values, pattern }]) => {
    const [kind, ...before] = [values].flat().reverse();
    const several = before.length > 0;
    if (several && !metrics.length) return null;
    const label = name[0].toUpperCase() + name.slice(1).replaceAll("-", " ");
    const was = chosen.policy.filter(([each]) => each === name).map(([, value]) => value);
    return h(
      "label",
      { title: help },
      label,
      several ? metricOf(name, label, was) : null,
      h("input", {
        ...(kind === "N" ? { type: "number", min: 1 } : { pattern, placeholder: kind, size: 7 }),
        ...(several ? { "aria-label": `${label}: ${kind}` } : {}),
        name,
        value: was[before.length] || "",
      }),
    );
  };
  const form = h(
    "form",
    {
      class: "controls",
      onsubmit: (event) => {
        event.preventDefault();
        preview();
      },
      // The page may be drawn anew, for a new commit, before the form is sent.
      oninput: remember,
    },
    Object.entries(context.site.policies).map(field),
    h("button", { class: "main" }, "Preview"),
  );
  function remember() {
    const given = new FormData(form);
    // A number of the best means nothing without a metric.
    const empty = new Set([...form.querySelectorAll("select")].filter((each) => !each.value));
    for (const { name } of empty) given.delete(name);
    chosen.policy = [...given].filter(([, value]) => value);
  }
  async function preview() {
    chosen.previewed = found.key;
    remember();
    const shown = progressOf(context.signal);
    const words = h("span", {});
    answer.replaceChildren(words, shown.element);
    const tell = (result) => {
      plan.kept = new Map(result.commits);
      words.replaceChildren(h("strong", {}, result.summary), " ");
      redraw();
    };
    try {
      const result = await job(
        context.store,
        `retention/${found.key}.json?${new URLSearchParams(chosen.policy)}`,
        shown.signal,
        (progress, partial) => {
          shown.tell(progress);
          if (partial) tell(partial);
        },
      );
      tell(result);
      const gone = result.commits
        .filter(([, reasons]) => !reasons.length)
        .map(([id]) => ({ id, step: found.step[found.id.indexOf(id)] }));
      answer.replaceChildren(
        h(
          "p",
          {},
          h("strong", {}, result.summary),
          result.freed_bytes === null ? "" : `; a gc would then free ${bytes(result.freed_bytes)}`,
        ),
        ...result.notes.map((note) => h("p", { class: "note" }, note)),
        result.problem ? h("p", { class: "error" }, result.problem) : "",
        context.site.changes && gone.length
          ? h(
              "button",
              { class: "danger", onclick: () => forget(context, gone) },
              `Forget ${plural(gone.length, "commit")} …`,
            )
          : "",
      );
    } catch (error) {
      answer.replaceChildren(
        h("p", { class: "error" }, error.name === "AbortError" ? "Stopped." : error.message),
      );
    }
  }
  if (context.fresh && chosen.previewed === found.key) preview();
  return card("What a policy would keep", form, answer);
}
