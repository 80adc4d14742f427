// The per-token view: what is known of the token under the cursor or the focus, filters, the order of completions.
(() => {
  const list = document.getElementById("completions");
  if (!list) return;
  const cards = Array.from(list.children, (card) => ({
    card,
    strip: card.querySelector(".tokens"),
    known: JSON.parse(card.dataset.numbers),
    number: Number(card.dataset.number),
    run: card.dataset.run,
    step: Number(card.dataset.step),
    reward: "reward" in card.dataset ? Number(card.dataset.reward) : undefined,
    worst: Number(card.dataset.worst),
    kl: Number(card.dataset.kl),
    length: Number(card.dataset.length),
    blamed: "blamed" in card.dataset,
  }));
  const anchors = ["reference", "teacher", "sampler"]; // their numbers stand under their first letters
  const byStrip = new Map(cards.map((entry) => [entry.strip, entry]));

  // ---- What a token says

  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "tooltip");
  document.body.append(tip);
  let held = null;

  function percent(logprob) {
    const share = 100 * Math.exp(Math.min(logprob, 0));
    if (share >= 99.9995) return "100 %";
    if (share >= 99.95) return `${share.toFixed(3)} %`;
    return share >= 0.1 ? `${share.toFixed(1)} %` : `${share.toPrecision(2).replace("-", "−")} %`;
  }
  function signed(value) {
    return `${value > 0 ? "+" : ""}${value.toFixed(3)}`.replace("-", "−");
  }
  function facts(token) {
    const entry = byStrip.get(token.parentElement);
    const place = Array.prototype.indexOf.call(token.parentElement.children, token);
    const known = entry.known;
    const logprobs = ["policy", ...anchors].map((name) => [name, known[name[0]]?.[place] ?? null]);
    const policy = logprobs[0][1];
    const other = known[entry.against?.[0]]?.[place] ?? null;
    const rows = [];
    if (policy !== null && other !== null) {
      const against = entry.against === "reference" ? "log-ratio" : `log-ratio to the ${entry.against}`;
      const ratio = policy - other;
      rows.push([against, signed(ratio), "nats"]);
      const delta = entry.against === "sampler" ? -ratio : ratio;
      rows.push(["k3", (Math.expm1(-delta) + delta).toPrecision(3).replace("-", "−"), "nats"]);
    }
    for (const [name, value] of logprobs) {
      if (value !== null) rows.push([name, percent(value), `log ${value.toFixed(4).replace("-", "−")}`]);
    }
    rows.push(["position", String(Number(token.parentElement.dataset.begin) + place + 1), ""]);
    const said = [];
    if (token.classList.contains("m")) said.push("not trained on");
    if (token.classList.contains("q")) said.push("prompt, or a tool's answer");
    if (token.classList.contains("a")) said.push("blamed by an alarm");
    return { rows, said };
  }
  function node(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }
  function show(token) {
    const { rows, said } = facts(token);
    const table = node("dl");
    for (const [name, value, more] of rows) {
      const row = node("div");
      row.append(node("dt", name), node("dd", value), node("dd", more));
      table.append(row);
    }
    tip.replaceChildren(node("div", token.textContent, "token"), table);
    if (said.length) tip.append(node("p", said.join("; "), "said"));
    tip.hidden = false;
    const box = (token.getClientRects()[0] ?? token.getBoundingClientRect());
    const wide = document.documentElement.clientWidth;
    const left = Math.max(10, Math.min(box.left, wide - tip.offsetWidth - 10));
    const below = box.bottom + 8 + tip.offsetHeight < innerHeight;
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${(below ? box.bottom + 8 : box.top - tip.offsetHeight - 8) + scrollY}px`;
    const spoken = rows.map(([name, value, more]) => `${name} ${value} ${more}`.trim());
    token.setAttribute("aria-label", [`token ${token.textContent}`, ...spoken, ...said].join(", "));
  }
  function hide() {
    if (held) show(held);
    else tip.hidden = true;
  }
  function isToken(target) {
    return target instanceof HTMLElement && byStrip.has(target.parentElement) ? target : null;
  }
  function enter(token) {
    for (const other of token.parentElement.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    token.tabIndex = 0;
    token.focus();
  }

  for (const { strip } of cards) {
    for (const token of strip.children) {
      token.setAttribute("role", "button");
      token.tabIndex = -1;
    }
    if (strip.firstElementChild) strip.firstElementChild.tabIndex = 0;
  }
  list.addEventListener("pointerover", (event) => {
    const token = isToken(event.target);
    if (token) show(token);
  });
  list.addEventListener("pointerout", (event) => {
    if (isToken(event.target)) hide();
  });
  list.addEventListener("focusin", (event) => {
    const token = isToken(event.target);
    if (!token) return;
    held = token;
    show(token);
  });
  list.addEventListener("focusout", () => {
    held = null;
    hide();
  });
  list.addEventListener("click", (event) => {
    const token = isToken(event.target);
    if (token) enter(token);
  });
  list.addEventListener("keydown", (event) => {
    const token = isToken(event.target);
    if (!token) return;
    const all = token.parentElement.children;
    const moves = {
      ArrowRight: token.nextElementSibling,
      ArrowLeft: token.previousElementSibling,
      Home: all[0],
      End: all[all.length - 1],
    };
    if (event.key in moves) {
      event.preventDefault();
      if (moves[event.key]) enter(moves[event.key]);
    } else if (event.key === "Escape") {
      held = null;
      tip.hidden = true;
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      held = token;
      show(token);
    }
  });

  // ---- Which model the shades compare the policy with; a completion that it did not score keeps its first one

  const choice = document.getElementById("against");
  const chooser = document.getElementById("f-against");
  const edges = (choice?.dataset.edges ?? "").split(" ").map(Number);
  function compare() {
    for (const entry of cards) {
      const first = anchors.find((name) => entry.known[name[0]]);
      const wanted = chooser && entry.known[chooser.value[0]] ? chooser.value : first;
      const before = entry.against ?? first;
      entry.against = wanted;
      if (wanted === before) continue;
      entry.counts ??= Array.from(entry.strip.children, (token) => !token.matches(".m, .q.u"));
      Array.from(entry.strip.children).forEach((token, place) => {
        const [policy, other] = [entry.known.p[place], entry.known[wanted[0]][place]];
        const has = entry.counts[place] && policy !== null && other !== null;
        token.className = [has ? shade(policy - other) : "u", ...token.className.split(" ").slice(1)].join(" ");
      });
      entry.strip.ariaLabel = entry.strip.ariaLabel.replace(/log \w+$/, `log ${wanted}`);
      for (const fact of entry.card.querySelectorAll("[data-of]")) {
        fact.hidden = fact.dataset.of !== wanted;
        if (!fact.hidden && "kl" in fact.dataset) {
          entry.kl = Number(fact.dataset.kl);
          entry.worst = Number(fact.dataset.worst);
        }
      }
    }
    const names = anchors.filter((name) => cards.some((entry) => entry.against === name)).join(" or ");
    if (names) for (const other of document.querySelectorAll(".shades .other")) other.textContent = names;
  }
  function shade(ratio) {
    const level = edges.filter((edge) => Math.abs(ratio) >= edge).length;
    return level ? `${ratio > 0 ? "p" : "n"}${level}` : "z";
  }

  // ---- Which completions are shown, in which order

  const PAGE = 25;
  const form = document.getElementById("filters");
  const more = document.getElementById("more");
  const count = document.getElementById("count");
  const field = (name) => document.getElementById(`f-${name}`);
  let limit = PAGE;
  let matching = cards;

  const orders = {
    worst: (a, b) => (chooser?.selectedIndex > 0 ? b.worst - a.worst : 0),
    kl: (a, b) => b.kl - a.kl,
    step: (a, b) => a.step - b.step,
    last: (a, b) => b.step - a.step,
    reward: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
    low: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
    length: (a, b) => b.length - a.length,
  };
  function plain(text) {
    return text.replaceAll("↵\n", "\n").replaceAll("␣", " ").toLowerCase();
  }
  function words(entry) {
    entry.text ??= plain(`${entry.card.querySelector(".prompt .words")?.textContent ?? ""}\n${entry.strip.textContent}`);
    return entry.text;
  }
  function apply() {
    const [from, to] = ["step-from", "step-to"].map((name) => field(name).valueAsNumber);
    const run = field("run")?.value ?? "", text = plain(field("text").value), blamed = field("blamed").checked;
    matching = cards.filter(
      (entry) =>
        (run === "" || entry.run === run) &&
        !(entry.step < from || entry.step > to) &&
        (!blamed || entry.blamed) &&
        (text === "" || words(entry).includes(text)),
    );
    matching.sort((a, b) => orders[field("sort").value](a, b) || a.number - b.number);
    limit = PAGE;
    draw();
  }
  function draw() {
    const wanted = new Set(matching);
    for (const entry of cards) entry.card.hidden = !wanted.has(entry);
    matching.forEach((entry, i) => entry.card.classList.toggle("later", i >= limit));
    list.append(...matching.map((entry) => entry.card));
    const visible = Math.min(limit, matching.length);
    count.textContent = matching.length
      ? `${visible} of ${matching.length} shown` + (matching.length < cards.length ? `; ${cards.length} on the page` : "")
      : "No completion is like that.";
    more.hidden = matching.length <= limit;
    more.textContent = `Show ${Math.min(PAGE, matching.length - limit)} more`;
  }
  function clear() {
    form.reset();
    apply();
  }
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("clear").addEventListener("click", clear);
  more.addEventListener("click", () => {
    const next = matching[limit];
    limit += PAGE;
    draw();
    next?.strip.firstElementChild?.focus({ preventScroll: true });
  });

  // ---- Links to a token

  document.addEventListener("click", (event) => {
    const link = event.target instanceof Element ? event.target.closest("a.jump") : null;
    if (!link) return;
    event.preventDefault();
    history.replaceState(null, "", link.hash);
    const entry = cards.find((each) => `#${each.card.id}` === link.hash);
    const strip = entry.strip, token = strip.children[link.dataset.position - strip.dataset.begin] ?? strip.firstElementChild;
    if (!matching.includes(entry)) clear();
    limit = Math.max(limit, matching.indexOf(entry) + 1);
    draw();
    enter(token);
    token.scrollIntoView({ block: "center" });
    show(token);
  });
  form.hidden = false;
  if (choice) {
    choice.hidden = false;
    chooser.addEventListener("input", () => {
      compare();
      apply();
    });
  }
  compare();
  apply();
})();
