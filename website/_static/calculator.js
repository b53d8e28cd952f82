/** The page that answers whether a training fits a card: its controls, and the parts of its answer. */

import { nearest } from "./configs.js";
import { element, fold, tableOf } from "./elements.js";
import { LENGTH_UNIT } from "./events.js";
import { breakdown, largest, memoryOf, timeline } from "./memory.js";
import { operationText } from "./operations.js";

const TABLES = new URL("tables/", import.meta.url);
const LABELS = {
  model: "Model",
  method: "Method",
  precision: "Precision",
  optimizer: "Optimizer",
  checkpointing: "Gradient checkpointing",
  accumulation: "Gradient accumulation steps",
  batch: "Micro-batch",
  length: "Tokens per sequence",
  card: "Card",
  segments: "Allocator",
};
const WORDS = {
  full: "train all weights",
  lora: "LoRA, rank 16",
  qlora: "QLoRA, rank 16, 4-bit weights",
  fp32: "fp32",
  fp16: "fp16 autocast, fp32 weights",
  bf16: "bf16 autocast, fp32 weights",
  "bf16-weights": "bf16 weights",
  adamw: "AdamW",
  "adamw-8bit": "8-bit AdamW",
  adafactor: "Adafactor",
  sgd: "SGD",
  default: "usual segments",
  expandable: "expandable segments",
};
const QUESTIONS = ["method", "precision", "optimizer", "checkpointing", "accumulation"];
const SEGMENTS = ["default", "expandable"];
const LETTER = 8; // pixels of one letter in the names of the cards' lines
const LINES = " Dotted lines: the memory that torch can use of cards sold with this size.";
const TOO_THIN = 0.002; // pictures leave out a category whose share of the peak never exceeds this
const FITS = { yes: "Fits", no: "Does not fit", edge: "May not fit" };
const SIGNS = { yes: "✓", no: "✗", edge: "?" };

const part = (name) => document.getElementById(`calculator-${name}`);
const byName = (one, other) => one.localeCompare(other, "en", { numeric: true });
const sum = (sizes) => sizes.reduce((one, other) => one + other, 0);
const percent = (share) => `${(100 * share).toFixed(3)}%`;

// By digits after the point. They are kept, because making a formatter is slow.
const numbers = [0, 1, 2].map(
  (digits) => new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }),
);

/** Format bytes in a readable binary unit, as for the memory of cards: `trainmem.texts.bytes_text(size, binary=True)`. */
function bytesText(size) {
  const units = [[2 ** 30, "GiB", 2], [2 ** 20, "MiB", 1], [2 ** 10, "KiB", 1]];
  const [scale, unit, digits] = units.find(([least]) => Math.abs(size) >= least) ?? [1, "B", 0];
  return `${numbers[digits].format(size / scale)} ${unit}`;
}

const signedText = (size) => (size ? `${size > 0 ? "+" : "−"}${bytesText(Math.abs(size))}` : "the same");

class Calculator {
  constructor(index) {
    this.index = index;
    this.categories = index.categories;
    this.cards = new Map(index.cards.map((card) => [card.key, card]));
    this.cardsByName = [...index.cards].sort((one, other) => byName(one.name, other.name));
    this.tables = new Map(); // promises of recipes' tables, by their addresses
    this.turn = 0; // number of changes so far; work for an earlier change is abandoned
    this.controls = {};
    for (const name of Object.keys(LABELS)) this._addControl(name);
    part("config").addEventListener("input", (event) => this._paste(event.target.value));
    this.read(new URLSearchParams(location.hash.slice(1)));
    let width = innerWidth;
    addEventListener("resize", () => {
      if (width !== innerWidth) this.update(); // there may be room for other names
      width = innerWidth;
    });
    addEventListener("hashchange", () => {
      this.read(new URLSearchParams(location.hash.slice(1)));
      this.update();
    });
  }

  _addControl(name) {
    const isNumber = name === "batch" || name === "length";
    const control = element(isNumber ? "input" : "select", { id: `choice-${name}`, name });
    if (isNumber) {
      control.type = "number";
      control.min = control.step = name === "batch" ? 1 : LENGTH_UNIT;
    }
    control.addEventListener("change", () => this.update());
    this.controls[name] = control;
    const label = element("label", { for: control.id }, LABELS[name]);
    part("choice").append(element("div", {}, label, control));
  }

