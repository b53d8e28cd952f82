/**
 * The allocations and frees of a training at a micro-batch and a length, from its table (`event_tables.py`).
 *
 * The workspace of sums, of embedding gradients and of layer norms' gradients is not a power of the sizes: it is
 * calculated as in `trainmem/estimate/reduction_scratch.py` and `kernels.py`. `tests/website/test_events_js.py` compares both.
 */

const MIB = 1024 ** 2;
const WORD = 8; // bytes of an index
const CUB_BYTES = 256; // parts of CUB's workspace are multiples of it
const MADE = "made"; // in a program: the result is allocated now
const WORKSPACE = "workspace"; // the program for cuBLAS's workspace
export const LENGTH_UNIT = 128; // tokens; a table's lengths are multiples of it

const ceil = (size, unit) => Math.floor((size + unit - 1) / unit);
const nextMultiple = (size, unit) => ceil(size, unit) * unit;
const product = (sizes) => sizes.reduce((one, other) => one * other, 1);
const powerOf2 = (number) => (number ? 2 ** Math.floor(Math.log2(number)) : 1);
const bits = (number) => Math.floor(Math.log2(number)) + 1;
const gcd = (a, b) => (b ? gcd(b, a % b) : a);

/**
 * The properties of a GPU that decide how kernels divide their work.
 * @param {[number, number]} capability compute capability
 */
export function gpuOf([major, minor]) {
  const newest = major >= 9;
  const a100 = major === 8 && minor === 0;
  return {
    count: major >= 12 ? 170 : major >= 10 ? 148 : newest ? 132 : a100 ? 108 : major === 8 ? 80 : 40, // streaming multiprocessors
    threads: major >= 12 || (major === 8 && !a100) ? 1536 : newest || a100 ? 2048 : 1024, // of each
    uniqueAtOnce: newest ? 4928 : a100 ? 1344 : 320,
    sortedAtOnce: major === 7 ? 2816 : major === 8 ? 3840 : 4608,
    workspace: [9, 10, 12].includes(major) ? 32 * MIB : (2 * 4096 + 8 * 16) * 1024,
  };
}

/** Return [size, stride] of the dimensions, the fastest first; contiguous dimensions are merged. */
function joined(dims) {
  const found = [];
  for (const [size, step] of dims.filter(([length]) => length !== 1).sort((a, b) => a[1] - b[1])) {
    const last = found.at(-1);
    if (last && last[0] * last[1] === step) last[0] *= size;
    else found.push([size, step]);
  }
  return found;
}

/**
 * Return the workspace blocks of a reduction over some dimensions of a tensor: `reduction_scratch.scratch_bytes`.
 * @param {number[]} shape
 * @param {number[]} stride in elements
 * @param {number[]} reduced dimensions
 * @param {number} bytesEach of one number that is accumulated
 * @returns {number[]} bytes
 */
export function reductionScratch(shape, stride, reduced, gpu, bytesEach) {
  const dims = shape.map((size, dim) => [size, stride[dim]]);
  const inner = joined(dims.filter((_, dim) => reduced.includes(dim)));
  const outer = joined(dims.filter((_, dim) => !reduced.includes(dim)));
  const [inputs, outputs] = [inner, outer].map((each) => product(each.map(([size]) => size)));
  if (!inputs || !outputs) return [];
  const innerIsFastest = !outer.length || (inner.length > 0 && inner[0][1] < outer[0][1]);
  const fastest = innerIsFastest ? (inner[0] ?? [1, 1])[1] : outer[0][1];
  let [width, height] = innerIsFastest ? [inputs, outputs] : [outputs, inputs];
  let vector = 1;
  if (fastest === 1 && innerIsFastest && width >= 128 && inner.length === 1) {
    width = Math.floor(width / 4);
  } else if (fastest === 1 && !innerIsFastest) {
    vector = [outer[0][0], ...[...inner, ...outer.slice(1)].map(([, step]) => step)].reduce(gcd, 4);
    width = Math.floor(width / vector);
  }
  const most = 512 / vector;
  const wide = Math.min(powerOf2(width), most);
  const high = Math.min(powerOf2(height), most);
  const blockHeight = Math.min(high, Math.floor(most / Math.min(wide, 32)));
  const blockWidth = Math.min(wide, Math.floor(most / blockHeight));
  let [byInput, byOutput] = innerIsFastest ? [blockWidth, 1] : [1, blockWidth];
  const splits = ceil(inputs, byInput) >= Math.min(blockHeight * 16, 256);
  if (splits) byInput *= blockHeight;
  else byOutput *= blockHeight;
  const values = ceil(inputs, byInput);
  const grid = ceil(Math.floor(outputs / vector), byOutput);
  const wanted = gpu.count * Math.floor(gpu.threads / (blockWidth * blockHeight));
  if (!splits || values < 256 || grid > wanted) return [];
  const shares = Math.max(Math.min(ceil(wanted, grid), ceil(values, 16)), ceil(values, 256));
  if (shares < 2) return [];
  return [bytesEach * outputs * shares * (innerIsFastest ? 1 : blockWidth * vector), 4 * grid];
}

