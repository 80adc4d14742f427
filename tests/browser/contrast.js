// Text against the nearest background that is not transparent, as WCAG 2.2 computes it: AA asks for 4.5, for large text
// 3, and 3 for what is drawn. Gives how many things were looked at, and those that fail.
() => {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  function rgb(text) {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = text;
    probe.fillRect(0, 0, 1, 1);
    return Array.from(probe.getImageData(0, 0, 1, 1).data);
  }
  const part = (c) => ((c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  function ratio(a, b) {
    const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  }
  function behind(node) {
    for (; node; node = node.parentElement) {
      const found = rgb(getComputedStyle(node).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255];
  }
  const findings = [];
  let seen = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility({ contentVisibilityAuto: false })) continue;
    if (node.closest("script, style, .unseen, svg title, svg desc, :disabled")) continue;
    const style = getComputedStyle(node), svg = node.closest("svg");
    const size = parseFloat(style.fontSize), heavy = Number(style.fontWeight) >= 700;
    const least = size >= 24 || (heavy && size >= 18.66) ? 3 : 4.5;
    const found = ratio(rgb(svg ? style.fill : style.color), behind(svg ?? node));
    seen += 1;
    if (found < least) findings.push(`${found.toFixed(2)} ${node.className} ${walker.currentNode.data.slice(0, 40)}`);
  }
  for (const node of document.querySelectorAll("svg .curve, svg .level, input, select, button")) {
    if (!node.checkVisibility()) continue;
    const style = getComputedStyle(node);
    const drawn = node.closest("svg") ? style.stroke : style.borderTopColor;
    const found = ratio(rgb(drawn), behind((node.closest("svg") ?? node).parentElement));
    seen += 1;
    const own = node.type !== "checkbox" && node.type !== "range"; // the browser draws the others
    if (found < 3 && own) findings.push(`${found.toFixed(2)} ${node.outerHTML.slice(0, 80)}`);
  }
  return [seen, [...new Set(findings)]];
}
