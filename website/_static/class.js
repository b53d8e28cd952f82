/**
 * The class's page: read the files of the learners' courses, and count their guesses, answers and verdicts.
 *
 * The files are not trusted. Their contents become texts, which load nothing, and keys of Maps, never of objects; only
 * the fields that are counted are kept. A guess counts by the rule of perf_helpers/course/learner_log.py: its line must
 * be above the line that revealed the measurement.
 */

import { element, fold, tableOf } from "./elements.js";

const MOST = { bytes: 20e6, entries: 5000, claims: 2000 }; // limits per file; a whole course makes 3 MB, about 200 and 200
const UNTESTED = "not testable here";
const UNKNOWN_MACHINE = "machine not known";
const OTHER = "no journal, results.json or saved class";
const STATUSES = ["not attempted", "wrong", "right"]; // of an exercise, the best last

const isText = (value) => typeof value === "string";
const isNumber = (value) => Number.isFinite(value) && Math.abs(value) < 1e15;
const isObject = (value) => typeof value === "object" && value !== null;

// The fields of an entry of each kind.
const KINDS = {
  guess: { guess: isNumber, unit: isText },
  revealed: { measured: isNumber, unit: isText },
  question: {
    choice: (value) => value === null || isText(value),
    right: (value) => value === null || typeof value === "boolean",
  },
  exercise: { status: (value) => STATUSES.includes(value) },
  finished: { claims: (value) => isObject(value) && Object.values(value).every(isText) },
  board: {},
};

// ---- reading files

/** Parse JSON as Python writes it: NaN and infinities, which JSON lacks, become null. Undefined if it is damaged. */
function parsed(text) {
  const known = (part) => (part[0] === '"' ? part : "null");
  const stringOrNumber = /"(?:[^"\\]|\\[^])*"?|-?(?:NaN|Infinity)/g; // also a string without an end, so that it is scanned only once
  try {
    return JSON.parse(/NaN|Infinity/.test(text) ? text.replace(stringOrNumber, known) : text);
  } catch {
    return undefined;
  }
}

/** Return an entry of a journal with the fields that are counted; null if it is not an entry. */
function entryOf(value) {
  const fields = isObject(value) && Object.hasOwn(KINDS, value.kind) ? Object.entries(KINDS[value.kind]) : null;
  if (!fields || ![value.lesson, value.key, value.date].every(isText) || !isObject(value.content)) return null;
  if (!fields.every(([name, isValid]) => isValid(value.content[name]))) return null;
  const content = Object.fromEntries(fields.map(([name]) => [name, value.content[name]]));
  return { kind: value.kind, lesson: value.lesson, key: value.key, content, date: value.date };
}

function isAnswer({ kind, content }) {
  return kind === "guess" || isText(content.choice) || ["wrong", "right"].includes(content.status);
}

function journal(learner, values) {
  if (values.length > MOST.entries) throw new Error(`too large: more than ${MOST.entries} lines`);
  const entries = values.map(entryOf).filter(Boolean);
  if (!entries.length) throw new Error(values.some((value) => value?.task) ? OTHER : "damaged: no line can be read");
  const damaged = values.length - entries.length;
  return { learner, kind: "journal", date: entries.at(-1).date, isAnswered: entries.some(isAnswer), damaged, entries };
}

function results(learner, data) {
  if (!isObject(data?.machine) || ![data.claims, data.lessons].every(Array.isArray)) throw new Error(OTHER);
  if (data.schema !== 1) throw new Error("of another version, which this page cannot read");
  if (data.claims.length > MOST.claims) throw new Error(`too large: more than ${MOST.claims} claims`);
  const isClaim = (claim) => [claim?.id, claim?.lesson, claim?.verdict, data.date].every(isText);
  if (!data.claims.every(isClaim)) throw new Error("damaged: a claim has no id, lesson, verdict or date");
  const kept = ({ id, lesson, verdict, says }) => ({ id, lesson, verdict, says: isText(says) ? says : id });
  const name = isText(data.machine.name) ? data.machine.name : UNKNOWN_MACHINE;
  const machine = { name: data.machine.rehearsed ? `${name} (rehearsed)` : name };
  return { learner, kind: "results", date: data.date, schema: 1, machine, lessons: [], claims: data.claims.map(kept) };
}

