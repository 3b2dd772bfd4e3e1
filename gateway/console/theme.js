// Runs before the first paint, so that a chosen theme does not flash.
const kept = localStorage.getItem("theme");
if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
