// Set light or dark before the first paint: a plain script in the head, because a module would run
// later. "auto" follows the system; a choice is stored in this browser.
(function () {
  "use strict";
  let kept = null;
  try {
    kept = localStorage.getItem("sluice.theme");
  } catch {
    // Storage may be forbidden: then the system decides.
  }
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
})();