  _offer(name, options, wanted) {
    const control = this.controls[name];
    if (String([...control.options].map(({ value }) => value)) !== String(options.map(([value]) => value))) {
      control.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
    }
    control.value = options.some(([value]) => value === wanted) ? wanted : options[0][0];
  }

  /** Set the controls to the choice in the page's address; a value that is not on offer is replaced by one that is. */
  read(wanted) {
    const { models } = this.index;
    const names = Object.keys(models).sort(byName);
    this._offer("model", names.map((name) => [name, name]), wanted.get("model") ?? Object.keys(models)[0]);
    const model = models[this.controls.model.value];
    const keys = Object.keys(model.recipes).map((key) => key.split("."));
    QUESTIONS.forEach((name, place) => {
      const known = Object.keys(this.index.questions[name]).filter((value) => keys.some((key) => key[place] === value));
      this._offer(name, known.map((value) => [value, WORDS[value] ?? value]), wanted.get(name));
    });
    this._offer("card", this.cardsByName.map(({ key, name }) => [key, name]), wanted.get("card") ?? "4090");
    this._offer("segments", SEGMENTS.map((name) => [name, WORDS[name]]), wanted.get("segments"));
    for (const [name, most, usual] of [["batch", model.most, 8], ["length", model.longest, 512]]) {
      const control = this.controls[name];
      control.max = most;
      const [given, unit] = [Number(wanted.get(name)) || usual, Number(control.step)];
      control.value = Math.min(Math.max(Math.round(given / unit), 1) * unit, most);
    }
  }

  /** Choose the model that a config.json describes, or name the nearest one. */
  _paste(text) {
    const say = (...words) => part("pasted").replaceChildren(...(text.trim() ? words : []));
    let found;
    try {
      found = nearest(text, this.index.models);
    } catch (error) {
      return say(`This is not the config.json of a model on this page: ${error.message}.`);
    }
    const [name, differs] = found;
    if (differs.length) {
      const fields = differs.map(([field, there, here]) => `${field} (${there}, not ${here})`).join(", ");
      const ask = element("code", {}, this.command({ ...this.choice, model: "config.json" }));
      return say(`This page has no table of that model. The nearest is ${name}; it differs in ${fields}. For an answer, run: `, ask);
    }
    this.controls.model.value = name;
    this.update();
    return say(`In memory this is the same as ${name}, which is now chosen above.`);
  }

  /** Return the current choice by the names of the controls. */
  get choice() {
    return Object.fromEntries(Object.entries(this.controls).map(([name, control]) => [name, control.value]));
  }

  /** Return the name of the table of a choice. */
  key(choice) {
    const kernels = choice.precision === "fp32" ? "any" : this.index.kernels[this.cards.get(choice.card).capability[0]];
    return [...QUESTIONS.map((name) => choice[name]), kernels].join(".");
  }

  /** Return the versions of the libraries with which the table of a choice was made: {name: version or null}. */
  versions(choice) {
    return this.index.versions[this.index.models[choice.model].recipes[this.key(choice)]];
  }

  /** Return the content of a recipe's table; null if there is none for this card. */
  async recipe(choice) {
    const key = this.key(choice);
    if (!(key in this.index.models[choice.model].recipes)) return null;
    const address = new URL(`${choice.model}/${key}.json.gz`, TABLES).href;
    if (!this.tables.has(address)) this.tables.set(address, fetched(address));
    return this.tables.get(address);
  }

  memory(recipe, choice) {
    const [batch, length] = [choice.batch, choice.length].map(Number);
    const sizes = { batch, length, expandable: choice.segments === "expandable" };
    return memoryOf(recipe, sizes, this.cards.get(choice.card));
  }

