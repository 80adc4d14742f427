// A page that is served while its run goes on: it loads itself again when there is more, unless someone is using it.
(() => {
  const EVERY = 2000;
  const shown = document.body.dataset.version;
  const sign = document.createElement("button");
  let isLive = true, isNew = false;
  Object.assign(sign, { type: "button", id: "live" });
  sign.addEventListener("click", () => {
    if (isNew) location.reload();
    isLive = !isLive;
    say();
  });
  document.getElementById("theme").before(sign);
  say();
  setTimeout(ask, EVERY);

  function say(text) {
    sign.textContent = text ?? (isNew ? "Load new steps" : isLive ? "Live" : "Paused");
    sign.setAttribute("aria-pressed", String(isLive && !isNew));
  }
  function isInUse() {
    const active = document.activeElement;
    return active.matches("input:not([type=range]), select, .tokens *") || !getSelection().isCollapsed;
  }
  async function ask() {
    try {
      const answer = await fetch("/version", { cache: "no-store" });
      isNew = answer.ok && (await answer.text()) !== shown;
      if (isNew && isLive && !isInUse() && !document.hidden) location.reload();
      else say();
    } catch {
      say("Not followed any more");
    }
    setTimeout(ask, EVERY);
  }
})();
