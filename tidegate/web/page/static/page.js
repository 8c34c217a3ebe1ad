// Keeps the part of the page with the id "live" as young as its job, with the help of htmx.
// Rules:
// - One request at a time. The next one is made after a pause, which is longer where the server is slow.
// - A failure doubles the pause, up to a minute, and the page says that it is not young any more.
// - A page that nobody sees asks for nothing. When it is seen again it asks at once.
// - When the job is over, nothing changes any more: the page stops asking.
"use strict";
(() => {
  const PAUSE_MS = 2_000;
  const PAUSE_MAX_MS = 60_000;
  const TIMES_SLOWER = 10;
  let pause = PAUSE_MS;
  let timer = 0;
  let asked = 0;
  let failures = 0;

  const live = () => document.getElementById("live");

  function say(text, lost) {
    const place = document.getElementById("connection");
    if (place.textContent !== text) place.textContent = text;
    place.classList.toggle("lost", lost);
  }

  function plan(ms) {
    clearTimeout(timer);
    if (!document.hidden && live()) timer = setTimeout(ask, ms);
  }

  function ask() {
    asked = performance.now();
    htmx.trigger(live(), "refresh");
  }

  function answered(event) {
    if (event.detail.ctx.response.status >= 400) return; // htmx says so for answers that it does not show, too
    failures = 0;
    pause = Math.min(PAUSE_MAX_MS, Math.max(PAUSE_MS, TIMES_SLOWER * (performance.now() - asked)));
    document.title = live().dataset.title;
    if (live().dataset.over === "yes") {
      say("over", false);
    } else {
      say("live", false);
      plan(pause);
    }
  }

  function failed(why) {
    failures += 1;
    pause = Math.min(PAUSE_MAX_MS, PAUSE_MS * 2 ** failures);
    say(`${why}, asking again in ${Math.round(pause / 1_000)} s`, true);
    plan(pause);
  }

  document.addEventListener("htmx:before:response", (event) => {
    // Whoever has to say the token first is led elsewhere: the browser has to go there, not a part of this page.
    if (!event.detail.ctx.response.raw.redirected) return;
    event.preventDefault();
    location.reload();
  });
  document.addEventListener("htmx:after:swap", answered);
  document.addEventListener("htmx:response:error", (event) => failed(`answer ${event.detail.ctx.response.status}`));
  document.addEventListener("htmx:error", () => failed("no connection"));
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!document.hidden && live()?.dataset.over === "no") ask();
  });
  document.addEventListener("DOMContentLoaded", () => {
    if (!live()) return;
    if (live().dataset.over === "yes") {
      say("over", false);
    } else {
      say("live", false);
      plan(PAUSE_MS);
    }
  });
})();