/** Return the learner of a file: its name, or its folder's name if the file has the name that a course run gives it. */
function learnerOf(path) {
  const parts = path.split("/");
  const stem = parts.pop().replace(/\.jsonl?$/i, "");
  return /^(journal|results|\d{4}-\d\d-\d\d)$/.test(stem) && parts.length ? parts.at(-1) : stem;
}

/**
 * Read a file: a journal, the results of a run, or a saved class, which has both.
 * @param {string} path its name, with its folders
 * @param {string} text
 * @returns {object[]} each with its learner, kind and date
 * @throws {Error} the reason why the file is refused
 */
function read(path, text) {
  const lines = () => text.split(/\r?\n/).filter((line) => line.trim());
  if (/\.jsonl$/i.test(path)) return [journal(learnerOf(path), lines().map(parsed))];
  const data = parsed(text);
  if (!isObject(data)) throw new Error("damaged: cut off, or no JSON");
  if (!Array.isArray(data.class_files)) return [results(learnerOf(path), data)];
  return data.class_files.map((file) => {
    const learner = String(file?.learner);
    return Array.isArray(file?.entries) ? journal(learner, file.entries) : results(learner, file);
  });
}

/**
 * Keep the content of a file, unless there is a newer one of the same learner. A journal without an answer, as the
 * command writes it, counts as older than any other.
 * @param {Map<string, object>} kept
 * @returns {string} a message about the file, or an empty text
 */
function keep(kept, file) {
  const key = JSON.stringify([file.learner, file.kind]);
  const age = (one) => one && `${one.isAnswered ? 1 : 0} ${one.date}`;
  const [mine, before] = [age(file), age(kept.get(key))];
  const whose = short(file.learner);
  if (mine <= before) return `left out: ${mine < before ? "a newer" : "the same"} file of ${whose} is here`;
  kept.set(key, file);
  const replaced = before ? [`replaces an older file of ${whose}`] : [];
  return [...replaced, ...(file.damaged ? [`damaged lines left out: ${file.damaged}`] : [])].join("; ");
}

// ---- what a class found

/** Group items by a key, which may be any JSON value; return the lists. */
function grouped(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = JSON.stringify(keyOf(item));
    groups.set(key, groups.get(key) ?? []);
    groups.get(key).push(item);
  }
  return [...groups.values()];
}

/** Count how often each text occurs, the most frequent first. */
function counts(texts) {
  return grouped(texts, (text) => text).map((all) => [all[0], all.length]).sort((a, b) => b[1] - a[1]);
}

/** @param {number[]} values */
function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
}

/** Return the outcome of one learner's entries about one guess, question or exercise. */
function outcome(entries) {
  const [{ kind, content }] = entries;
  if (kind === "question") return (entries.find((entry) => entry.content.choice !== null) ?? entries[0]).content;
  const statuses = entries.map((entry) => STATUSES.indexOf(entry.content.status));
  if (kind === "exercise") return { status: Math.max(...statuses) };
  const reveal = entries.findIndex((entry) => entry.kind === "revealed");
  const guess = entries.slice(0, reveal < 0 ? undefined : reveal).at(-1)?.content.guess;
  const isLate = guess === undefined && entries.some((entry) => entry.kind === "guess");
  return { unit: content.unit, guess, isLate, measured: entries[reveal]?.content.measured };
}

/**
 * Return the outcomes of all learners: one list per guess, question, exercise and claim, in the order of the lessons.
 * @param {Map<string, object>} kept
 * @returns {{guess: object[][], question: object[][], exercise: object[][], claim: object[][]}}
 */
function found(kept) {
  const outcomes = [];
  const runs = new Map([...kept.values()].filter(({ kind }) => kind === "results").map((run) => [run.learner, run]));
  for (const { claims, machine } of runs.values()) {
    for (const claim of claims) outcomes.push({ ...claim, kind: "claim", key: claim.id, machine: machine.name });
  }
  for (const { learner, entries } of [...kept.values()].filter(({ kind }) => kind === "journal")) {
    const run = runs.get(learner);
    const about = ({ kind, lesson, key }) => [kind === "revealed" ? "guess" : kind, lesson, key];
    for (const mine of grouped(entries, about)) {
      const [kind, lesson, key] = about(mine[0]);
      const machine = run?.machine.name ?? UNKNOWN_MACHINE;
      if (kind !== "finished" && kind !== "board") outcomes.push({ kind, lesson, key, machine, ...outcome(mine) });
      // A journal does not name a machine; the results of the same learner's run do.
      for (const [id, verdict] of kind === "finished" ? Object.entries(mine.at(-1).content.claims) : []) {
        if (run?.claims.some((claim) => claim.id === id)) continue;
        outcomes.push({ kind: "claim", lesson, key: id, says: id, verdict, machine: UNKNOWN_MACHINE });
      }
    }
  }
  const all = { guess: [], question: [], exercise: [], claim: [] };
  const order = ([{ lesson, key }]) => `${lesson} ${key}`;
  const groups = grouped(outcomes, ({ kind, lesson, key, unit }) => [kind, lesson, key, unit]);
  for (const group of groups.sort((a, b) => (order(a) < order(b) ? -1 : 1))) all[group[0].kind].push(group);
  return all;
}