  /** Show the answer to the current choice at once, and the parts that need further calculations afterwards. */
  async update() {
    const turn = ++this.turn;
    this.read(new URLSearchParams(this.choice));
    const choice = this.choice;
    const address = `#${new URLSearchParams(choice)}`;
    const recipe = await this.recipe(choice);
    if (turn !== this.turn) return;
    part("answer").hidden = recipe === null;
    part("state").hidden = recipe !== null;
    if (recipe === null) {
      history.replaceState(null, "", address);
      const { name } = this.cards.get(choice.card);
      part("state").textContent = `This page has no table of this recipe for the ${name}. Choose another precision or card.`;
      return;
    }
    const memory = this.memory(recipe, choice);
    this._show(choice, memory);
    const { peakBytes: peak, reservedBytes: reserved, fits } = memory;
    Object.assign(part("answer").dataset, { peak, reserved, fits, choice: address, done: "answer" });
    const goesOn = async () => {
      await new Promise((resolve) => setTimeout(resolve)); // let the page handle the visitor's input first
      if (turn !== this.turn) throw new Superseded();
    };
    await new Promise((resolve) => requestAnimationFrame(resolve)); // the answer is painted before all else
    try {
      await goesOn();
      history.replaceState(null, "", address); // takes as long as the answer
      for (const show of [this._showLargest, this._showSwitches, this._showCards]) {
        await show.call(this, choice, recipe, memory, goesOn);
      }
      part("answer").dataset.done = "all";
    } catch (error) {
      if (!(error instanceof Superseded)) throw error;
    }
  }

  _show(choice, memory) {
    const card = this.cards.get(choice.card);
    const there = `torch can use ${bytesText(card.memory)} of this card, ${bytesText(card.limit)} with a safety margin`;
    const context = `including ${bytesText(card.context)} assumed for the CUDA context`;
    const verdict = part("verdict");
    const needed = `the training needs ${bytesText(memory.neededBytes)} (${context})`;
    const answer = `${SIGNS[memory.fits]} ${FITS[memory.fits]} the ${card.name}`;
    verdict.textContent = `${answer}: ${needed}, and ${there}. ${this._weights(choice)}`;
    verdict.dataset.fits = memory.fits;
    this._showPeak(card, memory);
    this._showTimeline(memory);
    this._showFormulas(choice, memory);
    const isOf = (row) => row.textContent.toLowerCase().includes(choice.model);
    const measured = part("published").querySelector("tbody"); // the chosen model's come first
    measured.append(...[...measured.rows].sort((one, other) => isOf(other) - isOf(one)));
    this._showCommands(choice);
    const versions = Object.entries(this.versions(choice)).filter(([, version]) => version);
    const made = versions.map(([name, version]) => `${name} ${version}`).join(", ");
    part("versions").textContent = `This choice was traced with ${made}. Other versions may take some MB more or less.`;
  }

  /** Return the type of the chosen weights, and the type of the published model, in which `from_pretrained` loads it. */
  _weights(choice) {
    const { dtype } = this.index.questions.precision[choice.precision];
    const published = this.index.models[choice.model].dtype;
    const chosen = choice.method === "qlora" ? `in 4 bits, the rest loaded in ${dtype}` : `in ${dtype}`;
    return `Weights ${chosen}${dtype === published ? "" : `; ${choice.model} is published in ${published}`}.`;
  }

  _swatch(category) {
    return element("span", { class: "calculator-swatch", style: `background:${this.categories[category][1]}` });
  }

