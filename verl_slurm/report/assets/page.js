"use strict";
// Draws the charts of the page from the JSON in #charts. `verl_slurm/report/page.py: chart_data` makes it.
(() => {
  performance.mark("script");
  const data = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const charts = [];
  let palette = new Map();
  // Asked once for each name and drawing: the browser would compute its styles anew for every mark.
  const colour = (name) => {
    if (!palette.has(name)) palette.set(name, getComputedStyle(root).getPropertyValue(`--${name}`).trim());
    return palette.get(name);
  };
  const KINDS = ["training", "saving", "preempted", "queued", "starting", "recovering", "hung"];
  const LINES = ["line-1", "line-2", "line-3", "line-4", "line-5", "line-6", "line-7"];
  // Dashes too, so that a line is known without its colour.
  const DASHES = ["solid", [7, 4], [2, 3], [9, 3, 2, 3]];
  const shown = (value) => (Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4)));
  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
  const clock = (ms) => new Date(ms).toISOString().replace("T", " ").slice(0, 19);

  function base() {
    const text = { color: colour("ink-2"), fontFamily: FONT, fontSize: 12 };
    return {
      animation: false,
      useUTC: true,
      textStyle: text,
      tooltip: {
        renderMode: "richText", // drawn as SVG: the other mode writes HTML
        confine: true,
        backgroundColor: colour("card"),
        borderColor: colour("rule"),
        textStyle: { color: colour("ink"), fontSize: 12 },
      },
    };
  }

  const axis = (more) => ({
    axisLine: { lineStyle: { color: colour("rule") } },
    axisTick: { show: false },
    axisLabel: { color: colour("ink-2"), hideOverlap: true },
    splitLine: { lineStyle: { color: colour("grid") } },
    ...more,
  });

  // As much of the time as tells the ticks apart.
  function ticks(spans) {
    const seconds = (spans.at(-1)[2] - spans[0][1]) / 1000;
    const [begin, end] = seconds > 8 * 86400 ? [5, 10] : seconds > 86400 ? [5, 16] : seconds > 900 ? [11, 16] : [11, 19];
    return (ms) => clock(ms).slice(begin, end);
  }

  function timeline(number) {
    const spans = data.timelines[number];
    return {
      ...base(),
      grid: { left: 8, right: 12, top: 4, bottom: 4, containLabel: true },
      xAxis: axis({
        type: "time",
        min: "dataMin",
        max: "dataMax",
        axisLabel: { color: colour("ink-2"), hideOverlap: true, fontSize: 12, alignMaxLabel: "right", formatter: ticks(spans) },
        splitLine: { show: true, lineStyle: { color: colour("grid") } },
      }),
      yAxis: axis({ type: "category", data: data.kinds, inverse: true, splitLine: { show: false } }),
      dataZoom: [{ type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: false }],
      tooltip: {
        ...base().tooltip,
        formatter: ({ value }) =>
          `${data.kinds[value[0]]}, attempt ${value[3]}\n${clock(value[1])} UTC\nfor ${shown((value[2] - value[1]) / 1000)} s`,
      },
      series: [
        {
          type: "custom",
          encode: { x: [1, 2], y: 0 },
          data: spans,
          emphasis: { disabled: true },
          renderItem: ({ coordSys, dataIndex }, api) => {
            const [kind, began, ended] = spans[dataIndex];
            const [begin, y] = api.coord([began, kind]);
            const end = api.coord([ended, kind])[0];
            // Cut by hand: `clip` would make a path for each of a thousand rectangles.
            const left = Math.max(begin, coordSys.x);
            const right = Math.min(end, coordSys.x + coordSys.width);
            if (right < coordSys.x || left > coordSys.x + coordSys.width) return null;
            const height = (coordSys.height / KINDS.length) * 0.62;
            return {
              type: "rect",
              // Never thinner than a line: a save of a second in a week is to be seen.
              shape: { x: left, y: y - height / 2, width: Math.max(right - left, 1.5), height },
              style: { fill: colour(KINDS[kind]) },
            };
          },
        },
      ],
    };
  }

  // Where attempts begin, and where a reward was replaced (solid): lines with their numbers, or, of many attempts, ticks on the axis. One drawing for all of
  // them: a thousand marks of a library take longer than all the rest.
  function marks(points, found, solid) {
    const few = solid || found.length <= 12;
    const renderItem = ({ coordSys }, api) => {
      const foot = coordSys.y + coordSys.height;
      const top = few ? coordSys.y : foot - 6;
      const ends = found.map(([attempt, step]) => [attempt, api.coord([step, points[0][1]])[0]]);
      const line = { type: "path", shape: { pathData: ends.map(([, x]) => `M${x} ${foot}V${top}`).join("") } };
      const texts = few ? ends.map(([attempt, x]) => ({
        type: "text",
        style: { text: String(attempt), x, y: top - 3, fill: colour("ink-2"), font: `11px ${FONT}`, align: "center", verticalAlign: "bottom" },
      })) : [];
      return { type: "group", children: [{ ...line, style: { stroke: colour(solid ? "ink-2" : "rule-2"), fill: "none", lineDash: few && !solid ? [3, 3] : null } }, ...texts] };
    };
    return { type: "custom", name: solid ? "rewards" : "attempts", silent: true, data: [points[0]], renderItem };
  }

  function curve(panel) {
    return {
      ...base(),
      grid: { left: 8, right: 18, top: 22, bottom: 4, containLabel: true },
      xAxis: axis({ type: "value", min: "dataMin", max: "dataMax", splitLine: { show: false }, minInterval: 1 }),
      yAxis: axis({ type: "value", scale: true, splitNumber: 4 }),
      tooltip: {
        ...base().tooltip,
        trigger: "axis",
        formatter: (found) => {
          const points = found.filter(({ seriesType }) => seriesType === "line");
          const named = points.map(({ seriesName, value }) => (data.names.length > 1 ? `${seriesName}: ` : "") + shown(value[1]));
          return [`step ${points[0].value[0]}`, ...named].join("\n");
        },
      },
      series: panel.lines.map(([run, points], number) => ({
        type: "line",
        name: data.names[run],
        data: points,
        showSymbol: points.length < 3,
        symbolSize: 5,
        lineStyle: { width: 1.8, color: colour(LINES[run % LINES.length]), type: DASHES[Math.floor(run / LINES.length) % DASHES.length] },
        itemStyle: { color: colour(LINES[run % LINES.length]) },
        emphasis: { disabled: true },
      })).concat(
        data.attempts.length ? [marks(panel.lines[0][1], data.attempts, false)] : [],
        panel.replaced.length ? [marks(panel.lines[0][1], panel.replaced.map((step) => ["reward", step]), true)] : [],
      ),
    };
  }

  function draw({ element, option, chart }) {
    chart.setOption(option(), { notMerge: true });
    const svg = element.querySelector("svg");
    // A printer's page is narrower than the window: with a viewBox the drawing scales.
    svg.setAttribute("viewBox", `0 0 ${chart.getWidth()} ${chart.getHeight()}`);
    svg.setAttribute("aria-hidden", "true");
  }

  function zoom(chart, action) {
    const { start, end } = chart.getOption().dataZoom[0];
    const width = end - start;
    const middle = (start + end) / 2;
    const [from, to] = {
      in: [middle - width / 4, middle + width / 4],
      out: [middle - width, middle + width],
      earlier: [start - Math.min(width / 2, start), end - Math.min(width / 2, start)],
      later: [start + Math.min(width / 2, 100 - end), end + Math.min(width / 2, 100 - end)],
      all: [0, 100],
    }[action];
    chart.dispatchAction({ type: "dataZoom", start: Math.max(from, 0), end: Math.min(to, 100) });
  }

  const kinds = { timeline: timeline, panel: (number) => curve(data.panels[number]) };
  const found = [...document.querySelectorAll("[data-timeline], [data-panel]")].map((element) => {
    const [kind, number] = Object.entries(element.dataset)[0];
    // All sizes before the first drawing: each look at a size after one would lay the page out anew.
    return { element, option: () => kinds[kind](Number(number)), width: element.clientWidth, height: element.clientHeight };
  });
  for (const { element, option, width, height } of found) {
    const chart = echarts.init(element, null, { renderer: "svg", width, height });
    charts.push({ element, option, chart });
    for (const button of element.parentElement.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => zoom(chart, button.dataset.zoom));
    }
  }
  charts.forEach(draw);
  for (const swatch of document.querySelectorAll("[data-line]")) {
    swatch.classList.add(LINES[Number(swatch.dataset.line) % LINES.length]);
  }

  function redraw() {
    palette = new Map();
    charts.forEach(draw);
  }
  const resized = new ResizeObserver(() => {
    // It also tells of each element's first size, for which the chart was drawn.
    const sizes = charts.map(({ element }) => ({ width: element.clientWidth, height: element.clientHeight }));
    charts.forEach((one, number) => {
      if (one.chart.getWidth() === sizes[number].width) return;
      one.chart.resize(sizes[number]);
      draw(one);
    });
  });
  charts.forEach(({ element }) => resized.observe(element));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Paper is white, whatever the screen is.
  addEventListener("beforeprint", () => (root.setAttribute("data-print", ""), redraw()));
  addEventListener("afterprint", () => (root.removeAttribute("data-print"), redraw()));
  performance.mark("drawn");
})();
