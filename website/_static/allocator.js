/**
 * torch's CUDA caching allocator, as `perf_helpers/estimate/allocator.py` has it: the segments that
 * births and deaths of blocks take from the device, under the rules of torch 2.13 and 2.14, on one stream.
 *
 * Not covered: options other than expandable segments. `tests/website/test_allocator_js.py` holds it to the Python one.
 */

const MIB = 1024 ** 2;
const BLOCK_BYTES = 512; // blocks are multiples of it
const SEGMENT_BYTES = 2 * MIB; // the smallest segment, and what larger ones are multiples of
const LARGE_SEGMENT_BYTES = 20 * MIB; // the segment for more than 1 MiB and less than 10 MiB
const SPACE_BYTES = 4096 * 1024 ** 3; // addresses of an expandable segment where the device has no limit
const TOP_ADDRESS = 0x7f0000000000; // where the first segment ends

const nextMultiple = (size, unit) => Math.ceil(size / unit) * unit;

/** Bytes of the block that holds `size` bytes. */
export const rounded = (size) => nextMultiple(size, BLOCK_BYTES);

/** The card does not hold the bytes asked for, whatever is freed of the cache. */
export class OutOfMemory extends Error {}

/** A part of a segment, linked with its neighbours: a block in use, or what is free. */
class Part {
  constructor(pool, address, size, base, order) {
    this.pool = pool;
    this.address = address;
    this.size = size;
    this.base = base; // the segment's first address
    this.order = order; // how many segments were taken up to this one
    this.previous = null;
    this.next = null;
    this.isMapped = true; // false: addresses without memory, in an expandable segment
    this.isFree = true;
  }

  get isWhole() {
    return this.previous === null && this.next === null;
  }

  /** Bytes, with those of the unmapped addresses behind it. */
  reach() {
    return this.size + (this.next !== null && !this.next.isMapped ? this.next.size : 0);
  }

  /** Keep the first `size` bytes; the rest, a part of its own. */
  cut(size) {
    const rest = new Part(this.pool, this.address + size, this.size - size, this.base, this.order);
    rest.isMapped = this.isMapped;
    rest.previous = this;
    rest.next = this.next;
    this.next = rest;
    if (rest.next !== null) rest.next.previous = rest;
    this.size = size;
    return rest;
  }

  /** Grow by the next part, which is none any more. */
  takeIn(behind) {
    this.size += behind.size;
    this.next = behind.next;
    if (behind.next !== null) behind.next.previous = this;
  }
}

const bySize = (a, b) => a.size - b.size || a.order - b.order || a.address - b.address;
const byAddress = (a, b) => a.address - b.address;

/** How many of the sorted `parts` come before `wanted`. */
function position(parts, wanted, compare) {
  let low = 0;
  let high = parts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (compare(parts[middle], wanted) < 0) low = middle + 1;
    else high = middle;
  }
  return low;
}

const joins = (part, other) => other !== null && other.isFree && other.isMapped === part.isMapped;

/** The free parts of small segments, or of large ones. */
class Pool {
  constructor(isSmall, page) {
    this.isSmall = isSmall;
    this.page = page; // bytes by which expandable segments grow
    this.free = [];
    this.unmapped = [];
  }

  add(part) {
    if (part.isMapped) this.free.splice(position(this.free, part, bySize), 0, part);
    else this.unmapped.splice(position(this.unmapped, part, byAddress), 0, part);
  }

  remove(part) {
    if (part.isMapped) this.free.splice(position(this.free, part, bySize), 1);
    else this.unmapped.splice(position(this.unmapped, part, byAddress), 1);
  }

  /** Add a free part, joined with its neighbours if they are as free and as mapped; what became of it. */
  join(part) {
    if (joins(part, part.next)) {
      this.remove(part.next);
      part.takeIn(part.next);
    }
    if (joins(part, part.previous)) {
      const before = part.previous;
      this.remove(before);
      before.takeIn(part);
      part = before;
    }
    this.add(part);
    return part;
  }
}