  _showPeak(card, memory) {
    const { parts, phase, operation, module } = breakdown(memory, this.categories.length);
    part("answer").dataset.parts = JSON.stringify(parts);
    const end = 1.08 * Math.max(memory.neededBytes, Math.min(card.memory, 8 * memory.neededBytes));
    const shown = [...parts.keys()].filter((category) => parts[category] > 0);
    const words = shown.map((category) => `${this.categories[category][0]} ${bytesText(parts[category])}`);
    const name = operationText(operation);
    const step = name === operation ? [name] : hinted("span", { class: "calculator-term", role: "note" }, name, operation);
    const pieces = [
      ...shown.map((category) => [parts[category], this.categories[category][1], words[shown.indexOf(category)]]),
      [memory.neededBytes - card.context - memory.peakBytes, "var(--calculator-cached)", "reserved, not in use"],
      [card.context, "var(--calculator-context)", "CUDA context"],
    ];
    const fill = pieces.map(([size, colour, title]) =>
      element("div", { style: `width:${percent(size / end)};background:${colour}`, title }),
    );
    const label = `Peak ${bytesText(memory.peakBytes)}: ${words.join(", ")}`;
    const filled = element("div", { class: "calculator-fill", role: "img", "aria-label": label }, ...fill);
    const bar = element("div", { class: "calculator-bar" }, filled, ...this._lines(card, end));
    const rest = [
      [element("span", { class: "calculator-swatch calculator-cached" }), "reserved, not in use", pieces.at(-2)[0]],
      [element("span", { class: "calculator-swatch calculator-context" }), "CUDA context, assumed", card.context],
    ];
    const own = shown.map((category) => [this._swatch(category), this.categories[category][0], parts[category]]);
    const about = element("p", { class: "calculator-about" }, `At the peak ${bytesText(memory.peakBytes)} are in use. It is in the ${phase}, at this `);
    const reserved = `The allocator reserves at most ${bytesText(memory.reservedBytes)}.`;
    about.append("operation: ", ...step, module ? ` (module ${module}). ` : ". ", reserved, LINES);
    const legend = [...own, ...rest].map(([swatch, name, size]) => {
      return element("li", {}, swatch.cloneNode(), ` ${name} ${bytesText(size)}`);
    });
    const table = tableOf(
      "What is in memory at the peak",
      ["what", "size", "bytes"],
      [...own, ...rest].map(([swatch, name, size]) => {
        return [element("span", {}, swatch, ` ${name}`), bytesText(size), numbers[0].format(size)];
      }),
    );
    part("peak").replaceChildren(bar, element("ul", { class: "calculator-legend" }, ...legend), about, table);
  }

  /**
   * Draw the cards' memory as lines across a bar that ends at so many bytes: the chosen card's, and a dotted line for
   * each size in which cards are sold, at the least that torch can use of them. On hover and focus a line names its
   * cards.
   */
  _lines(chosen, end) {
    const bySize = new Map();
    for (const card of [...this.cards.values()].sort((one, other) => one.memory - other.memory)) {
      if (card.memory > end) break;
      const [size] = /\d+ GiB$/.exec(card.name);
      bySize.set(size, [...(bySize.get(size) ?? []), card]);
    }
    const sold = [...bySize].map(([size, cards]) => [size, cards[0].memory / end, cards]);
    const lines = chosen.memory > end ? [] : [[chosen.name, chosen.memory / end, [chosen]]];
    lines.push(...sold.sort(([, one], [, other]) => other - one)); // the largest gets its name first
    const width = part("peak").clientWidth;
    const taken = []; // [left, right] of each name, in pixels
    return lines.flatMap(([name, place, cards], number) => {
      const isChosen = cards[0] === chosen && number === 0;
      const list = cards.map((card) => `${card.name}: ${bytesText(card.memory)}`);
      const text = isChosen ? `${list[0]}, the chosen card` : `Cards sold with ${name}. ${list.join("; ")}`;
      const side = place > 0.8 ? "right" : place < 0.2 ? "left" : "middle";
      const kind = isChosen ? " chosen" : "";
      const style = `left:${percent(place)}`;
      const line = hinted("div", { class: `calculator-line${kind}`, role: "img", style }, "", text);
      const share = { left: 0, middle: 0.5, right: 1 }[side];
      const first = place * width - share * LETTER * name.length;
      const last = first + LETTER * name.length;
      if (taken.some(([from, to]) => first < to && from < last)) return line;
      taken.push([first, last]);
      return [...line, element("span", { class: `calculator-name ${side}`, style, "aria-hidden": "true" }, name)];
    });
  }

