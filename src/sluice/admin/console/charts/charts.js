// Line charts in SVG: up to five minutes, one scale, a readout under the pointer. A chart draws in
// real pixels (no stretched text), redraws on update and on resize, and knows nothing of queues.

import { h, replace, s, setAttribute, setText } from "../base/dom.js";
import { localTime, short } from "../base/format.js";
import { SAMPLES } from "../api/history.js";

// Seconds; the shortest that fits the data, to avoid empty charts.
const WINDOWS = [60, 120, SAMPLES];
const GAP = 12000; // two samples further apart than this are not joined
const EDGE = { top: 10, right: 12, bottom: 22, left: 46 };

/** The smallest "round" number at or above `value`, and the steps to it. */
export function scale(value, whole) {
  const most = Math.max(value, whole ? 4 : 1);
  const power = 10 ** Math.floor(Math.log10(most / 4));
  const step =
    [1, 2, 5, 10]
      .map((factor) => factor * power)
      .find((size) => size * 4 >= most && (!whole || size % 1 === 0)) ?? Math.ceil(most / 4);
  const top = Math.ceil(most / step) * step;
  const ticks = [];
  for (let at = 0; at <= top + step / 2; at += step) ticks.push(at);
  return { top, ticks };
}

export class Chart {
  /**
   * `lines`: [{ label, tone, area }]; `show(value)` formats a value; `whole`: values are counts.
   */
  constructor({ title, unit, lines, show, whole = false, height = 168 }) {
    this.lines = lines;
    this.show = show;
    this.whole = whole;
    this.height = height;
    this.data = lines.map(() => []);
    this.width = 0;
    this.pointer = null;
    this.title = title;
    this.svg = s("svg", { class: "chart", role: "img", height, "aria-label": title });
    this.values = lines.map(() => h("span", { class: "num value" }, "\u2013"));
    this.readAt = h("span", { class: "chart-at" });
    const legend = lines.map((line, nth) =>
      h(
        "li",
        null,
        h("span", { class: `swatch tone-${line.tone}` }),
        h("span", null, line.label),
        this.values[nth],
      ),
    );
    this.element = h(
      "figure",
      { class: "card chart-card" },
      h(
        "figcaption",
        null,
        h("h2", null, title, " ", h("span", { class: "soft" }, unit)),
        this.readAt,
      ),
      h("ul", { class: "legend" }, legend),
      this.svg,
    );
    this.svg.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.#point(null));
    this.observer = new ResizeObserver(([entry]) =>
      this.#resize(Math.floor(entry.contentRect.width)),
    );
    this.observer.observe(this.svg);
    this.#frame();
  }

  /** `data`: a list of [time, value] for each line. */
  update(data, now = Date.now()) {
    this.data = data;
    this.now = now;
    this.#draw();
  }

  destroy() {
    this.observer.disconnect();
  }

