// The steps: which one is shown, and saying so.

const slider = document.getElementById("step");
let current = null;

function show(index) {
  const step = decodeStep(index);
  current = step;
  const changed = showPool(step);
  showLegend(step);
  showTables(step);
  showQueue(step);
  showTree(step);
  const total = data.steps.length;
  const held = NUM_BLOCKS - 1 - step.queue.length;
  const usage = `${held.toLocaleString("en")} of ${plural(NUM_BLOCKS - 1, "block")} in use`;
  const label = step.label ? `${step.label}. ` : "";
  const where = total > 1 ? `Step ${index + 1} of ${total}: ` : "";
  const news = index ? ` ${sayChanges(changed)}` : "";
  document.getElementById("status").textContent = `${where}${label}${usage}.${news}`;
  slider.value = index + 1;
  slider.setAttribute("aria-valuetext", `Step ${index + 1} of ${total}${step.label ? `: ${step.label}` : ""}`);
  document.getElementById("back").disabled = index === 0;
  document.getElementById("on").disabled = index === total - 1;
}

// Short enough to be listened to.
function sayChanges(changed) {
  if (!changed.length) return "No block changed.";
  if (PER_CELL > 1) return `${plural(changed.length, "cell")} changed.`;
  const runs = toRuns(changed);
  return runs.length > 60 ? `${plural(changed.length, "block")} changed.` : `Blocks changed: ${runs}.`;
}

function start() {
  const groups = data.groups.map((group, index) => `group ${index}: ${group.text}`).join("; ");
  document.getElementById("layout").textContent =
    `${plural(NUM_BLOCKS - 1, "block")} and the null block; ${groups}.` + (data.enable_caching ? "" : " Prefix caching is off.");
  makeGrid();
  slider.max = data.steps.length;
  document.getElementById("steps").hidden = data.steps.length === 1;
  slider.addEventListener("input", () => show(Number(slider.value) - 1));
  for (const [id, by] of [["back", -1], ["on", 1]]) {
    document.getElementById(id).addEventListener("click", () => {
      const target = current.index + by;
      if (target >= 0 && target < data.steps.length) show(target);
    });
  }
  show(0);
}

start();