const scanBytes = (count, tile = 896) => nextMultiple(16 * (ceil(count, tile) + 32), CUB_BYTES) + 511;

function sortBytes(count, largest, gpu) {
  const passes = ceil(bits(Math.max(largest - 1, 1)), 8);
  const again = passes > 1 ? 2 * nextMultiple(count * WORD, CUB_BYTES) : 0;
  return again + 1024 * ceil(count, gpu.sortedAtOnce) + 2048 * passes + 511;
}

const freed = (index) => ({ freed: index });

/**
 * Return the allocations of an embedding's gradient in order: `Kernels._embedding_backward` without copies.
 * @param {number} count number of indices
 * @param {number} weights rows of the embedding
 * @param {number} width elements per row
 * @param {boolean} isHalf whether gradients have 16 bits
 * @returns {(number|string|{freed: number})[]} bytes of an allocation, the result, or which allocation is freed
 */
export function embeddingProgram(count, weights, width, isHalf, gpu) {
  if (count <= 3072) return [MADE];
  const rows = Math.min(count, weights);
  const tens = Math.floor(count / 10);
  const sums = tens + rows;
  const words = count * WORD;
  const steps = [words, words, words, sortBytes(count, weights, gpu), freed(3), freed(2), MADE];
  steps.push(words, WORD, words, scanBytes(count, gpu.uniqueAtOnce), freed(5), freed(4));
  steps.push(rows * WORD, rows * WORD, scanBytes(rows), freed(6), WORD, sums * WORD);
  if (rows < 4 * gpu.count && tens > 3 * rows) {
    steps.push(sums * WORD, ...(isHalf ? [weights * width * 4] : []));
  } else {
    steps.push(sums * width * 4);
  }
  return steps;
}

/**
 * Return the allocations of a layer norm's backward in order: `Kernels._norm_backward`. The results are the gradients of
 * the input and of each weight.
 * @param {number} rows
 * @param {number} width elements per row
 * @param {number[]} sizes bytes of each weight's gradient
 * @param {number[]} copies bytes of copies that are made after the results
 * @returns {(number|string|{freed: number})[]} bytes of an allocation, a result, or which allocation is freed
 */
export function normBackwardProgram(rows, width, sizes, copies, gpu) {
  const isPlain = rows <= 65536 || Math.floor(width / 32) >= Math.floor(gpu.count / 2);
  if (isPlain) return [MADE, ...sizes.map(() => MADE), ...copies];
  const parts = Math.min(ceil(rows, 32), Math.floor(32768 / ceil(width, 32)));
  const shared = reductionScratch([parts, width], [width, 1], [0], gpu, 4);
  const steps = [MADE, ...sizes, ...copies, ...sizes.map((size) => parts * size)];
  for (const number of sizes.keys()) {
    const last = copies.length + 2 * sizes.length - number;
    steps.push(MADE, ...shared, ...shared.map(() => freed(last)), freed(0));
  }
  return steps;
}