  _showTimeline(memory) {
    const { parts, phases, peak } = timeline(memory, this.categories.length);
    const totals = parts.map(sum);
    const top = Math.max(...totals);
    const isSeen = (category) => parts.some((each) => each[category] > TOO_THIN * top);
    const seen = [...this.categories.keys()].filter(isSeen);
    const heights = new Array(parts.length).fill(0);
    const paths = seen.map((category) => {
      parts.forEach((each, place) => (heights[place] += Math.max(each[category], 0)));
      const stairs = heights.map((height, place) => `V${(1000 - (870 * height) / top).toFixed(1)}H${place + 1}`);
      return `<path d="M0 1000${stairs.join("")}V1000Z" fill="${this.categories[category][1]}"/>`;
    });
    const edges = phases.flatMap((phase, place) => (place && phase !== phases[place - 1] ? [place] : []));
    const ranges = [0, ...edges].map((first, place) => [phases[first], first, edges[place] ?? phases.length]);
    const marks = edges.map((edge) => `<path d="M${edge} 0V1000" class="calculator-edge"/>`).join("");
    const picture = element("div", { class: "calculator-timeline", role: "img" });
    const at = `peak ${bytesText(top)} in the ${phases[peak]}`;
    picture.setAttribute("aria-label", `Bytes in use through the step with the peak, by category: ${at}.`);
    const box = `viewBox="0 0 ${parts.length} 1000" preserveAspectRatio="none" aria-hidden="true"`;
    picture.innerHTML = `<svg ${box}>${paths.reverse().join("")}${marks}</svg>`;
    for (const [phase, first, last] of ranges.filter(([, first, last]) => last - first > 0.12 * parts.length)) {
      const style = `left:${percent((first + last) / 2 / parts.length)}`;
      picture.append(element("span", { class: "calculator-phase", style }, phase));
    }
    const place = (peak + 0.5) / parts.length;
    const side = place > 0.5 ? "right" : "left";
    const text = side === "right" ? `peak ${bytesText(top)} ▼` : `▼ peak ${bytesText(top)}`;
    picture.append(element("span", { class: `calculator-top ${side}`, style: `left:${percent(place)}` }, text));
    const named = (category) => [this._swatch(category), ` ${this.categories[category][0]}`];
    const legend = seen.map((category) => element("li", {}, ...named(category)));
    part("timeline").replaceChildren(picture, element("ul", { class: "calculator-legend" }, ...legend));
  }

  _showFormulas(choice, memory) {
    const { formulas } = this.index.models[choice.model];
    const off = (size) => {
      const share = size / memory.neededBytes - 1;
      return `${share > 0 ? "+" : "−"}${Math.abs(100 * share).toFixed(0)} %`;
    };
    const sizes = Object.entries(formulas).map(([name, said]) => [name, said[choice.precision]]);
    const rows = sizes.map(([name, size]) => [name, bytesText(size), off(size)]);
    const caption = "These formulas use the number of parameters alone, not the batch or the length.";
    const own = ["this page", bytesText(memory.neededBytes), ""];
    part("formulas").replaceChildren(tableOf(caption, ["source", "estimate", "compared with this page"], [own, ...rows]));
  }

  /** Return the training arguments of a choice. */
  arguments(choice) {
    const answers = QUESTIONS.map((name) => this.index.questions[name][choice[name]]);
    return Object.assign({ per_device_train_batch_size: Number(choice.batch) }, ...answers);
  }

  /** Return the command that answers a choice. */
  command(choice) {
    const words = [`perf-helpers estimate --model ${choice.model} --seq-len ${choice.length} --card ${choice.card}`];
    const samples = 4 * Number(choice.batch) * Number(choice.accumulation);
    if (samples > 512) words.push(`--dataset-size ${samples}`);
    if (choice.segments === "expandable") words.push("--allocator-settings expandable_segments:True");
    const made = choice.model in this.index.models && this.versions(choice); // a pasted config.json has no table
    if (made) words.push(`--torch ${made.torch.split(".", 2).join(".")}`);
    for (const [name, value] of Object.entries(this.arguments(choice))) {
      const text = typeof value === "object" ? `'${JSON.stringify(value)}'` : value;
      words.push(value === true ? `--${name}` : `--${name} ${text}`);
    }
    return words.join(" ");
  }

  _showCommands(choice) {
    const json = JSON.stringify(this.arguments(choice), null, 2);
    const blocks = [["Check this answer with this command", this.command(choice)], ["The training arguments", json]];
    const shown = blocks.map(([title, text]) => {
      const copy = element("button", { type: "button", "aria-label": `Copy: ${title}` }, "Copy");
      copy.addEventListener("click", async () => {
        await navigator.clipboard.writeText(text);
        copy.textContent = "Copied";
      });
      const code = element("pre", { tabindex: "0", role: "region", "aria-label": title }, element("code", {}, text));
      return element("div", {}, element("div", { class: "calculator-title" }, title, " ", copy), code);
    });
    part("commands").replaceChildren(...shown);
  }

