// What is set for all charts over steps: smoothing, seeds; kept while the page is open in its tab.
const panel = (() => {
  const memory = `klamp-charts ${location.pathname}`;
  const remembered = recall();
  const all = { smooth: 0, seeds: "band", ...remembered.all };
  return { all, remembered, remember, controls, node, button, share };

  function recall() {
    try {
      return JSON.parse(sessionStorage.getItem(memory)) ?? {};
    } catch {
      return {};
    }
  }
  function remember(charts) {
    const each = Object.fromEntries(charts.map((chart) => [chart.id, chart.state]));
    try {
      sessionStorage.setItem(memory, JSON.stringify({ all, charts: each }));
    } catch {
      // A file may have no storage; what was set then lasts as long as the page.
    }
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

  function controls(overSteps, remember) {
    const bar = node("div", { class: "controls", role: "group", "aria-label": "All charts over steps" });
    const slider = node("input", { type: "range", id: "c-smooth", min: 0, max: 100, step: 1 });
    const said = node("span", { class: "over" });
    const longest = Math.max(...overSteps.map((chart) => chart.range()));
    const say = () => {
      const over = plot.write(2 * share(all.smooth) * longest, 2);
      said.textContent = all.smooth ? `over about ${over} steps` : "none";
      slider.setAttribute("aria-valuetext", said.textContent);
    };
    const apply = () => {
      say();
      for (const chart of overSteps) chart.draw();
      remember();
    };
    slider.value = all.smooth;
    slider.addEventListener("input", () => {
      all.smooth = Number(slider.value);
      apply();
    });
    bar.append(node("label", { for: "c-smooth" }, "Smoothing"), slider, said);
    if (overSteps.some((chart) => chart.hasBands)) {
      const select = node("select", { id: "c-seeds" });
      for (const [value, text] of [["band", "mean and band"], ["each", "each run"]]) select.append(node("option", { value }, text));
      select.value = all.seeds;
      select.addEventListener("change", () => {
        all.seeds = select.value;
        apply();
      });
      bar.append(node("label", { for: "c-seeds" }, "Seeds"), select);
    }
    document.querySelector("#curves .grid").before(bar);
    say();
  }
  function share(position) {
    return 0.25 * (position / 100) ** 2;
  }
})();
