/**
 * The memory of a training on a card, as `perf-helpers estimate --card` answers it, from the table of its recipe.
 */

import { replay, rounded } from "./allocator.js";
import { logOf } from "./events.js";

const STRETCHES = 200; // a step's picture divides its events into so many parts

/**
 * @typedef {{key: string, name: string, capability: [number, number], memory: number, limit: number, capacity: number,
 *   context: number}} Card sizes in bytes: the card's memory, its usable part, the allocator's part, and the CUDA
 *   context
 * @typedef {{batch: number, length: number, expandable: boolean}} Sizes micro-batch and tokens; whether the allocator's
 *   segments expand
 */

/**
 * Return the memory of a training on a card.
 * @param {object} recipe the content of a table's file
 * @param {Sizes} sizes
 * @param {Card} card
 * @returns {object} in bytes `allocated` after each event, `peakBytes`, `reservedBytes`, and `neededBytes` with the
 *   context; `fits`: "yes", "no" or "edge"; and the fields that `breakdown` and `timeline` read
 */
export function memoryOf(recipe, { batch, length, expandable }, card) {
  const table = recipe.parts.findLast((part) => part.least <= batch);
  const log = logOf(table, batch, length, card.capability);
  const laidOut = replay(log, { expandable, capacity: card.capacity });
  let peak = log.start;
  for (let position = peak; position < laidOut.allocated.length; position += 1) {
    if (laidOut.allocated[position] > laidOut.allocated[peak]) peak = position;
  }
  const peakBytes = laidOut.allocated[peak];
  const neededBytes = Math.max(laidOut.reservedPeak, peakBytes) + card.context;
  const isOver = peakBytes + card.context > card.memory;
  const isTooLarge = laidOut.isTooLarge && card.capacity >= card.memory - card.context;
  const fits = isOver || isTooLarge ? "no" : neededBytes > card.limit ? "edge" : "yes";
  const allocated = laidOut.allocated;
  return { table, log, allocated, peak, peakBytes, reservedBytes: laidOut.reservedPeak, neededBytes, fits };
}

/** Return the bytes by category after so many events, at ascending positions; operator workspace is the last category. */
function byCategory({ table, log, allocated }, positions, categories) {
  const live = new Array(categories - 1).fill(0);
  let done = 0;
  return positions.map((position) => {
    for (; done < position; done += 1) {
      const event = log.events[done];
      const block = event < 0 ? ~event : event;
      const category = table.labels[log.labels[block]][0];
      if (block >= log.shown || category >= live.length) continue;
      live[category] += event < 0 ? -rounded(log.sizes[block]) : rounded(log.sizes[block]);
    }
    return [...live, allocated[position] - live.reduce((one, other) => one + other, 0)];
  });
}

/** Return phase, operation and module of the event before a position. */
function whereAt({ table, log }, position) {
  const event = log.events[Math.max(position - 1, 0)];
  const [, phase, operation, module] = table.labels[log.labels[event < 0 ? ~event : event]];
  return { phase, operation, module };
}

/**
 * Return the peak by category, in the order of `categories`, and where it is.
 * @param {object} memory as `memoryOf` returns it
 * @param {number} categories how many there are
 */
export function breakdown(memory, categories) {
  return { parts: byCategory(memory, [memory.peak], categories)[0], ...whereAt(memory, memory.peak) };
}

/**
 * Return the bytes by category through the step with the peak: one entry per part of the events, where it is highest.
 * @param {object} memory as `memoryOf` returns it
 * @param {number} categories how many there are
 * @returns {{parts: number[][], phases: string[], peak: number}} the index of the peak among them
 */
export function timeline(memory, categories) {
  const { log, allocated, peak } = memory;
  const ends = log.marks.filter(([label]) => label === "step").map(([, position]) => position);
  const step = ends.findIndex((end) => peak <= end);
  const first = step > 0 ? ends[step - 1] : log.start;
  const last = step < 0 ? log.events.length : ends[step];
  const positions = [];
  for (let stretch = 0; stretch < STRETCHES; stretch += 1) {
    const [begin, end] = [stretch, stretch + 1].map((edge) => first + Math.floor(((last - first) * edge) / STRETCHES));
    if (begin === end) continue;
    let highest = begin + 1;
    for (let position = begin + 1; position <= end; position += 1) {
      if (allocated[position] > allocated[highest]) highest = position;
    }
    positions.push(highest);
  }
  return {
    parts: byCategory(memory, positions, categories),
    phases: positions.map((position) => log.marks.find(([label, end]) => label !== "start" && position <= end)[0]),
    peak: positions.indexOf(peak),
  };
}

/**
 * Return the largest number from 1 to `most` for which `isRight`, or 0. All smaller numbers must be right too. Waits for
 * `pause` before each call.
 * @param {number} most
 * @param {(number: number) => boolean} isRight
 * @param {() => Promise<void>} pause
 */
export async function largest(most, isRight, pause) {
  let [right, wrong] = [0, most + 1];
  while (wrong - right > 1) {
    const middle = (right + wrong) >> 1;
    await pause();
    if (isRight(middle)) right = middle;
    else wrong = middle;
  }
  return right;
}