/** Return whether learners whose machines could test a claim got different verdicts. */
function isSplit(claim) {
  return new Set(claim.map(({ verdict }) => verdict).filter((verdict) => verdict !== UNTESTED)).size > 1;
}

// ---- showing outcomes

const short = (text, most = 80) => (text.length > most ? `${text.slice(0, most)}…` : text);
const titled = ([{ lesson, key }]) => `${short(lesson.replaceAll("_", " "))}: ${short(key)}`;
const plural = (count, word, words = `${word}s`) => `${count} ${count === 1 ? word : words}`;

/** Format a number with four digits, or as a whole number, like `trainmem.texts.number_text`. */
function numberText(value, unit = "") {
  const rounded = Math.abs(value) < 1000 ? Number(value.toPrecision(4)) : Math.round(value).toLocaleString("en");
  return `${rounded} ${short(unit, 30)}`.trim();
}

/** Format the median, with the range if the values differ: "57 % (55 to 61)". */
function spreadText(values, unit) {
  const [low, high] = [numberText(Math.min(...values)), numberText(Math.max(...values))];
  return numberText(median(values), unit) + (low === high ? "" : ` (${low} to ${high})`);
}

/** Return a table in a box that scrolls, also by keyboard. */
function table(caption, columns, rows) {
  const box = { class: "class-table", tabindex: 0, role: "region", "aria-label": caption };
  return element("div", box, tableOf(caption, columns, rows));
}

/**
 * Return an axis for values; it is logarithmic if they span more than one and a half powers of ten.
 * @param {number[]} values
 * @returns {{ticks: number[], at: (value: number) => number}} round numbers, and the position of a value from 0 to 1
 */
function axis(values) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const isLog = least > 0 && most / least > 30;
  const rough = (most - least || Math.abs(most) || 1) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = isLog ? 1 : power * [1, 2, 5, 10].find((factor) => factor * power > rough * 0.999);
  const place = (value) => (isLog ? Math.log10(value) : value / step); // in steps
  const first = Math.floor(place(least));
  const last = Math.max(Math.ceil(place(most)), first + 1);
  const every = isLog ? Math.ceil((last - first) / 4) : 1; // powers of ten are wide
  const count = Math.floor((last - first) / every) + 1;
  const ticks = Array.from({ length: count }, (_, number) => first + number * every);
  const tick = (steps) => (isLog ? 10 ** steps : steps * step);
  return { ticks: ticks.map(tick), at: (value) => (place(value) - first) / (last - first) };
}

/** Draw guesses as piles of dots above an axis, measured values as strokes below it, medians as a line and a diamond. */
function dotPlot(guesses, measured, name) {
  const [left, width, dot] = [22, 316, 9];
  const { ticks, at } = axis([...guesses, ...measured]);
  const x = (value) => left + at(value) * width;
  const pile = (value) => Math.round(x(value) / dot);
  const piles = grouped(guesses, pile);
  const tallest = Math.max(1, ...piles.map(({ length }) => length));
  const rise = Math.min(dot, 90 / tallest); // the dots of a tall pile overlap
  const floor = 14 + rise * tallest;
  const path = (sign, d) => element("path", { class: sign, d });
  const middle = (values, draw) => (values.length ? [draw(x(median(values)))] : []);
  const drawn = [
    path("line", `M${left} ${floor}h${width}${ticks.map((tick) => `M${x(tick)} ${floor}v5`).join("")}`),
    ...piles.flatMap((all) =>
      all.map((value, number) =>
        element("circle", { class: "guess", cx: pile(value) * dot, cy: floor - 6 - number * rise, r: 4 }),
      ),
    ),
    ...middle(guesses, (at) => path("median", `M${at} 2V${floor}`)),
    ...measured.map((value) => path("measured", `M${x(value)} ${floor + 8}v20`)),
    ...middle(measured, (at) => path("diamond", `M${at} ${floor + 12}l5 6l-5 6l-5 -6z`)),
    ...ticks.map((tick) => element("text", { x: x(tick), y: floor + 44, "text-anchor": "middle" }, numberText(tick))),
  ];
  const label = `${name}: guesses as dots above an axis, measured values under it; their numbers follow`;
  return element("svg", { viewBox: `0 0 360 ${floor + 50}`, role: "img", "aria-label": label }, ...drawn);
}

