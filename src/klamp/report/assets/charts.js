// The charts: each is drawn from its own table, with the values under the cursor, a logarithmic axis and a large view.
(() => {
  const SMALL = { width: 360, height: 190, left: 46, side: 10, top: 10, foot: 26, ticks: 5 };
  const FEW = 15; // up to so many steps, each point has a dot
  for (const figure of document.querySelectorAll("figure[data-plot]")) {
    if (figure.querySelector("table.numbers tbody tr")) connect(figure);
  }

  function node(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  function button(text, label, action) {
    const made = node("button", { type: "button", "aria-label": label }, text);
    made.addEventListener("click", action);
    return made;
  }

  function connect(figure) {
    const data = JSON.parse(figure.dataset.plot);
    const svg = figure.querySelector("svg.chart"), table = figure.querySelector("table.numbers");
    const plotted = svg.parentElement, title = figure.querySelector("h3").textContent;
    const rows = Array.from(table.tBodies[0].rows, (row) => Array.from(row.cells, (cell) => plot.read(cell.textContent)));
    const steps = rows.map((row) => row[0]);
    const series = data.slots.map((slot, i) => ({
      slot,
      label: table.tHead.rows[0].cells[i + 1].textContent,
      points: rows.map((row) => [row[0], row[i + 1]]).filter((point) => point[1] !== null),
    }));
    const levels = data.lines.flat().filter((level) => level !== null);
    const knee = plot.kneeOf(rows.flatMap((row) => row.slice(1)), [...data.include, ...levels]);
    const x = steps.length > 1 ? [steps[0], steps.at(-1)] : [steps[0] - 1, steps[0] + 1];
    let isLog = knee !== null, isLarge = false, box = SMALL;

    const slider = node("input", { type: "range", class: "scrub", min: 0, max: rows.length - 1, step: 1 });
    slider.setAttribute("aria-label", `${title}: values by step`);
    const readout = node("div", { class: "readout", "aria-hidden": "true" });
    plotted.append(slider, readout);
    plotted.hidden = false;
    const log = button("Log", `${title}: logarithmic axis`, () => {
      isLog = !isLog;
      draw();
    });
    const large = button("Enlarge", `${title}: enlarge`, () => enlarge(!isLarge));
    figure.append(node("div", { class: "tools" }, log, large));
    events();
    say(rows.length - 1);
    draw();

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
      box = isLarge ? { ...SMALL, width, height: Math.round(Math.min(460, Math.max(240, 0.45 * width))), left: 58, ticks: 8 } : SMALL;
      const heights = [...series.flatMap((each) => each.points.map((point) => point[1])), ...levels];
      const y = plot.axis(heights, { include: data.include, log: isLog, knee });
      const down = (value) => box.height - box.foot - (box.height - box.foot - box.top) * y.place(value);
      const words = Array.from(svg.children).filter((child) => child.matches("title, desc"));
      svg.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
      svg.replaceChildren(...words, ...compared(down, "band"), axes(y, down), ...compared(down, "level"));
      for (const each of series) {
        const look = `curve s${each.slot % 8} d${each.slot % 5}`;
        svg.append(make("path", { d: pen(each.points, down), class: look }), ...dots(each, down));
      }
      svg.append(...marks(), make("line", { class: "cursor", y1: box.top, y2: box.height - box.foot }));
      figure.querySelector(".unit").textContent = [data.unit, y.bend === null ? "" : "log scale"].filter(Boolean).join(", ");
      log.setAttribute("aria-pressed", String(isLog));
      large.setAttribute("aria-pressed", String(isLarge));
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
    function compared(down, kind) {
      const right = box.width - box.side;
      return data.lines.filter((line) => (kind === "band") === (line[1] !== null)).map(([low, high]) => {
        const foot = down(low), top = down(high ?? low);
        if (high === null) return make("line", { x1: box.left, x2: right, y1: foot, y2: foot, class: "level" });
        return make("rect", { x: box.left, y: top, width: right - box.left, height: Math.max(1, foot - top), class: "band" });
      });
    }
    function pen(points, down) {
      let isDown = false;
      return points.map(([at, y]) => {
        const stroke = Number.isFinite(y) ? `${isDown ? "L" : "M"}${across(at).toFixed(1)} ${down(y).toFixed(1)}` : "";
        isDown = stroke !== "";
        return stroke;
      }).join("");
    }
    function dots({ slot, points }, down) {
      const isFinite = (point) => point !== undefined && Number.isFinite(point[1]);
      const isAlone = (_, i) => !isFinite(points[i - 1]) && !isFinite(points[i + 1]);
      const wanted = points.filter((point, i) => isFinite(point) && (steps.length <= FEW || isAlone(point, i)));
      return wanted.map(([at, y]) => make("path", { d: dot(slot, across(at), down(y)), class: `dot s${slot % 8}` }));
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
      return data.marks.map(([at, number]) => {
        const cx = across(at), foot = box.height - box.foot;
        const line = make("line", { x1: cx, x2: cx, y1: box.top, y2: foot });
        const sign = make("path", { d: `M${cx.toFixed(1)} ${foot - 5}l4.5 8h-9Z` });
        return make("g", { class: "mark" }, line, sign, make("text", { x: cx + 4, y: box.top + 7 }, String(number)));
      });
    }

    // ---- The values under the cursor

    function written(value) {
      const isFixed = data.decimals !== null && Number.isFinite(value);
      return isFixed ? value.toFixed(data.decimals).replace("-", "−") : plot.write(value);
    }
    function say(row) {
      slider.value = row;
      const values = series.map((each, i) => `${each.label} ${written(rows[row][i + 1])}`);
      slider.setAttribute("aria-valuetext", `step ${plot.write(steps[row], 9)}: ${values.join(", ")}`);
    }
    function show(row) {
      say(row);
      const cursor = svg.querySelector(".cursor"), cx = across(steps[row]);
      cursor.setAttribute("x1", cx);
      cursor.setAttribute("x2", cx);
      cursor.classList.add("on");
      const lines = series.map((each, i) => {
        const key = make("svg", { class: "key", viewBox: "0 0 22 10" });
        key.append(make("path", { d: "M0 5H22", class: `curve s${each.slot % 8} d${each.slot % 5}` }));
        return node("div", {}, key, node("dt", {}, each.label), node("dd", {}, written(rows[row][i + 1])));
      });
      readout.replaceChildren(node("p", {}, `step ${plot.write(steps[row], 9)}`), node("dl", {}, ...lines));
      readout.classList.toggle("many", series.length > 12);
      readout.classList.toggle("above", series.length > 4 && !isLarge);
      readout.hidden = false;
      const room = plotted.clientWidth, wide = readout.offsetWidth, place = (cx / box.width) * room;
      const left = place + 12 + wide <= room ? place + 12 : Math.max(0, Math.min(place - 12 - wide, room - wide));
      readout.style.left = `${left}px`;
    }
    function leave() {
      readout.hidden = true;
      svg.querySelector(".cursor").classList.remove("on");
      if (document.activeElement === slider) show(Number(slider.value));
    }
    function enlarge(toLarge) {
      isLarge = toLarge;
      figure.classList.toggle("large", isLarge);
      draw();
      if (isLarge) figure.scrollIntoView({ block: "nearest" });
    }
    function nearest(event) {
      const area = svg.getBoundingClientRect();
      const at = ((event.clientX - area.left) / area.width) * box.width;
      const distance = (row) => Math.abs(across(steps[row]) - at);
      return steps.reduce((best, _, row) => (distance(row) < distance(best) ? row : best), 0);
    }
    function events() {
      plotted.addEventListener("pointerdown", (event) => show(nearest(event)));
      plotted.addEventListener("pointermove", (event) => show(nearest(event)));
      plotted.addEventListener("pointerleave", leave);
      slider.addEventListener("input", () => show(Number(slider.value)));
      slider.addEventListener("focus", () => show(Number(slider.value)));
      slider.addEventListener("blur", leave);
      figure.addEventListener("keydown", (event) => {
        if (event.key === "Escape" && isLarge) enlarge(false);
      });
      addEventListener("resize", () => {
        if (isLarge) draw();
      });
    }
  }
})();
