// What stands below the grid: block tables, the queue, the prefix tree.

const MOST_CHIPS = 64; // blocks of a table that are shown one by one
const MOST_REQUESTS = 200;
const MOST_SEGMENTS = 200; // of the tree of a group

function chip(step, id) {
  const made = element("span", id || "null", { className: "chip" });
  made.dataset.state = stateOf(step, id);
  const holders = step.holders.get(id) ?? [];
  if (holders.length) made.style.setProperty("--request", colourOf(holders[0]));
  if (made.dataset.state === "shared") made.append(` ×${step.references.get(id) ?? holders.length}`);
  return made;
}

function showTables(step) {
  const box = document.getElementById("tables");
  if (!step.requests.length) return box.replaceChildren(element("p", "No request holds blocks."));
  const table = element("table");
  table.append(element("caption", "Blocks of each request, in the order of its tokens. × says how many requests hold a block."));
  const head = element("tr");
  for (const name of ["Request", "Tokens computed", "Group", "Blocks"]) head.append(element("th", name, { scope: "col" }));
  table.append(element("thead"));
  table.tHead.append(head);
  const body = element("tbody");
  for (const { request, tokens, computed, tables } of step.requests.slice(0, MOST_REQUESTS)) {
    tables.forEach((ids, group) => {
      const row = element("tr");
      if (!group) {
        row.append(element("th", nameOf(request), { scope: "row", rowSpan: tables.length }));
        row.append(element("td", `${computed.toLocaleString("en")} of ${tokens.toLocaleString("en")}`, { rowSpan: tables.length }));
      }
      row.append(element("td", `${group}: ${data.groups[group].text}`));
      const blocks = element("td");
      if (ids.length <= MOST_CHIPS) blocks.append(...ids.map((id) => chip(step, id)));
      else blocks.textContent = `${plural(ids.length, "block")}: ${toRuns(ids)}`;
      row.append(blocks);
      body.append(row);
    });
  }
  table.append(body);
  box.replaceChildren(table);
  if (step.requests.length > MOST_REQUESTS) box.append(element("p", `and ${step.requests.length - MOST_REQUESTS} more requests`));
}

function showQueue(step) {
  const { queue } = step;
  const shown = 40;
  let text = "No block is free.";
  if (queue.length > 2 * shown) {
    const left = (queue.length - 2 * shown).toLocaleString("en");
    text = `Overwritten next: ${toRuns(queue.slice(0, shown))}; then ${left} more; last: ${toRuns(queue.slice(-shown))}.`;
  } else if (queue.length) text = `In the order in which they will be overwritten: ${toRuns(queue)}.`;
  document.getElementById("queue").textContent = text;
}

// The registered blocks of a group as a tree of segments: stretches of a prefix that nothing branches off from and whose
// blocks are all in use by the same requests, or all free.
function segmentsOf(step, group) {
  const blocks = new Map(); // node to its blocks, the one that is found first in front
  for (const [id, node] of step.node) {
    if (data.nodes.group[node] !== group) continue;
    if (!blocks.has(node)) blocks.set(node, []);
    if (step.duplicates.has(id)) blocks.get(node).push(id);
    else blocks.get(node).unshift(id);
  }
  const children = new Map([[-1, []]]);
  for (const node of blocks.keys()) {
    const parent = blocks.has(data.nodes.parent[node]) ? data.nodes.parent[node] : -1;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(node);
  }
  const byBlock = (a, b) => data.nodes.position[a] - data.nodes.position[b] || blocks.get(a)[0] - blocks.get(b)[0];
  for (const list of children.values()) list.sort(byBlock);
  const holders = (node) => blocks.get(node).map((id) => (step.holders.get(id) ?? []).map(keyOf).join(" ")).join(" | ");
  return { blocks, children, holders };
}

function showTree(step) {
  const parts = [];
  data.groups.forEach((spec, group) => {
    if (data.groups.length > 1) parts.push(element("h3", `Group ${group}: ${spec.text}`));
    const { blocks, children, holders } = segmentsOf(step, group);
    if (!blocks.size) return parts.push(element("p", "Nothing is cached."));
    const root = element("ul");
    const known = (node) => data.nodes.position[node] >= 0;
    const strays = children.get(-1).filter((node) => !known(node)).flatMap((node) => blocks.get(node));
    const open = children.get(-1).filter(known).reverse().map((node) => [node, root]);
    let shown = 0;
    while (open.length && shown < MOST_SEGMENTS) {
      const [first, list] = open.pop();
      const nodes = [first];
      let next = children.get(first) ?? [];
      while (next.length === 1 && holders(next[0]) === holders(first)) {
        nodes.push(next[0]);
        next = children.get(next[0]) ?? [];
      }
      const item = element("li", segmentText(step, group, nodes, blocks));
      list.append(item);
      shown++;
      if (next.length) {
        const inner = element("ul");
        item.append(inner);
        for (const node of [...next].reverse()) open.push([node, inner]);
      }
    }
    parts.push(root);
    if (strays.length) parts.push(element("p", `Of prefixes that no request here has: ${plural(strays.length, "block")} ${toRuns(strays)}.`));
    if (open.length) parts.push(element("p", `Branches not shown: ${open.length}`));
  });
  document.getElementById("tree").replaceChildren(...parts);
}

function segmentText(step, group, nodes, blocks) {
  const size = data.groups[group].block_size;
  const first = data.nodes.position[nodes[0]];
  const number = (value) => value.toLocaleString("en");
  const tokens = `tokens ${number(first * size)} to ${number((first + nodes.length) * size - 1)}`;
  const ids = nodes.map((node) => blocks.get(node)[0]);
  const copies = nodes.flatMap((node) => blocks.get(node).slice(1));
  const users = [...new Set(nodes.flatMap((node) => blocks.get(node)).flatMap((id) => step.holders.get(id) ?? []))];
  let text = `${tokens}: ${ids.length > 1 ? "blocks" : "block"} ${toRuns(ids)}`;
  if (copies.length) text += ` (and copies ${toRuns(copies)})`;
  text += users.length ? `, in use by ${users.map(nameOf).join(" and ")}` : ", cached and evictable";
  if (first > 0 && !step.nodes.has(data.nodes.parent[nodes[0]])) text += "; what comes before it is not cached any more";
  return text;
}