function guessFigure(group) {
  const [name, unit] = [titled(group), group[0].unit];
  const [guessed, known] = ["guess", "measured"].map((what) => group.filter((one) => one[what] !== undefined));
  const [guesses, measured] = [guessed.map(({ guess }) => guess), known.map((one) => one.measured)];
  const both = guessed.filter((one) => known.includes(one));
  const off = both.map((one) => Math.abs(one.guess - one.measured) / (Math.abs(one.measured) || 1));
  const late = group.filter(({ isLate }) => isLate).length;
  const parts = {
    guess: `${plural(guesses.length, "guess", "guesses")} counted, of ${plural(group.length, "learner")}`,
    median: guesses.length ? `median guess ${numberText(median(guesses), unit)}` : "",
    diamond: measured.length ? `measured ${spreadText(measured, unit)} by ${plural(measured.length, "learner")}` : "",
  };
  if (late) parts.guess += `; ${late} came after the measurement`;
  if (off.length) parts.median += `; half were off by ${Math.round(median(off) * 100)} % or less`;
  const machines = grouped(known, ({ machine }) => machine).map((all) => [
    `measured, ${short(all[0].machine)}: ${spreadText(all.map((one) => one.measured), unit)}`,
    String(all.length),
  ]);
  const sorted = grouped([...guesses].sort((a, b) => a - b), (guess) => guess);
  const rows = [...sorted.map((all) => [`guessed ${numberText(all[0], unit)}`, String(all.length)]), ...machines];
  const lines = Object.entries(parts).filter(([, text]) => text);
  return element(
    "section",
    { class: "class-guess" },
    element("h3", {}, name),
    ...(lines.length > 1 ? [dotPlot(guesses, measured, name)] : []),
    element("p", {}, short(unit, 30)),
    element("ul", {}, ...lines.map(([sign, text]) => element("li", { class: sign }, text))),
    fold("Numbers", table(`Numbers of ${name}`, ["value", "how many"], rows)),
  );
}

function questionRow(group) {
  const answered = group.filter(({ choice }) => choice !== null);
  const [wrong] = counts(answered.filter(({ right }) => !right).map(({ choice }) => choice));
  const right = answered.filter((one) => one.right).length;
  return [titled(group), `${right} of ${answered.length}`, wrong ? `${short(wrong[0], 300)} (${wrong[1]})` : "–"];
}

function exerciseRow(group) {
  const [none, wrong, right] = STATUSES.map((_, status) => group.filter((one) => one.status === status).length);
  return [titled(group), `${right} of ${group.length}`, String(wrong), String(none)];
}

function verdictTable(caption, claims, machines) {
  const verdicts = (claim, machine) => counts(claim.filter((one) => one.machine === machine).map((one) => one.verdict));
  const rows = claims.map((claim) => [
    `${short(claim[0].says, 300)} (${titled(claim)})`,
    ...machines.map((machine) =>
      verdicts(claim, machine).map(([verdict, count]) => `${short(verdict)} ${count}`).join(", ") || "–",
    ),
  ]);
  return table(caption, ["claim", ...machines.map((machine) => short(machine))], rows);
}

