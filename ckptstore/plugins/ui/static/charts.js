// Charts by Apache ECharts on a canvas, in the colors of the style sheet. Tooltips are drawn on the
// canvas, too: nothing of a store becomes markup.

import { bytes, h, number, when } from "./dom.js";

let library = null; // a promise: its megabyte is loaded when the first chart is drawn
const drawn = new Set();

export const css = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const palette = () => Array.from({ length: 8 }, (_, i) => css(`--c${i}`));

// A chart that is drawn once the library is there. `show` draws another option over it, or in its
// place with `replace`.
export function chart(label, option, { height = 280, onclick } = {}) {
  library ??= import("./vendor/echarts.esm.min.js");
  const box = h("div", { class: "chart", role: "img", "aria-label": label });
  box.style.height = `${height}px`;
  const text = css("--text");
  const watcher = new ResizeObserver(() =>
    draw(
      (made) =>
        box.clientWidth && made.resize({ width: box.clientWidth, height: box.clientHeight }),
    ),
  );
  const begun = library.then((echarts) => {
    const made = echarts.init(box, null, {
      renderer: "canvas",
      width: box.clientWidth || 600,
      height,
    });
    drawn.add({ box, made, watcher });
    if (onclick) made.on("click", onclick);
    return made;
  });
  const draw = (work) => begun.then((made) => made.isDisposed() || work(made));
  const show = (wanted, replace = false) =>
    draw((made) =>
      made.setOption(
        {
          animation: false,
          backgroundColor: "transparent",
          color: palette(),
          textStyle: { color: text, fontFamily: "system-ui, sans-serif" },
          ...wanted,
          tooltip: {
            renderMode: "richText",
            confine: true,
            backgroundColor: css("--card"),
            borderColor: css("--line"),
            textStyle: { color: text, fontSize: 12 },
            ...wanted.tooltip,
          },
        },
        replace,
      ),
    );
  show(option);
  watcher.observe(box);
  return { element: box, show, add: (more) => draw((made) => made.setOption(more)) };
}

// Charts that are no longer on the page.
export function disposeGone() {
  for (const each of drawn) {
    if (each.box.isConnected) continue;
    each.watcher.disconnect();
    each.made.dispose();
    drawn.delete(each);
  }
}

export function axis(type, { axisLabel, ...extra } = {}) {
  return {
    type,
    axisLine: { lineStyle: { color: css("--line") } },
    axisTick: { show: false },
    axisLabel: { color: css("--quiet"), hideOverlap: true, ...axisLabel },
    splitLine: { lineStyle: { color: css("--line"), opacity: 0.6 } },
    nameTextStyle: { color: css("--quiet") },
    ...extra,
  };
}

export const grid = (extra = {}) => ({
  left: 8,
  right: 16,
  top: 28,
  bottom: 8,
  containLabel: true,
  ...extra,
});

// An axis of bytes up to `most`, with marks at round numbers of units.
export function byteAxis(most) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log(Math.max(most, 1)) / Math.log(1024)));
  const rough = most / unit / 5 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const interval = [1, 2, 5, 10].map((step) => step * power).find((step) => step >= rough) * unit;
  return axis("value", { interval, axisLabel: { formatter: bytes } });
}

export const zooms = (extra = {}) => [
  { type: "inside", zoomOnMouseWheel: "ctrl", ...extra },
  {
    type: "slider",
    height: 14,
    bottom: 6,
    showDetail: false,
    brushSelect: false,
    showDataShadow: false,
    borderColor: css("--line"),
    backgroundColor: css("--page"),
    fillerColor: css("--accent-soft"),
    handleStyle: { color: css("--card"), borderColor: css("--quiet") },
    moveHandleSize: 0,
    ...extra,
  },
];

export const legend = (extra = {}) => ({
  type: "scroll",
  top: 0,
  left: 0,
  icon: "roundRect",
  itemWidth: 10,
  itemHeight: 10,
  textStyle: { color: css("--quiet") },
  pageTextStyle: { color: css("--quiet") },
  pageIconColor: css("--quiet"),
  ...extra,
});

export function growth(found) {
  const line = (name, values) => ({
    name,
    type: "line",
    symbol: "none",
    areaStyle: { opacity: 0.12 },
    data: found.time.map((time, i) => [time, values[i]]),
  });
  return chart(
    "Logical and stored bytes over time",
    {
      grid: grid(),
      legend: legend(),
      tooltip: {
        trigger: "axis",
        formatter: (points) =>
          [
            when(points[0].value[0]),
            ...points.map((point) => `${point.seriesName}: ${bytes(point.value[1])}`),
          ].join("\n"),
      },
      xAxis: axis("time", { splitLine: { show: false } }),
      yAxis: byteAxis(Math.max(...found.logical, ...found.new, 1)),
      series: [line("logical", found.logical), line("new", found.new)],
    },
    { height: 240 },
  );
}

export function histogram(found) {
  const low = (i) => found.low + i * found.width;
  return chart("Histogram of the elements", {
    grid: grid(),
    tooltip: {
      trigger: "axis",
      axisPointer: { type: "shadow" },
      formatter: ([point]) =>
        `${number(low(point.dataIndex))} to ${number(low(point.dataIndex + 1))}\n` +
        `${number(found.counts[point.dataIndex])} elements`,
    },
    xAxis: axis("category", {
      data: found.counts.map((_, i) => number(low(i + 0.5))),
      splitLine: { show: false },
    }),
    yAxis: axis("value"),
    series: [{ type: "bar", barCategoryGap: "8%", data: found.counts }],
  });
}

// Rows from the top down; a block with a NaN or an infinity is drawn in a color of its own.
export function heatMap(found) {
  const most = Math.max(1e-300, ...found.cells.map((cell) => Math.abs(cell ?? 0)));
  const good = [];
  const bad = [];
  found.cells.forEach((cell, i) => {
    const at = [i % found.columns, Math.floor(i / found.columns)];
    if (cell === null) bad.push([...at, 1]);
    else good.push([...at, cell]);
  });
  const axisOf = (count, inverse) => ({
    type: "category",
    data: Array.from({ length: count }, (_, i) => i),
    show: false,
    inverse,
  });
  return chart(
    "Heat map of block means",
    {
      grid: { left: 4, right: 4, top: 4, bottom: 44 },
      tooltip: {
        formatter: (point) =>
          `rows from ${Math.floor((point.value[1] * found.of[0]) / found.rows)}, ` +
          `columns from ${Math.floor((point.value[0] * found.of[1]) / found.columns)}\n` +
          (point.seriesIndex ? "NaN or infinity" : `mean ${number(point.value[2])}`),
      },
      xAxis: axisOf(found.columns, false),
      yAxis: axisOf(found.rows, true),
      visualMap: {
        min: -most,
        max: most,
        seriesIndex: 0,
        orient: "horizontal",
        left: "center",
        bottom: 0,
        calculable: false,
        itemHeight: 160,
        itemWidth: 10,
        text: [number(most), number(-most)],
        textStyle: { color: css("--quiet") },
        inRange: { color: [css("--cold"), css("--card"), css("--hot")] },
      },
      series: [
        { type: "heatmap", data: good, progressive: 0 },
        { type: "heatmap", data: bad, itemStyle: { color: css("--bad") } },
      ],
    },
    { height: 320 },
  );
}
