// A chart as a file: an SVG with its looks inside, a PNG of that, its numbers as CSV.
const save = (() => {
  const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-linecap", "opacity"];
  const WRITTEN = ["fill", "font-family", "font-size", "font-weight", "text-anchor"];
  const LINE = 17, SHARP = 3;

  // A copy of a drawing that needs no style sheet; what is not seen is left out.
  function dressed(node) {
    const look = getComputedStyle(node), copy = node.cloneNode(false);
    for (const { name } of [...copy.attributes]) if (/^(class|role|aria-.*|data-.*)$/.test(name)) copy.removeAttribute(name);
    const looks = node.matches("text") ? WRITTEN : node.matches("path, line, rect") ? DRAWN : [];
    for (const name of looks) copy.setAttribute(name, look.getPropertyValue(name));
    for (const child of node.childNodes) {
      if (child.nodeType === Node.TEXT_NODE) copy.append(child.data);
      else if (getComputedStyle(child).visibility !== "hidden") copy.append(dressed(child));
    }
    return copy;
  }

  // The chart with its title above and its legend below.
  function picture(figure, svg) {
    const make = (name, attributes, ...children) => {
      const made = document.createElementNS(svg.namespaceURI, name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      made.append(...children);
      return made;
    };
    const look = getComputedStyle(figure), muted = getComputedStyle(figure.querySelector(".says")).color;
    const font = { "font-family": look.fontFamily, "font-size": 12 };
    const { width, height } = svg.viewBox.baseVal, top = 30, gap = 12;
    const entries = Array.from(figure.querySelectorAll(".legend li"));
    const columns = Math.max(1, Math.floor(width / 260)), lines = Math.ceil(entries.length / columns);
    const total = top + height + gap + lines * LINE + gap;
    const drawing = dressed(svg);
    for (const [key, value] of Object.entries({ x: gap, y: top, width, height })) drawing.setAttribute(key, value);
    const text = (x, y, words, more = {}) => make("text", { x, y, ...font, fill: look.color, ...more }, words);
    const legend = entries.map((entry, i) => {
      const x = gap + (i % columns) * (width / columns), y = top + height + gap + Math.floor(i / columns) * LINE;
      const swatch = dressed(entry.querySelector(".key"));
      for (const [key, value] of Object.entries({ x, y, width: 22, height: 10 })) swatch.setAttribute(key, value);
      return make("g", {}, swatch, text(x + 29, y + 9, entry.querySelector(".label").textContent, { fill: muted }));
    });
    const unit = make("tspan", { dx: 8, "font-weight": 400, fill: muted }, figure.querySelector(".unit").textContent);
    const heading = text(gap, 18, figure.querySelector("h3").textContent, { "font-weight": 600, "font-size": 14 });
    heading.append(unit);
    const size = { width: width + 2 * gap, height: total };
    const paper = make("rect", { ...size, fill: look.backgroundColor });
    return make("svg", { ...size, viewBox: `0 0 ${size.width} ${size.height}` }, paper, heading, drawing, ...legend);
  }

  function file(name, content, type) {
    const link = document.createElement("a"), url = URL.createObjectURL(new Blob([content], { type }));
    Object.assign(link, { href: url, download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }
  function svg(figure, drawing) {
    file(`${figure.id}.svg`, new XMLSerializer().serializeToString(picture(figure, drawing)), "image/svg+xml");
  }
  async function png(figure, drawing) {
    const source = picture(figure, drawing), image = new Image(), canvas = document.createElement("canvas");
    image.src = `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(source))}`;
    await image.decode();
    Object.assign(canvas, { width: SHARP * source.getAttribute("width"), height: SHARP * source.getAttribute("height") });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => file(`${figure.id}.png`, blob, "image/png"));
  }

  // Names come from whoever named runs and skills: a spreadsheet must not take one for a formula.
  function quoted(text) {
    const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }
  function number(value) {
    return value === null ? "" : String(Number(value.toPrecision(6)));
  }
  function csv(figure, headings, rows) {
    const lines = [headings.map(quoted), ...rows.map((row) => row.map(number))];
    file(`${figure.id}.csv`, lines.map((line) => `${line.join(",")}\r\n`).join(""), "text/csv");
  }

  return { svg, png, csv };
})();