  #resize(width) {
    if (width === this.width || width <= 0) return;
    this.width = width;
    this.#draw();
  }

  #point(x) {
    this.pointer = x;
    this.#read();
  }

  #frame() {
    this.grid = s("g", { class: "grid" });
    this.axis = s("g", { class: "axis" });
    this.shapes = this.lines.map((line) => ({
      area: line.area ? s("path", { class: `area tone-${line.tone}` }) : null,
      path: s("path", { class: `line tone-${line.tone}` }),
      dot: s("circle", { class: `dot tone-${line.tone}`, r: 3, visibility: "hidden" }),
    }));
    this.cross = s("line", { class: "cross", visibility: "hidden" });
    this.empty = s("text", { class: "chart-empty", "text-anchor": "middle" });
    replace(
      this.svg,
      this.grid,
      this.axis,
      this.shapes.map(({ area }) => area),
      this.shapes.map(({ path }) => path),
      this.cross,
      this.shapes.map(({ dot }) => dot),
      this.empty,
    );
  }

  #draw() {
    if (this.width <= 0) return;
    const most = Math.max(0, ...this.data.flat().map(([, value]) => value));
    const { top, ticks } = scale(most, this.whole);
    const inner = {
      width: this.width - EDGE.left - EDGE.right,
      height: this.height - EDGE.top - EDGE.bottom,
    };
    const now = this.now ?? Date.now();
    const oldest = Math.min(now, ...this.data.map((points) => points[0]?.[0] ?? now));
    const seconds = WINDOWS.find((length) => now - oldest <= length * 1000) ?? SAMPLES;
    this.x = (time) => EDGE.left + (1 - (now - time) / (seconds * 1000)) * inner.width;
    this.y = (value) => EDGE.top + inner.height * (1 - value / top);
    setAttribute(this.svg, "viewBox", `0 0 ${this.width} ${this.height}`);
    this.#drawAxes(ticks, inner, seconds);
    this.data.forEach((points, nth) => {
      const { area, path } = this.shapes[nth];
      const runs = this.#runs(points.filter(([time]) => time >= now - seconds * 1000));
      setAttribute(path, "d", runs.map((run) => `M${run.join("L")}`).join(""));
      if (area) {
        const base = this.y(0).toFixed(1);
        setAttribute(
          area,
          "d",
          runs
            .map(
              (run) =>
                `M${run[0].split(",")[0]},${base}L${run.join("L")}` +
                `L${run.at(-1).split(",")[0]},${base}Z`,
            )
            .join(""),
        );
      }
    });
    const some = this.data.some((points) => points.length > 1);
    setText(this.empty, some ? "" : "Drawn from now on, one point a second");
    setAttribute(this.empty, "x", EDGE.left + inner.width / 2);
    setAttribute(this.empty, "y", EDGE.top + inner.height / 2);
    this.#read();
  }

  #drawAxes(ticks, inner, seconds) {
    const key = `${this.width}:${ticks.join()}:${seconds}`;
    if (key === this.axesKey) return;
    this.axesKey = key;
    const right = EDGE.left + inner.width;
    replace(
      this.grid,
      ticks.map((tick) =>
        s("line", {
          x1: EDGE.left,
          x2: right,
          y1: this.y(tick),
          y2: this.y(tick),
          class: tick === 0 ? "base" : null,
        }),
      ),
    );
    const marks = marksOf(seconds, inner.width);
    const bottom = this.height - 6;
    replace(
      this.axis,
      ticks.map((tick) =>
        s("text", { x: EDGE.left - 8, y: this.y(tick) + 4, "text-anchor": "end" }, short(tick)),
      ),
      marks.map((mark) => {
        const anchor = mark === 0 ? "end" : mark === seconds ? "start" : "middle";
        return s(
          "text",
          { x: right - (mark / seconds) * inner.width, y: bottom, "text-anchor": anchor },
          mark === 0 ? "now" : mark < 120 ? `\u2212${mark} s` : `\u2212${mark / 60} min`,
        );
      }),
    );
  }

  #runs(points) {
    const runs = [];
    let last = -Infinity;
    for (const [time, value] of points) {
      if (time - last > GAP) runs.push([]);
      runs.at(-1).push(`${this.x(time).toFixed(1)},${this.y(value).toFixed(1)}`);
      last = time;
    }
    return runs;
  }

  /** The legend shows the newest values, or those under the pointer. */
  #read() {
    const pointed = this.pointer !== null && this.x && this.data.some((points) => points.length);
    let shownAt = null;
    this.data.forEach((points, nth) => {
      const { dot } = this.shapes[nth];
      const point = pointed ? nearest(points, this.pointer, this.x) : points.at(-1);
      setText(this.values[nth], point ? this.show(point[1]) : "\u2013");
      setAttribute(dot, "visibility", pointed && point ? "visible" : "hidden");
      if (pointed && point) {
        setAttribute(dot, "cx", this.x(point[0]));
        setAttribute(dot, "cy", this.y(point[1]));
        shownAt = point[0];
      }
    });
    setAttribute(this.cross, "visibility", shownAt === null ? "hidden" : "visible");
    if (shownAt !== null) {
      for (const [name, value] of Object.entries({
        x1: this.x(shownAt),
        x2: this.x(shownAt),
        y1: EDGE.top,
        y2: this.height - EDGE.bottom,
      }))
        setAttribute(this.cross, name, value);
    }
    setText(this.readAt, shownAt === null ? "" : localTime(new Date(shownAt)));
    const label = this.lines
      .map((line, nth) => `${line.label} ${this.values[nth].textContent}`)
      .join(", ");
    setAttribute(this.svg, "aria-label", `${this.title}: ${label}`);
  }
}

/** Seconds before now that the axis labels: whole minutes where possible, and no more than fit. */
function marksOf(seconds, width) {
  const steps = seconds > 120 ? 5 : 4;
  const marks = Array.from({ length: steps + 1 }, (_, nth) => seconds - (nth * seconds) / steps);
  return width < steps * 85 ? [seconds, 0] : marks;
}

function nearest(points, x, place) {
  let best = null;
  for (const point of points)
    if (!best || Math.abs(place(point[0]) - x) < Math.abs(place(best[0]) - x)) best = point;
  return best;
}

const SPARK = { width: 96, height: 24, samples: 90 };

/**
 * The last 90 seconds in the space of a word; hidden from screen readers, the number is beside it.
 */
export class Spark {
  constructor() {
    this.line = s("path", { class: "line tone-depth" });
    this.area = s("path", { class: "area tone-depth" });
    this.element = s(
      "svg",
      {
        class: "spark",
        width: SPARK.width,
        height: SPARK.height,
        viewBox: `0 0 ${SPARK.width} ${SPARK.height}`,
        "aria-hidden": "true",
      },
      this.area,
      this.line,
    );
  }

  static get samples() {
    return SPARK.samples;
  }

  update(points, now = Date.now()) {
    const most = Math.max(1, ...points.map(([, value]) => value));
    const x = (time) => SPARK.width * (1 - (now - time) / (SPARK.samples * 1000));
    const y = (value) => 2 + (SPARK.height - 4) * (1 - value / most);
    const drawn = points
      .filter(([time]) => now - time < SPARK.samples * 1000)
      .map(([time, value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`);
    setAttribute(this.line, "d", drawn.length > 1 ? `M${drawn.join("L")}` : "");
    const foot = SPARK.height - 2;
    setAttribute(
      this.area,
      "d",
      drawn.length > 1
        ? `M${drawn[0].split(",")[0]},${foot}L${drawn.join("L")}` +
            `L${drawn.at(-1).split(",")[0]},${foot}Z`
        : "",
    );
  }
}