/** Return the outcomes of one lesson, or of all lessons if none is named. */
function sections(all, lesson) {
  const [guesses, questions, exercises, claims] = [all.guess, all.question, all.exercise, all.claim].map((groups) =>
    groups.filter(([one]) => !lesson || one.lesson === lesson),
  );
  const machines = counts(claims.flat().map(({ machine }) => machine)).map(([machine]) => machine);
  const [split, others] = [claims.filter(isSplit), claims.filter((claim) => !isSplit(claim))];
  const [wrong, alike] = ["wrong answer chosen most (how often)", "Claims on which none differ"];
  const tables = {
    Guesses: guesses.map(guessFigure),
    Questions: [table("First answers", ["question", "right at once", wrong], questions.map(questionRow))],
    Exercises: [table("Best answers", ["exercise", ...STATUSES.toReversed()], exercises.map(exerciseRow))],
    "Verdicts by machine": [
      verdictTable(`Claims on which verdicts differ: ${split.length}`, split, machines),
      fold(`${alike}: ${others.length}`, verdictTable(alike, others, machines)),
    ],
  };
  const isThere = [guesses, questions, exercises, claims].map(({ length }) => length > 0);
  const full = Object.entries(tables).filter((_, number) => isThere[number]);
  return full.map(([title, content]) => element("section", {}, element("h2", {}, title), ...content));
}

// ---- the page

/** Return all dropped files with their paths; a file that cannot be read is null. */
async function filesIn(entry) {
  const path = entry.fullPath.slice(1);
  if (entry.isFile) return [{ path, file: await new Promise((take) => entry.file(take, () => take(null))) }];
  const [reader, files] = [entry.createReader(), []];
  for (let some; (some = await new Promise((take) => reader.readEntries(take, () => take([])))).length; ) {
    for (const child of some) files.push(...(await filesIn(child)));
  }
  return files;
}

const part = (name) => document.getElementById(`class-${name}`);
const [state, remarks, lesson] = [part("state"), part("remarks"), part("lesson")];
const kept = new Map();
let messages = []; // [path, message] of each file
let passed = 0; // other files in folders
let turn = Promise.resolve();

async function take({ path, file }) {
  try {
    if (!/\.jsonl?$/i.test(path)) throw new Error(OTHER);
    if (!file) throw new Error("it cannot be read");
    if (file.size > MOST.bytes) throw new Error(`too large: ${Math.round(file.size / 1e6)} MB`);
    const notes = read(path, await file.text()).map((one) => keep(kept, one));
    messages.push([path, [...new Set(notes)].filter(Boolean).join("; ")]);
  } catch (error) {
    if (error.message === OTHER && path.includes("/")) passed += 1;
    else messages.push([path, `refused: ${error.message}`]);
  }
}

function show() {
  const all = found(kept);
  const names = ["", ...new Set(Object.values(all).flat().map(([one]) => one.lesson).sort())];
  const chosen = names.includes(lesson.value) ? lesson.value : "";
  const option = (value) => element("option", { value }, short(value.replaceAll("_", " ")) || "all");
  lesson.replaceChildren(...names.map(option));
  lesson.value = chosen;
  const learners = new Set([...kept.values()].map(({ learner }) => learner)).size;
  const refused = messages.filter(([, what]) => what.startsWith("refused")).length;
  const counted = `${plural(kept.size, "file")} of ${plural(learners, "learner")} counted, ${refused} refused`;
  state.textContent = `${counted}, ${passed} other files in folders ignored.`;
  const line = ([path, what]) => element("li", {}, short(path, 120), what && `: ${what}`);
  const list = (files) => element("ul", {}, ...files.map(line));
  const [remarkable, plain] = [messages.filter(([, what]) => what), messages.filter(([, what]) => !what)];
  remarks.replaceChildren(list(remarkable), fold("Files taken", list(plain)));
  part("controls").hidden = !messages.length;
  part("results").replaceChildren(...sections(all, chosen));
}

/** Read files after those that were given before. */
function add(given) {
  turn = turn.then(async () => {
    state.textContent = "Reading …";
    for (const one of await given) await take(one);
    show();
  });
}

for (const input of [part("files"), part("folder")]) {
  input.addEventListener("change", () => {
    add([...input.files].map((file) => ({ path: file.webkitRelativePath || file.name, file })));
    input.value = ""; // so that the same file can be chosen again
  });
}
part("drop").addEventListener("dragover", (event) => event.preventDefault());
part("drop").addEventListener("drop", (event) => {
  event.preventDefault();
  const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  add(Promise.all(entries.map(filesIn)).then((lists) => lists.flat()));
});
lesson.addEventListener("change", show);
part("remove").addEventListener("click", () => {
  kept.clear();
  [messages, passed] = [[], 0];
  show();
  part("files").focus();
});
part("save").addEventListener("click", () => {
  const href = URL.createObjectURL(new Blob([JSON.stringify({ class_files: [...kept.values()] })]));
  element("a", { href, download: "class.json" }).click();
  URL.revokeObjectURL(href);
});