/** The segments and blocks of torch's CUDA allocator. */
export class CachingAllocator {
  /**
   * @param {{expandable?: boolean, capacity?: number}} options whether segments expand; bytes that the device has for
   *   segments, its context taken off, without which there is no limit
   */
  constructor({ expandable = false, capacity = Infinity } = {}) {
    this.allocatedBytes = 0; // of all blocks in use
    this.reservedBytes = 0; // of all segments
    this.peakReservedBytes = 0;
    this._pools = [new Pool(true, SEGMENT_BYTES), new Pool(false, LARGE_SEGMENT_BYTES)];
    this._used = []; // by key
    this._taken = []; // ranges of addresses, [first, the one behind the last], from the top down
    this._order = 0;
    this._deviceBytes = 0; // taken of the device: segments in its pages
    this._expands = expandable;
    this._capacity = capacity;
    this._space = capacity === Infinity ? SPACE_BYTES : capacity + Math.floor(capacity / 8);
  }

  /**
   * Place `size` bytes under the name `key`. Throws OutOfMemory where there is no room, whatever is freed of the cache.
   * @param {number} key
   * @param {number} size bytes
   */
  allocate(key, size) {
    if (!size) return;
    size = rounded(size);
    const pool = this._pools[size > MIB ? 1 : 0];
    const block = this._cached(pool, size) ?? this._new(pool, size);
    const rest = block.size - size;
    if (pool.isSmall || this._expands ? rest >= BLOCK_BYTES : rest > MIB) pool.add(block.cut(size));
    block.isFree = false;
    this._used[key] = block;
    this.allocatedBytes += block.size;
  }

  /** Give the block back, joined with its free neighbours. A key that holds no bytes is passed over. */
  free(key) {
    const block = this._used[key];
    if (block === undefined) return;
    this._used[key] = undefined;
    this.allocatedBytes -= block.size;
    block.isFree = true;
    block.pool.join(block);
  }

  /** Give segments without a block in use back to the device, and such pages of expandable ones. */
  emptyCache() {
    for (const pool of [this._pools[1], this._pools[0]]) {
      for (const block of [...pool.free]) {
        if (this._expands) this._unmap(block);
        else if (block.isWhole) this._release(block);
      }
    }
  }

  /** Peaks count from what there is now. */
  resetPeaks() {
    this.peakReservedBytes = this.reservedBytes;
  }

  /** The smallest free block that holds so much, no longer in its pool. */
  _cached(pool, size) {
    const free = pool.free;
    let index = position(free, size, (part, wanted) => part.size - wanted);
    if (index === free.length) return null;
    if (this._expands) {
      // A block counts with the addresses behind it, into which it can grow.
      while (index + 1 < free.length && free[index + 1].reach() < free[index].reach()) index += 1;
    }
    return free.splice(index, 1)[0];
  }

  /** A block of memory that is taken now. */
  _new(pool, size) {
    let block = this._takenNow(pool, size);
    if (block === null) {
      this.emptyCache();
      block = this._takenNow(pool, size);
    }
    if (block === null) throw new OutOfMemory(`no room for ${size} bytes`);
    return block;
  }

  /** A block of a new segment, or of one that grows; null where there is no room. */
  _takenNow(pool, size) {
    if (this._expands) return this._expanded(pool, size);
    const isOwn = size <= MIB || size >= 10 * MIB;
    const segment = isOwn ? nextMultiple(size, SEGMENT_BYTES) : LARGE_SEGMENT_BYTES;
    if (this._deviceBytes + segment > this._capacity) return null;
    this._reserve(segment);
    return this._newSegment(pool, segment);
  }

  /** A segment in the highest range of addresses that is free. */
  _newSegment(pool, size) {
    let end = TOP_ADDRESS;
    let place = 0;
    while (place < this._taken.length && end - this._taken[place][1] < size) end = this._taken[place++][0];
    this._taken.splice(place, 0, [end - size, end]);
    this._order += 1;
    return new Part(pool, end - size, size, end - size, this._order);
  }

  _reserve(size) {
    this.reservedBytes += size;
    this._deviceBytes += size;
    this.peakReservedBytes = Math.max(this.peakReservedBytes, this.reservedBytes);
  }

