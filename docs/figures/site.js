// A wide table scrolls sideways: it must be reachable by keyboard.
window.addEventListener("load", () => {
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap")) wide.tabIndex = 0;
});
