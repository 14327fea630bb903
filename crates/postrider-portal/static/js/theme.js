// Runs before anything is drawn, so that a page never flashes in the other colours. A classic script, since
// modules wait for the document.
"use strict";
try {
  const theme = localStorage.getItem("postrider.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden; then the system's choice holds.
}
