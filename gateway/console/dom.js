// Builds elements and formats numbers. Text is inserted as text nodes, never as markup.

export const $ = (id) => document.getElementById(id);

/** Return an element: `h("td.number", {title: "..."}, "text", child)`. Attributes that are undefined or false are left out. */
export function h(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const count = (value) => Math.round(value).toLocaleString("en-US").replaceAll(",", "\u202f");

/** Return milliseconds with about three digits. */
export const ms = (value) => (value >= 100 ? count(value) : value.toFixed(value >= 10 ? 1 : 2));

export const percent = (share) => `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)} %`;

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (value >= 1000 && power < units.length - 1) [value, power] = [value / 1000, power + 1];
  return `${power && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[power]}`;
}