/** Return the steps of a table's program at a point. */
function stepsOf([rule, constants, numbers], valueOf, gpu) {
  const values = numbers.map(valueOf);
  const copies = values.splice(values.length - constants.at(-1));
  if (rule === "embedding") {
    const [weights, width, isHalf] = constants;
    const moved = (step) => (step.freed === undefined ? step : freed(step.freed + copies.length));
    return [...copies, ...embeddingProgram(values[0], weights, width, isHalf, gpu).map(moved)];
  }
  if (rule === "norm backward") return normBackwardProgram(values[0], constants[0], constants[1], copies, gpu);
  const rank = values.length / 2;
  const [dims, bytesEach] = constants;
  const layout = [values.slice(0, rank), values.slice(rank)];
  return [MADE, ...copies, ...reductionScratch(...layout, dims, gpu, bytesEach)];
}

const orders = new WeakMap(); // by table

/** Return the class of each block of a table, and the events in the form that `replay` reads; they fit any size. */
function orderOf(table) {
  if (!orders.has(table)) {
    const living = table.classes.map(() => []);
    const classes = [];
    let deaths = 0;
    const events = table.tokens.map((token) => {
      if (token >= 0) {
        living[token].push(classes.length);
        return classes.push(token) - 1;
      }
      const here = living[~token];
      const rank = table.ranks[deaths++];
      return ~here.splice(rank < 0 ? ~rank : here.length - 1 - rank, 1)[0];
    });
    orders.set(table, { classes, events });
  }
  return orders.get(table);
}

/**
 * Return the allocations and frees of a training.
 * @param {object} table as `event_tables.table` makes it
 * @param {number} batch micro-batch
 * @param {number} length tokens, a multiple of `LENGTH_UNIT`
 * @param {[number, number]} capability the card's
 * @returns {{sizes: number[], labels: number[], shown: number, events: number[], marks: [string, number][],
 *   start: number, emptied: number[]}} bytes and label number of each block; how many blocks, the first ones, belong to
 *   tensors (the others are operator workspace); the events in the form that `replay` reads; how many events are before
 *   each mark, before the first forward pass, and before each time that the cache is freed
 */
export function logOf(table, batch, length, capability) {
  const gpu = gpuOf(capability);
  const t = length / LENGTH_UNIT;
  const powers = [1, t, t * t, batch, batch * t, batch * t * t];
  const values = table.sums.map((sum) => sum.reduce((total, factor, power) => total + factor * powers[power], 0));
  const programs = table.programs.map((program) =>
    program[0] === WORKSPACE ? [MADE] : stepsOf(program, (sum) => values[sum], gpu),
  );
  const steps = table.classes.map(([, , program]) => (programs[program]?.length > 1 ? programs[program] : null));
  const bytes = table.classes.map(([, sum, program]) =>
    table.programs[program]?.[0] === WORKSPACE ? gpu.workspace : values[sum],
  );
  const order = orderOf(table);
  const sizes = order.classes.map((kind) => bytes[kind]);
  const labels = order.classes.map((kind) => table.classes[kind][0]);
  const events = [];
  const lengths = [0]; // of the events after so many of the order
  for (let place = 0; place < order.events.length; place++) {
    const event = order.events[place];
    const program = event < 0 ? null : steps[order.classes[event]];
    if (program === null) {
      events.push(event);
    } else {
      const held = [];
      let made = 0; // results so far; they are successive events of the order
      for (const step of program) {
        if (step === MADE) {
          if (made) lengths.push(events.length);
          events.push(order.events[place + made++]);
        } else if (step.freed === undefined) {
          labels.push(labels[event]);
          held.push(sizes.push(step) - 1);
          events.push(held.at(-1));
        } else {
          events.push(~held.splice(step.freed, 1)[0]);
        }
      }
      for (const block of held.reverse()) events.push(~block);
      place += made - 1;
    }
    lengths.push(events.length);
  }
  const marks = table.marks.map(([label, position]) => [label, lengths[position]]);
  const [, start] = marks.find(([label]) => label === "start");
  const emptied = (table.emptied ?? []).map((position) => lengths[position]);
  return { sizes, labels, shown: order.classes.length, events, marks, start, emptied };
}
