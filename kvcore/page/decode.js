"use strict";
// The page's data, and what follows from it for one step. Nothing here touches the document.

const data = JSON.parse(document.getElementById("data").textContent);
const NUM_BLOCKS = data.num_blocks;
const UNKNOWN = -2;

function fromRuns(text) {
  const ids = [];
  for (const part of text.split(" ")) {
    if (!part) continue;
    const dash = part.indexOf("-");
    const first = Number(dash < 0 ? part : part.slice(0, dash));
    const last = dash < 0 ? first : Number(part.slice(dash + 1));
    const by = last < first ? -1 : 1;
    for (let id = first; id !== last + by; id += by) ids.push(id);
  }
  return ids;
}

function toRuns(ids) {
  const parts = [];
  for (let start = 0, stop; start < ids.length; start = stop) {
    stop = start + 1;
    const by = ids[stop] - ids[start];
    if (by === 1 || by === -1) while (stop < ids.length && ids[stop] - ids[stop - 1] === by) stop++;
    if (stop - start > 2) parts.push(`${ids[start]}–${ids[stop - 1]}`);
    else parts.push(...ids.slice(start, stop));
  }
  return parts.join(", ");
}

// A, B, ..., Z, A1, B1, ...: short enough for a cell. The request's own id stands beside it in the tables.
const keyOf = (request) => String.fromCharCode(65 + (request % 26)) + (request >= 26 ? Math.floor(request / 26) : "");
const nameOf = (request) => `${keyOf(request)} (${data.requests[request]})`;
const colourOf = (request) => `var(--r${request % 6})`;
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

const decoded = new Map();

function decodeStep(index) {
  if (decoded.has(index)) return decoded.get(index);
  const raw = data.steps[index];
  const step = { index, label: raw.label, queue: fromRuns(raw.queue), place: new Map(), holders: new Map(), node: new Map() };
  step.queue.forEach((id, place) => step.place.set(id, place));
  step.group = new Map();
  step.requests = raw.requests.map(([request, tokens, computed, tables]) => {
    const decodedTables = tables.map(fromRuns);
    decodedTables.forEach((table, group) => {
      for (const id of table) {
        if (!id) continue;
        if (!step.holders.has(id)) step.holders.set(id, []);
        step.holders.get(id).push(request);
        step.group.set(id, group);
      }
    });
    return { request, tokens, computed, tables: decodedTables };
  });
  const registered = fromRuns(raw.registered);
  const nodes = fromRuns(raw.nodes);
  registered.forEach((id, i) => {
    step.node.set(id, nodes[i]);
    step.group.set(id, data.nodes.group[nodes[i]]);
  });
  step.nodes = new Set(nodes);
  step.duplicates = new Set(fromRuns(raw.duplicates));
  step.references = new Map(raw.references); // of blocks held by someone who has no table: pins, mostly
  step.pinned = new Set(fromRuns(raw.pinned));
  if (decoded.size > 3) decoded.delete(decoded.keys().next().value);
  decoded.set(index, step);
  return step;
}

const firstUse = new Map(); // block to the first step in which it was held or cached
let searched = 0; // steps that are in it

function wasUsed(id, index) {
  for (; searched <= index; searched++) {
    const step = decodeStep(searched);
    for (const ids of [step.holders.keys(), step.references.keys(), step.node.keys()])
      for (const used of ids) if (!firstUse.has(used)) firstUse.set(used, searched);
  }
  return firstUse.get(id) <= index;
}

function stateOf(step, id) {
  if (id === 0) return "null";
  const references = step.references.get(id) ?? (step.holders.get(id) ?? []).length;
  if (references > 1) return "shared";
  if (references === 1) return "used";
  if (step.node.has(id)) return "cached";
  return wasUsed(id, step.index) ? "empty" : "new";
}

const NAMES = {
  null: ["∅", "null block, a placeholder"],
  used: ["A", "in use by one request, whose letter it shows"],
  shared: ["A B", "shared by several requests"],
  cached: ["◷", "cached and evictable, with its place in the queue"],
  empty: ["○", "free, and empty again"],
  new: ["·", "never used in the recorded steps"],
};

function tokensOf(step, id) {
  const node = step.node.get(id);
  if (node === undefined) return "";
  const position = data.nodes.position[node];
  if (position < 0) return "a prefix of unknown length";
  const size = data.groups[data.nodes.group[node]].block_size;
  return `tokens ${(position * size).toLocaleString("en")} to ${((position + 1) * size - 1).toLocaleString("en")}`;
}

// One block in words.
function describe(step, id) {
  const state = stateOf(step, id);
  const holders = (step.holders.get(id) ?? []).map(nameOf);
  const parts = [];
  if (state === "null") parts.push("null block, a placeholder");
  else if (state === "used") parts.push(holders.length ? `in use by ${holders[0]}` : "held, though it is in no block table");
  else if (state === "shared")
    parts.push(`shared by ${holders.length > 1 ? holders.join(" and ") : plural(step.references.get(id), "holder")}`);
  else if (state === "cached") parts.push("cached and evictable");
  else parts.push(state === "empty" ? "free, empty again" : "never used");
  if (step.pinned.has(id)) parts.push("pinned");
  if (step.place.has(id)) parts.push(`place ${step.place.get(id) + 1} of ${step.queue.length} in the queue`);
  if (step.node.has(id)) {
    parts.push(`holds ${tokensOf(step, id)}`);
    if (state !== "cached") parts.push("can be hit");
    if (step.duplicates.has(id)) parts.push("a copy: another block is found first");
  } else if (state === "used" || state === "shared") parts.push("cannot be hit yet");
  if (data.groups.length > 1 && step.group.has(id)) parts.push(`group ${step.group.get(id)}`);
  return `Block ${id}: ${parts.join("; ")}`;
}
