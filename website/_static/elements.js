/** Make elements, tables and folds for the pages' scripts. Texts are never read as HTML. */

const SVG = ["svg", "circle", "path", "text"];

/** Return an element with attributes, and with children that are elements or texts. */
export function element(tag, attributes = {}, ...children) {
  const space = SVG.includes(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const made = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Return a table with a caption; its first column has the headers of the rows. */
export function tableOf(caption, columns, rows) {
  const line = ([first, ...cells]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...cells.map((cell) => element("td", {}, cell)));
  const head = element("tr", {}, ...columns.map((text) => element("th", { scope: "col" }, text)));
  const parts = [element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...rows.map(line))];
  return element("table", {}, ...parts);
}

/** Return content that is hidden until its summary is opened. */
export function fold(summary, ...content) {
  return element("details", {}, element("summary", {}, summary), ...content);
}
