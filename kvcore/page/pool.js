// The grid: one cell a block, or one cell for several where a pool is large; and what the chosen cell holds.

const MOST_CELLS = 1024;
const MOST_ROWS = 200; // of the table of a cell that stands for many blocks
const PER_CELL = Math.ceil(NUM_BLOCKS / MOST_CELLS);
const NUM_CELLS = Math.ceil(NUM_BLOCKS / PER_CELL);
const LARGE = NUM_CELLS <= 96;
const COLUMNS = LARGE ? Math.min(12, Math.max(6, Math.ceil(Math.sqrt(NUM_CELLS * 1.6)))) : 32;

const grid = document.getElementById("grid");
const cells = [];
let chosen = 0;

function element(tag, text, properties = {}) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text; // never as HTML: request ids are the user's
  Object.assign(made, properties);
  return made;
}

function blocksOfCell(index) {
  const first = index * PER_CELL;
  return [first, Math.min(first + PER_CELL, NUM_BLOCKS)];
}

function makeGrid() {
  grid.className = LARGE ? "large" : "";
  grid.style.setProperty("--columns", COLUMNS);
  grid.style.setProperty("--cell", LARGE ? "4.2rem" : "1.9rem");
  grid.setAttribute("aria-colcount", COLUMNS);
  grid.setAttribute("aria-rowcount", Math.ceil(NUM_CELLS / COLUMNS));
  for (let first = 0; first < NUM_CELLS; first += COLUMNS) {
    const row = element("div", null, { className: "row" });
    row.setAttribute("role", "row");
    for (let index = first; index < Math.min(first + COLUMNS, NUM_CELLS); index++) {
      const cell = element("div", null, { className: "cell", tabIndex: index ? -1 : 0 });
      cell.setAttribute("role", "gridcell");
      cell.dataset.cell = index;
      row.append(cell);
      cells.push(cell);
    }
    grid.append(row);
  }
  if (PER_CELL > 1) {
    document.getElementById("grid-help").textContent =
      `The pool is large: a cell stands for ${PER_CELL} blocks in a row and shows how many percent of them requests ` +
      "hold; its lower part is as high as that share, the part above it as the cached ones. Arrow keys move from cell " +
      "to cell, Home and End to the ends of a row; below the grid are the blocks of the chosen cell.";
  }
  grid.addEventListener("keydown", moveInGrid);
  grid.addEventListener("focusin", (event) => choose(cells.indexOf(event.target.closest(".cell"))));
  grid.addEventListener("click", (event) => event.target.closest(".cell")?.focus());
}

function moveInGrid(event) {
  const start = chosen - (chosen % COLUMNS);
  const last = NUM_CELLS - 1;
  const target = {
    ArrowRight: chosen + 1,
    ArrowLeft: chosen - 1,
    ArrowDown: chosen + COLUMNS,
    ArrowUp: chosen - COLUMNS,
    Home: event.ctrlKey ? 0 : start,
    End: event.ctrlKey ? last : Math.min(start + COLUMNS - 1, last),
  }[event.key];
  if (target === undefined) return;
  event.preventDefault();
  if (target >= 0 && target <= last) cells[target].focus();
}

function choose(index) {
  if (index < 0) return;
  cells[chosen].tabIndex = -1;
  chosen = index;
  cells[chosen].tabIndex = 0;
  showDetails();
}

// Shows a step; answers with the cells that are not what they were one step before.
function showPool(step) {
  const before = step.index ? decodeStep(step.index - 1) : null;
  const changed = [];
  for (const [index, cell] of cells.entries()) {
    const [first, stop] = blocksOfCell(index);
    if (PER_CELL === 1) showBlock(cell, step, first);
    else showRange(cell, step, first, stop);
    const words = wordsOf(step, first, stop);
    const isChanged = before !== null && withoutPlace(words) !== withoutPlace(wordsOf(before, first, stop));
    cell.classList.toggle("changed", isChanged);
    cell.setAttribute("aria-label", isChanged ? `${words}; changed in this step` : words);
    if (isChanged) changed.push(index);
  }
  showDetails();
  return changed;
}

