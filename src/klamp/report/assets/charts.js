// Charts that answer: the values under the cursor, smoothing, a logarithmic axis, zoom, files. Each is drawn from its own
// table.
(() => {
  const SMALL = { width: 360, height: 190, left: 46, side: 10, top: 10, foot: 26, ticks: 5 };
  const FEW = 15, DRAG = 6;
  const figures = Array.from(document.querySelectorAll("figure[data-plot]")).filter(
    (figure) => figure.querySelector("table.numbers tbody tr"),
  );
  const { all, node, button, share } = panel;
  const charts = figures.map((figure) => connect(figure, panel.remembered.charts?.[figure.id] ?? {}));
  const overSteps = charts.filter((chart) => chart.isOverSteps);
  if (overSteps.length) panel.controls(overSteps, remember);
  for (const chart of charts) chart.draw();

  function remember() {
    panel.remember(charts.filter((chart) => chart.isChanged()));
  }

  // ---- One chart

  function connect(figure, state) {
    const data = JSON.parse(figure.dataset.plot);
    const svg = figure.querySelector("svg.chart"), table = figure.querySelector("table.numbers");
    const headings = Array.from(table.tHead.rows[0].cells, (cell) => cell.textContent);
    const rows = Array.from(table.tBodies[0].rows, (row) => Array.from(row.cells, (cell) => plot.read(cell.textContent)));
    const numbers = columns(rows, headings.length);
    const means = data.means.length ? columns(data.means, headings.length) : numbers;
    const series = data.series.map((each, i) => ({ ...each, column: i + 1, label: headings[i + 1] }));
    const isOverSteps = data.axis === "step" && figure.closest("#curves") !== null;
    const keys = keysOf();
    const title = figure.querySelector("h3").textContent;
    const at = figure.querySelector(".at"), plotted = svg.parentElement;
    const values = Array.from(figure.querySelectorAll(".value[data-column]"));
    const spans = Array.from(figure.querySelectorAll(".legend .span"));
    const initial = [at, ...values, ...spans].map((each) => each.textContent);
    const compared = [...data.include, ...data.lines.flat().filter((level) => level !== null)];
    const knee = plot.kneeOf(numbers.slice(1).flat(), compared);
    state = { log: knee !== null, large: false, from: null, to: null, ...state };
    let box = SMALL, x = [0, 1], drawn = curves();

    const slider = node("input", { type: "range", class: "scrub", min: 0, max: rows.length - 1, step: 1 });
    slider.setAttribute("aria-label", `${title}: values by ${data.axis}`);
    slider.setAttribute("aria-keyshortcuts", "+ - 0");
    const readout = node("div", { class: "readout", "aria-hidden": "true" });
    readout.hidden = true;
    plotted.append(slider, readout);
    plotted.hidden = false;
    const tools = toolbar();
    say(rows.length - 1);
    events();
    return { id: figure.id, state, isOverSteps, hasBands: series.some((each) => each.members), range, isChanged, draw };

    function columns(lines, count) {
      return Array.from({ length: count }, (_, i) => lines.map((line) => line[i]));
    }
    function range() {
      return numbers[0].at(-1) - numbers[0][0];
    }
    function isChanged() {
      const common = isOverSteps && (all.smooth > 0 || all.seeds !== "band");
      return common || state.large || state.from !== null || state.log !== (knee !== null);
    }

    // What is drawn: of each curve its points, those smoothed, and of a mean the lowest and highest of its runs.
    function curves() {
      const seen = series.filter((each) => (isOverSteps && all.seeds === "each" ? !each.members : each.of === undefined));
      const span = isOverSteps && all.smooth > 0 ? share(all.smooth) * range() : 0;
      return seen.map((each) => {
        const raw = lines(numbers, each), soft = span ? lines(means, each, span) : null;
        return { ...each, raw, soft, band: (soft ?? raw).band };
      });
    }
    function lines(source, each, span = 0) {
      const steps = source[0];
      const treat = (ys) => {
        const known = steps.map((step, i) => [step, ys[i]]).filter((point) => point[1] !== null && point[1] !== undefined);
        const found = span ? plot.smooth(known.map((point) => point[0]), known.map((point) => point[1]), span) : null;
        return known.map(([step, y], i) => [step, found ? found[i] : y]);
      };
      const middle = source[each.column];
      const edge = (pick) => middle.map((y, i) => {
        const inside = each.members.map((column) => source[column][i]).filter(Number.isFinite);
        return y === null || !inside.length ? null : pick(...inside);
      });
      const band = each.members ? { low: treat(edge(Math.min)), high: treat(edge(Math.max)) } : null;
      return { points: treat(middle), band };
    }

    // ---- Drawing

    function make(name, attributes, ...children) {
      const made = document.createElementNS(svg.namespaceURI, name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      made.append(...children);
      return made;
    }
    function across(value) {
      return box.left + ((box.width - box.side - box.left) * (value - x[0])) / (x[1] - x[0]);
    }
    function draw() {
      const width = Math.round(plotted.clientWidth);
      box = state.large ? { ...SMALL, width, height: Math.round(Math.min(460, Math.max(240, 0.45 * width))), left: 58, ticks: 8 } : SMALL;
      drawn = curves();
      const ends = drawn.flatMap((each) => [each.raw.points[0]?.[0], each.raw.points.at(-1)?.[0]]).filter(Number.isFinite);
      const [first, last] = ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
      x = state.from === null ? (last > first ? [first, last] : [first - 1, last + 1]) : [state.from, state.to];
      const inside = (points) => plot.clip(points, ...x);
      const shown = drawn.map((each) => ({
        ...each,
        raw: inside(each.raw.points),
        soft: each.soft ? inside(each.soft.points) : null,
        low: each.band ? inside(each.band.low) : [],
        high: each.band ? inside(each.band.high) : [],
      }));
      const heights = shown.flatMap((each) => [...each.raw, ...each.low, ...each.high]).map((point) => point[1]);
      const isWhole = state.from === null;
      const y = plot.axis([...heights, ...(isWhole ? data.lines.flat().filter((level) => level !== null) : [])], {
        include: isWhole || data.include.length > 1 ? data.include : [], log: state.log, knee,
      });
      const down = (value) => box.height - box.foot - (box.height - box.foot - box.top) * y.place(value);
      const keep = Array.from(svg.children).filter((child) => child.matches("title, desc"));
      svg.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
      svg.replaceChildren(...keep, ...levels(y, down, "band"), axes(y, down), ...levels(y, down, "level"));
      for (const each of shown) if (each.low.length) svg.append(spread(each, down));
      for (const each of shown) {
        if (each.soft) svg.append(curve(each, each.raw, down, "raw"));
        svg.append(curve(each, each.soft ?? each.raw, down, `d${each.slot % 5}`));
        if (!each.soft) svg.append(...dots(each, down));
      }
      svg.append(...marks(), make("line", { class: "cursor", y1: box.top, y2: box.height - box.foot }));
      figure.querySelector(".unit").textContent = data.unit + (y.bend === null ? "" : ", log scale");
      tools();
      leave();
    }
    function axes(y, down) {
      const group = make("g", { class: "axes" }), right = box.width - box.side, foot = box.height - box.foot;
      for (const value of plot.ticks(y, box.ticks)) {
        const height = down(value).toFixed(1);
        group.append(make("line", { x1: box.left, x2: right, y1: height, y2: height, class: value === 0 ? "zero" : "rule" }));
        group.append(make("text", { x: box.left - 6, y: Number(height) + 3.5, "text-anchor": "end" }, plot.write(value, 3)));
      }
      for (const value of plot.ticks({ low: x[0], high: x[1], bend: null }, box.ticks).filter(Number.isInteger)) {
        group.append(make("text", { x: across(value).toFixed(1), y: foot + 16, "text-anchor": "middle" }, plot.write(value, 6)));
      }
      return group;
    }
    function levels(y, down, kind) {
      const right = box.width - box.side;
      return data.lines.filter(([low, high]) => (kind === "band") === (high !== null) && low <= y.high && (high ?? low) >= y.low).map(([low, high]) => {
        const foot = down(low), top = down(high ?? low);
        if (high === null) return make("line", { x1: box.left, x2: right, y1: foot, y2: foot, class: "level" });
        return make("rect", { x: box.left, y: top, width: right - box.left, height: Math.max(1, foot - top), class: "band" });
      });
    }
    function pen(points, down) {
      let isDown = false;
      return points.map(([at, y]) => {
        const step = Number.isFinite(y) ? `${isDown ? "L" : "M"}${across(at).toFixed(1)} ${down(y).toFixed(1)}` : "";
        isDown = step !== "";
        return step;
      }).join("");
    }
    function curve(each, points, down, look) {
      return make("path", { d: pen(points, down), class: `curve s${each.slot % 8} ${look}` });
    }
    function spread(each, down) {
      const around = pen([...each.high, ...each.low.toReversed()], down);
      return make("path", { d: `${around}Z`, class: `spread s${each.slot % 8}` });
    }
    function dots(each, down) {
      const finite = each.raw.map(([at, y], i) => ({ at, y, i })).filter((point) => Number.isFinite(point.y));
      const isAlone = ({ i }) => ![each.raw[i - 1], each.raw[i + 1]].some((point) => point && Number.isFinite(point[1]));
      const wanted = numbers[0].length <= FEW ? finite : finite.filter(isAlone);
      return wanted.map(({ at, y }) => make("path", { d: dot(each.slot, across(at), down(y)), class: `dot s${each.slot % 8}` }));
    }
    function dot(slot, cx, cy) {
      const [dx, dy, shape] = [
        [-3, 0, "a3 3 0 1 0 6 0a3 3 0 1 0 -6 0Z"],
        [-2.5, -2.5, "h5v5h-5Z"],
        [0, -3.8, "l3.4 6h-6.8Z"],
        [0, -3.6, "l3.6 3.6l-3.6 3.6l-3.6 -3.6Z"],
      ][slot % 4];
      return `M${(cx + dx).toFixed(1)} ${(cy + dy).toFixed(1)}${shape}`;
    }
    function marks() {
      return data.marks.filter(([at]) => at >= x[0] && at <= x[1]).map(([at, number]) => {
        const cx = across(at), foot = box.height - box.foot;
        const line = make("line", { x1: cx, x2: cx, y1: box.top, y2: foot });
        const sign = make("path", { d: `M${cx.toFixed(1)} ${foot - 5}l4.5 8h-9Z` });
        return make("g", { class: "mark" }, line, sign, make("text", { x: cx + 4, y: box.top + 7 }, String(number)));
      });
    }

    // ---- The values under the cursor

    // A value as the legend has it: with the decimals of its kind, where it has some.
    function said(value, digits = 4) {
      const isFixed = data.decimals !== null && Number.isFinite(value);
      return isFixed ? value.toFixed(data.decimals).replace("-", "−") : plot.write(value, digits);
    }

    function keysOf() {
      const found = new Map();
      for (const value of figure.querySelectorAll(".value[data-column]")) {
        found.set(Number(value.dataset.column), value.closest("li").querySelector(".key"));
      }
      for (const each of series) if (!found.has(each.column)) found.set(each.column, found.get(each.of));
      return found;
    }
    function nearestOf(points, wanted) {
      return points.reduce((best, point) => (best && Math.abs(best[0] - wanted) <= Math.abs(point[0] - wanted) ? best : point), null);
    }
    function where(row) {
      return `${data.axis} ${plot.write(numbers[0][row], 9)}`;
    }
    function rangeOf(each, row) {
      const inside = (each.members ?? []).map((column) => numbers[column][row]).filter(Number.isFinite);
      const [low, high] = [Math.min(...inside), Math.max(...inside)];
      if (!inside.length) return "";
      return low === high ? "each" : `${said(low, 3)} to ${said(high, 3)}`;
    }
    function say(row) {
      slider.value = row;
      const each = drawn.map((one) => `${one.label} ${said(numbers[one.column][row])}`);
      slider.setAttribute("aria-valuetext", `${where(row)}: ${each.join(", ")}`);
    }
    function show(row) {
      say(row);
      const cursor = svg.querySelector(".cursor"), cx = across(numbers[0][row]);
      cursor.setAttribute("x1", cx);
      cursor.setAttribute("x2", cx);
      cursor.classList.add("on");
      at.textContent = where(row);
      for (const value of values) value.textContent = said(numbers[Number(value.dataset.column)][row]);
      spans.forEach((span) => {
        const column = Number(span.closest("li").querySelector(".value").dataset.column);
        span.textContent = rangeOf(series[column - 1], row);
      });
      tell(row, cx / box.width);
    }
    function tell(row, part) {
      const list = node("dl");
      for (const each of drawn) {
        const soft = each.soft ? nearestOf(each.soft.points, numbers[0][row])?.[1] ?? null : null;
        const line = node("div", {}, keys.get(each.column).cloneNode(true), node("dt", {}, each.members ? each.label.replace(/, mean of \d+$/, "") : each.label));
        line.append(node("dd", {}, said(numbers[each.column][row])));
        line.append(node("dd", {}, each.soft ? `~ ${said(soft)}` : rangeOf(each, row)));
        list.append(line);
      }
      readout.replaceChildren(node("p", {}, where(row)), list);
      readout.classList.toggle("many", drawn.length > 12);
      readout.classList.toggle("above", drawn.length > 4 && !state.large);
      readout.hidden = false;
      const room = plotted.clientWidth, wide = readout.offsetWidth, place = part * room;
      const left = place + 12 + wide <= room ? place + 12 : Math.max(0, Math.min(place - 12 - wide, room - wide));
      readout.style.left = `${left}px`;
    }
    function leave() {
      readout.hidden = true;
      if (document.activeElement === slider) {
        show(Number(slider.value));
        return;
      }
      svg.querySelector(".cursor").classList.remove("on");
      [at, ...values, ...spans].forEach((each, i) => {
        each.textContent = initial[i];
      });
    }

    // ---- Zoom, the axis, files

    function zoom(from, to) {
      const [first, last] = [numbers[0][0], numbers[0].at(-1)];
      const [low, high] = [Math.max(Math.min(from, to), first), Math.min(Math.max(from, to), last)];
      const least = (last - first) / 1e4;
      if (!(high - low > least)) return;
      const isAll = low <= first && high >= last;
      Object.assign(state, isAll ? { from: null, to: null } : { from: low, to: high });
      changed();
    }
    function zoomBy(factor) {
      const middle = Math.min(Math.max(numbers[0][Number(slider.value)], x[0]), x[1]);
      zoom(middle - (middle - x[0]) * factor, middle + (x[1] - middle) * factor);
    }
    function whole() {
      Object.assign(state, { from: null, to: null });
      changed();
    }
    function enlarge(isLarge) {
      state.large = isLarge;
      figure.classList.toggle("large", isLarge);
      changed();
      if (isLarge) figure.scrollIntoView({ block: "nearest" });
    }
    function changed() {
      draw();
      remember();
    }
    function toolbar() {
      const log = button("Log", `${title}: logarithmic axis`, () => {
        state.log = !state.log;
        changed();
      });
      const large = button("Enlarge", `${title}: enlarge`, () => enlarge(!state.large));
      const more = button("+", `${title}: zoom in`, () => zoomBy(0.5));
      const less = button("−", `${title}: zoom out`, () => zoomBy(2));
      const reset = button("Whole", `${title}: show the whole range`, whole);
      const files = node("details", { class: "save" }, node("summary", { "aria-label": `${title}: save` }, "Save"));
      const kinds = [["SVG", () => save.svg(figure, svg)], ["PNG", () => save.png(figure, svg)], ["CSV", csv]];
      for (const [kind, action] of kinds) {
        files.append(button(kind, `${title}: save as ${kind}`, () => {
          leave();
          action();
          files.open = false;
        }));
      }
      figure.append(node("div", { class: "tools" }, reset, less, more, log, large, files));
      figure.classList.toggle("large", state.large);
      const update = () => {
        log.setAttribute("aria-pressed", String(state.log));
        large.setAttribute("aria-pressed", String(state.large));
        reset.hidden = state.from === null;
        more.hidden = less.hidden = !state.large;
      };
      update();
      return update;
    }
    function csv() {
      const soft = drawn.filter((each) => each.soft);
      const names = [...headings, ...soft.map((each) => `${each.label} (smoothed)`)];
      const softAt = (each, step) => each.soft.points.find((point) => point[0] === step)?.[1] ?? null;
      save.csv(figure, names, rows.map((row) => [...row, ...soft.map((each) => softAt(each, row[0]))]));
    }

    function events() {
      let start = null;
      const part = (event) => {
        const area = svg.getBoundingClientRect();
        const at = ((event.clientX - area.left) / area.width) * box.width;
        return Math.min(Math.max((at - box.left) / (box.width - box.side - box.left), 0), 1);
      };
      const valueAt = (event) => x[0] + (x[1] - x[0]) * part(event);
      const nearest = (event) => {
        const wanted = valueAt(event);
        let best = 0;
        rows.forEach((_, row) => {
          if (Math.abs(numbers[0][row] - wanted) < Math.abs(numbers[0][best] - wanted)) best = row;
        });
        return best;
      };
      const select = (event) => {
        svg.querySelector(".select")?.remove();
        const [from, to] = [start.at, part(event)].sort((a, b) => a - b), wide = box.width - box.side - box.left;
        const size = { x: box.left + from * wide, width: (to - from) * wide, y: box.top, height: box.height - box.foot - box.top };
        svg.append(make("rect", { class: "select", ...size }));
      };
      plotted.addEventListener("pointerdown", (event) => {
        show(nearest(event));
        if (event.pointerType !== "mouse" || event.button !== 0) return;
        start = { at: part(event), value: valueAt(event), clientX: event.clientX };
        plotted.setPointerCapture(event.pointerId);
        event.preventDefault();
      });
      plotted.addEventListener("pointermove", (event) => {
        show(nearest(event));
        if (start && Math.abs(event.clientX - start.clientX) > DRAG) select(event);
      });
      plotted.addEventListener("pointerup", (event) => {
        const from = start;
        start = null;
        svg.querySelector(".select")?.remove();
        if (from && Math.abs(event.clientX - from.clientX) > DRAG) zoom(from.value, valueAt(event));
      });
      plotted.addEventListener("pointercancel", () => {
        start = null;
        svg.querySelector(".select")?.remove();
      });
      plotted.addEventListener("pointerleave", leave);
      plotted.addEventListener("dblclick", whole);
      slider.addEventListener("input", () => show(Number(slider.value)));
      slider.addEventListener("focus", () => show(Number(slider.value)));
      slider.addEventListener("blur", leave);
      figure.addEventListener("keydown", (event) => {
        if (event.key === "Escape" && state.large) enlarge(false);
        if (event.target !== slider || event.ctrlKey || event.metaKey || event.altKey) return;
        const action = { "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2), 0: whole }[event.key];
        if (!action) return;
        event.preventDefault();
        action();
      });
      addEventListener("resize", () => {
        if (state.large) draw();
      });
    }
  }
})();
