// The value under the cursor: read from the chart's own table, shown in its legend. A slider does the same for keys.
(() => {
  const LEFT = 46, RIGHT = 350, WIDTH = 360;

  for (const figure of document.querySelectorAll("figure.card")) {
    const svg = figure.querySelector("svg.chart[data-low]");
    const table = figure.querySelector("table.numbers");
    if (svg && table && table.tBodies[0].rows.length) connect(figure, svg, table);
  }

  function connect(figure, svg, table) {
    const rows = Array.from(table.tBodies[0].rows, (row) => Array.from(row.cells, (cell) => cell.textContent));
    const steps = rows.map((row) => Number(row[0].replace("−", "-")));
    const axis = table.tHead.rows[0].cells[0].textContent;
    const low = Number(svg.dataset.low), high = Number(svg.dataset.high);
    const at = figure.querySelector(".at"), cursor = svg.querySelector(".cursor"), plot = svg.parentElement;
    const values = Array.from(figure.querySelectorAll(".value[data-column]"));
    const initial = [at.textContent, values.map((value) => value.textContent)];
    const names = values.map((value) => table.tHead.rows[0].cells[Number(value.dataset.column)].textContent);
    const slider = document.createElement("input");
    Object.assign(slider, { type: "range", className: "scrub", min: 0, max: rows.length - 1, step: 1 });
    slider.value = rows.length - 1;
    slider.setAttribute("aria-label", `${figure.querySelector("h3").textContent}: values by ${axis}`);
    plot.append(slider);
    say(rows.length - 1);

    function say(row) {
      slider.value = row;
      const said = values.map((value, i) => `${names[i]} ${rows[row][Number(value.dataset.column)]}`);
      slider.setAttribute("aria-valuetext", `${axis} ${rows[row][0]}: ${said.join(", ")}`);
    }
    function show(row) {
      say(row);
      const place = LEFT + ((RIGHT - LEFT) * (steps[row] - low)) / (high - low);
      cursor.setAttribute("x1", place);
      cursor.setAttribute("x2", place);
      cursor.classList.add("on");
      at.textContent = `${axis} ${rows[row][0]}`;
      for (const value of values) value.textContent = rows[row][Number(value.dataset.column)];
    }
    function leave() {
      if (document.activeElement === slider) return;
      cursor.classList.remove("on");
      at.textContent = initial[0];
      values.forEach((value, i) => {
        value.textContent = initial[1][i];
      });
    }
    function nearest(event) {
      const box = svg.getBoundingClientRect();
      const part = (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (RIGHT - LEFT);
      const wanted = low + (high - low) * part;
      let best = 0;
      steps.forEach((step, i) => {
        if (Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = i;
      });
      return best;
    }
    plot.addEventListener("pointermove", (event) => show(nearest(event)));
    plot.addEventListener("pointerdown", (event) => show(nearest(event)));
    plot.addEventListener("pointerleave", leave);
    slider.addEventListener("input", () => show(Number(slider.value)));
    slider.addEventListener("focus", () => show(Number(slider.value)));
    slider.addEventListener("blur", leave);
  }
})();