  /** Give a segment back that is one free block. */
  _release(block) {
    block.pool.remove(block);
    this._giveAddresses(block);
    this._reserve(-block.size);
  }

  _giveAddresses(block) {
    this._taken = this._taken.filter(([first]) => first !== block.address);
  }

  // ---- expandable segments: addresses are reserved once, and memory is mapped to them page by page

  /** A free block that has grown to hold so much, no longer in its pool. */
  _expanded(pool, size) {
    let block = this._expandable(pool, size);
    if (!block.isMapped) block = this._map(block, Math.min(block.size, size));
    while (block !== null && block.size < size) {
      block = block.next === null ? null : this._map(block.next, Math.min(size - block.size, block.next.size));
    }
    if (block !== null) pool.remove(block);
    return block;
  }

  /** The lowest block that can grow to so much. */
  _expandable(pool, size) {
    for (let block of pool.unmapped) {
      if (block.previous !== null && block.previous.isFree) block = block.previous;
      let reach = 0;
      for (let part = block; reach < size && part !== null && part.isFree; part = part.next) reach += part.size;
      if (reach >= size) return block;
    }
    const block = this._newSegment(pool, nextMultiple(this._space, pool.page));
    block.isMapped = false;
    pool.add(block);
    return block;
  }

  /** Map memory to the first addresses of an unmapped block; the free block that holds it, or null. */
  _map(block, size) {
    size = nextMultiple(size, block.pool.page);
    if (this._deviceBytes + size > this._capacity) return null;
    block.pool.remove(block);
    if (size < block.size) block.pool.add(block.cut(size));
    block.isMapped = true;
    this._reserve(size);
    return block.pool.join(block);
  }

  /** Give the whole pages of a free block back, and its segment where nothing is left of it. */
  _unmap(block) {
    const { page } = block.pool;
    const begin = nextMultiple(block.address - block.base, page) + block.base;
    const end = Math.floor((block.address + block.size - block.base) / page) * page + block.base;
    if (begin >= end) return;
    block.pool.remove(block);
    if (block.address < begin) {
      const before = block;
      block = block.cut(begin - block.address);
      block.pool.add(before);
    }
    if (end < block.address + block.size) block.pool.add(block.cut(end - block.address));
    block.isMapped = false;
    this._reserve(begin - end);
    block = block.pool.join(block);
    if (block.isWhole) {
      block.pool.remove(block);
      this._giveAddresses(block);
    }
  }
}

/**
 * The births and deaths of a training laid out by the allocator.
 * @param {{sizes: ArrayLike<number>, events: ArrayLike<number>, start: number, emptied: number[]}} log bytes of each
 *   block; n is the birth of block n and ~n its death; how many events are before the first forward, and before each
 *   time that what is free is given back
 * @param {{expandable?: boolean, capacity?: number}} options as of `CachingAllocator`
 * @returns {{allocated: Float64Array, reservedPeak: number, isTooLarge: boolean}} bytes in use before the first event
 *   and after each; the most that was reserved from the first forward on; whether it was too large for the capacity,
 *   where these are the figures without one
 */
export function replay(log, { expandable = false, capacity = Infinity } = {}) {
  const allocator = new CachingAllocator({ expandable, capacity });
  const { sizes, events, start } = log;
  const emptied = new Set(log.emptied);
  const allocated = new Float64Array(events.length + 1);
  try {
    for (let number = 0; number < events.length; number += 1) {
      if (number === start) allocator.resetPeaks();
      if (emptied.has(number)) allocator.emptyCache();
      const event = events[number];
      if (event >= 0) allocator.allocate(event, sizes[event]);
      else allocator.free(~event);
      allocated[number + 1] = allocator.allocatedBytes;
    }
  } catch (error) {
    if (!(error instanceof OutOfMemory)) throw error;
    return { ...replay(log, { expandable }), isTooLarge: true };
  }
  return { allocated, reservedPeak: allocator.peakReservedBytes, isTooLarge: false };
}
