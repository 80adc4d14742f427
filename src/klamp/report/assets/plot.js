// The calculations of charts: numbers as text, axes and their ticks.
const plot = (() => {
  const STEPS = [1, 2, 2.5, 5, 10];
  const LOG_STEPS = [1, 2, 5];
  const FAR = 100;

  // A number as people write it, as klamp.report.text has it.
  function write(value, digits = 4) {
    if (value === null || value === undefined) return "–";
    if (Number.isNaN(value)) return "NaN";
    const sign = value < 0 ? "−" : "", size = Math.abs(value);
    if (size === 0 || size === Infinity) return `${sign}${size ? "∞" : "0"}`;
    const isPlain = size >= 1e-4 && size < 1e6;
    const decimals = Math.max(0, isPlain ? digits - 1 - Math.floor(Math.log10(size)) : digits - 1);
    const [mantissa, power] = (isPlain ? size.toFixed(decimals) : size.toExponential(decimals)).split("e");
    const short = mantissa.includes(".") ? mantissa.replace(/\.?0+$/, "") : mantissa;
    return `${sign}${short}${power ? `e${power.replace("+", "").replace("-", "−")}` : ""}`;
  }
  // The number in a cell of a table: null where there is none.
  function read(text) {
    if (text === "–") return null;
    if (text.endsWith("∞")) return text.startsWith("−") ? -Infinity : Infinity;
    return Number(text.replaceAll("−", "-"));
  }

  // The axis with room for these values: linear, or logarithmic away from 0 (asinh, linear below its knee).
  function axis(values, { include = [], log = false, knee = null } = {}) {
    const finite = values.filter(Number.isFinite).map((value) => Math.min(Math.max(value, -1e100), 1e100));
    const sizes = finite.filter((value) => value !== 0).map(Math.abs);
    const bend = log && sizes.length ? knee ?? least(finite, sizes) : null;
    const isScale = include.length > 1; // both of its ends: less of it would draw 99.6 after 100 as a cliff
    const shown = [...finite, ...(bend === null || isScale || finite.length === 0 ? include : [])];
    let low = Math.min(...(shown.length ? shown : [0])), high = Math.max(...(shown.length ? shown : [1]));
    const there = (value) => (bend === null ? value : Math.asinh(value / bend));
    const back = (place) => (bend === null ? place : Math.sinh(place) * bend);
    let margin = 0.05 * (there(high) - there(low));
    if (high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high))) margin = Math.abs(there(high)) / 2 || 1;
    const floor = back(there(low) - margin);
    low = low >= 0 && bend === null ? Math.max(0, floor) : floor;
    high = back(there(high) + margin);
    const place = (value) => (there(Math.min(Math.max(value, low), high)) - there(low)) / (there(high) - there(low));
    return { low, high, place, bend };
  }
  function least(finite, sizes) {
    const smallest = Math.min(...sizes);
    return finite.every((value) => value > 0) ? smallest / 2 : Math.max(smallest, Math.max(...sizes) / 1e4);
  }
  // Where an axis bends by itself: the largest value is so far above the others (and the levels) that nothing else
  // could be seen; null: it does not.
  function kneeOf(values, levels) {
    const sizes = values.filter((value) => Number.isFinite(value) && value !== 0).map(Math.abs).sort((a, b) => a - b);
    const usual = sizes.length > 3 ? sizes[Math.floor((3 * sizes.length) / 4)] : Infinity;
    return sizes.at(-1) > Math.max(FAR * usual, ...levels.map(Math.abs)) ? usual / 2 : null;
  }

  function ticks({ low, high, bend }, most = 5) {
    if (bend !== null) return decades(low, high, bend, most);
    const least = (high - low) / most, power = 10 ** Math.floor(Math.log10(least));
    const step = STEPS.find((factor) => factor * power >= least * (1 - 1e-9)) * power;
    const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
  }
  function decades(low, high, bend, most) {
    const first = Math.floor(Math.log10(bend)), last = Math.floor(Math.log10(Math.max(Math.abs(low), Math.abs(high))));
    const sizes = [];
    for (let power = first; power <= last; power += 1) for (const factor of LOG_STEPS) sizes.push([factor, power]);
    const all = sizes.filter(([factor, power]) => factor * 10 ** power >= bend);
    const inside = (factors) => {
      const kept = all.filter(([factor]) => factors.includes(factor)).map(([factor, power]) => factor * 10 ** power);
      return [...kept.map((size) => -size), 0, ...kept].filter((value) => value >= low && value <= high);
    };
    let found = inside([1]);
    if (found.filter((value) => value !== 0).length < 3) found = inside(LOG_STEPS);
    const every = Math.ceil(found.length / (most + 2));
    return found.filter((value, i) => value === 0 || (found.length - 1 - i) % every === 0).map((value) => Number(value.toPrecision(12)));
  }

  return { write, read, axis, kneeOf, ticks };
})();