  async _showLargest(choice, recipe, memory, goesOn) {
    const model = this.index.models[choice.model];
    const fits = (changes) => this.memory(recipe, { ...choice, ...changes }).fits === "yes";
    const batch = await largest(model.most, (size) => fits({ batch: size }), goesOn);
    const units = model.longest / LENGTH_UNIT;
    const length = (await largest(units, (count) => fits({ length: count * LENGTH_UNIT }), goesOn)) * LENGTH_UNIT;
    const end = (found, most) => (found === most ? " (this page's maximum)" : "");
    const ofBatch = batch ? `the largest micro-batch is ${batch}${end(batch, model.most)}` : "no micro-batch fits";
    const ofLength = length ? `the longest is ${length} tokens${end(length, model.longest)}` : `not even ${LENGTH_UNIT} tokens fit`;
    part("answer").dataset.largest = `${batch} ${length}`;
    part("largest").textContent =
      `For sequences of ${choice.length} tokens ${ofBatch}. For a micro-batch of ${choice.batch} ${ofLength}.`;
  }

  async _showSwitches(choice, recipe, memory, goesOn) {
    const rows = [];
    for (const name of [...QUESTIONS, "segments"]) {
      const others = [...this.controls[name].options].filter(({ value }) => value !== choice[name]);
      for (const { value, text } of others) {
        const other = { ...choice, [name]: value };
        const changed = await this.recipe(other);
        await goesOn();
        if (changed === null) continue;
        const there = this.memory(changed, other);
        const button = element("button", { type: "button" }, `${LABELS[name]}: ${text}`);
        button.addEventListener("click", () => {
          this.controls[name].value = value;
          this.controls[name].focus();
          this.update();
        });
        const price = signedText(there.neededBytes - memory.neededBytes);
        rows.push([button, price, `${SIGNS[there.fits]} ${bytesText(there.neededBytes)}`]);
      }
    }
    const caption = "Each row changes one setting of the choice above. Press a button to choose it.";
    part("switches").replaceChildren(tableOf(caption, ["setting", "difference", "needs"], rows));
  }

  async _showCards(choice, recipe, memory, goesOn) {
    const rows = [];
    for (const card of [...this.cards.values()].sort((one, other) => one.memory - other.memory)) {
      const other = { ...choice, card: card.key };
      const there = await this.recipe(other);
      if (there === null) continue;
      await goesOn();
      const { fits, neededBytes } = this.memory(there, other);
      rows.push([card.name, bytesText(card.limit), `${SIGNS[fits]} ${bytesText(neededBytes)}`]);
    }
    const table = tableOf("Each card with its own kernels and workspaces", ["card", "usable", "needs"], rows);
    const opened = part("cards").querySelector("details")?.open ?? false;
    const held = rows.filter((row) => row[2].startsWith(SIGNS.yes)).length;
    const folded = fold(`It fits ${held} of ${rows.length} cards`, table);
    folded.open = opened;
    part("cards").replaceChildren(folded);
  }
}

/** Return an element followed by a hint, which is shown on hover and focus until Escape is pressed. */
function hinted(tag, attributes, text, hint) {
  const label = text ? `${text} (${hint})` : hint;
  const own = { ...attributes, class: `calculator-hinted ${attributes.class ?? ""}`, tabindex: "0", "aria-label": label };
  const made = element(tag, own, text);
  made.addEventListener("keydown", ({ key }) => key === "Escape" && made.blur());
  return [made, element("span", { class: "calculator-hint", "aria-hidden": "true" }, hint)];
}

/** Thrown if the visitor has made another choice meanwhile. */
class Superseded extends Error {}

async function fetched(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(`${address}: ${response.status}`);
  const isPlain = response.headers.get("content-encoding") === "gzip"; // if the server says so, the browser unpacks it
  const body = isPlain ? response.body : response.body.pipeThrough(new DecompressionStream("gzip"));
  return new Response(body).json();
}

async function begin() {
  const response = await fetch(new URL("index.json", TABLES));
  const calculator = new Calculator(await response.json());
  part("choice").hidden = false;
  await calculator.update();
}

begin().catch((error) => {
  part("state").hidden = false;
  part("state").textContent = `The tables cannot be read: ${error.message}`;
});