const wordsOf = (step, first, stop) => (PER_CELL === 1 ? describe(step, first) : describeRange(step, first, stop));

// Whenever a block leaves the queue, all behind it move up: that is no news of theirs.
const withoutPlace = (words) => words.replace(/; place \d+ of \d+ in the queue/, "");

function showBlock(cell, step, id) {
  const state = stateOf(step, id);
  const holders = step.holders.get(id) ?? [];
  cell.dataset.state = state;
  cell.style.setProperty("--request", holders.length ? colourOf(holders[0]) : "var(--r0)");
  let sign = NAMES[state][0];
  if (state === "used" || state === "shared") {
    const keys = holders.map(keyOf);
    if (step.pinned.has(id)) keys.push(LARGE ? "pin" : "!");
    sign = keys.length > 3 ? `×${keys.length}` : keys.join(LARGE ? " " : "") || "?";
  } else if (step.place.has(id) && LARGE) sign += ` ${step.place.get(id) + 1}.`;
  const lines = [element("span", sign)];
  if (LARGE) {
    lines.unshift(element("b", id));
    const position = step.node.has(id) ? data.nodes.position[step.node.get(id)] : -1;
    const size = step.group.has(id) ? data.groups[step.group.get(id)].block_size : 0;
    if (position >= 0) lines.push(element("span", `${position * size}–${(position + 1) * size - 1}`));
  }
  cell.replaceChildren(...lines);
}

function countStates(step, first, stop) {
  const counts = {};
  for (let id = first; id < stop; id++) {
    const state = stateOf(step, id);
    counts[state] = (counts[state] ?? 0) + 1;
  }
  return counts;
}

function showRange(cell, step, first, stop) {
  const counts = countStates(step, first, stop);
  const percent = (count) => Math.round((100 * count) / (stop - first));
  const held = (counts.used ?? 0) + (counts.shared ?? 0);
  cell.dataset.state = "mixed";
  cell.style.setProperty("--held", `${percent(held)}%`);
  cell.style.setProperty("--kept", `${percent(held + (counts.cached ?? 0))}%`);
  cell.textContent = held && !percent(held) ? "<1" : percent(held);
}

const SHORT = {
  null: "the null block",
  used: "in use",
  shared: "shared",
  cached: "cached and evictable",
  empty: "free, empty again",
  new: "never used",
};

function describeRange(step, first, stop) {
  const counts = countStates(step, first, stop);
  const parts = Object.keys(SHORT).filter((state) => counts[state]).map((state) => `${counts[state]} ${SHORT[state]}`);
  return `Blocks ${first} to ${stop - 1}: ${parts.join(", ")}`;
}

function showDetails() {
  const step = current;
  const details = document.getElementById("details");
  const [first, stop] = blocksOfCell(chosen);
  const lines = [];
  for (let id = first; id < Math.min(stop, first + MOST_ROWS); id++) lines.push(element("li", describe(step, id)));
  if (stop - first === 1) return details.replaceChildren(element("p", lines[0].textContent));
  if (stop - first > MOST_ROWS) lines.push(element("li", `and ${stop - first - MOST_ROWS} more`));
  const list = element("ul");
  list.append(...lines);
  const more = element("details");
  more.open = details.querySelector("details")?.open ?? false;
  more.append(element("summary", `${describeRange(step, first, stop)}. One by one`), list);
  details.replaceChildren(more);
}

function showLegend(step) {
  const counts = countStates(step, 0, NUM_BLOCKS);
  const items = Object.entries(NAMES).map(([state, [sign, words]]) => {
    const item = element("li");
    const sample = element("span", sign, { className: "sample" });
    sample.dataset.state = state;
    sample.setAttribute("aria-hidden", "true");
    item.append(sample, element("span", `${(counts[state] ?? 0).toLocaleString("en")} ${words}`));
    return item;
  });
  document.getElementById("legend").replaceChildren(...items);
}
