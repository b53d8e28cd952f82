/**
 * torch's CUDA caching allocator, a copy of `trainmem/estimate/allocator.py`: it lays out allocations and frees
 * in segments of the device's memory, by the rules of torch 2.15, on one stream.
 *
 * Not covered: options other than expandable segments. `tests/website/test_allocator_js.py` compares both.
 */

const MIB = 1024 ** 2;
const BLOCK_BYTES = 512; // blocks are multiples of it
const SEGMENT_BYTES = 2 * MIB; // the smallest segment; larger ones are multiples of it
const LARGE_SEGMENT_BYTES = 20 * MIB; // the segment for more than 1 MiB and less than 10 MiB
const SPACE_BYTES = 4096 * 1024 ** 3; // addresses of an expandable segment if the device has no limit
const TOP_ADDRESS = 0x7f0000000000; // where the first segment ends

const nextMultiple = (size, unit) => Math.ceil(size / unit) * unit;

/** Return the bytes of the block for a request of `size` bytes. */
export const rounded = (size) => nextMultiple(size, BLOCK_BYTES);

/** The card has no room for the requested bytes, even if the whole cache is freed. */
export class OutOfMemory extends Error {}

/** A part of a segment, in use or free, linked with the parts before and after it. */
class Part {
  constructor(pool, address, size, base, order) {
    this.pool = pool;
    this.address = address;
    this.size = size;
    this.base = base; // the segment's first address
    this.order = order; // number of segments that were taken before this one, and this one
    this.previous = null;
    this.next = null;
    this.isMapped = true; // false: addresses without memory, in an expandable segment
    this.isFree = true;
  }

  get isWhole() {
    return this.previous === null && this.next === null;
  }

  /** Return the bytes of this part and of the unmapped addresses behind it. */
  reach() {
    return this.size + (this.next !== null && !this.next.isMapped ? this.next.size : 0);
  }

  /** Keep the first `size` bytes and return the rest as a new part. */
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

  /** Merge the next part into this one. */
  takeIn(behind) {
    this.size += behind.size;
    this.next = behind.next;
    if (behind.next !== null) behind.next.previous = this;
  }
}

const bySize = (a, b) => a.size - b.size || a.order - b.order || a.address - b.address;
const byAddress = (a, b) => a.address - b.address;

/** Return how many of the sorted `parts` come before `wanted`. */
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

  /** Add a free part, merged with free neighbours of the same mapping; return the merged part. */
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
   * @param {{expandable?: boolean, capacity?: number}} options whether segments expand; the device's bytes for
   *   segments, without its context (default: no limit)
   */
  constructor({ expandable = false, capacity = Infinity } = {}) {
    this.allocatedBytes = 0; // all blocks in use
    this.reservedBytes = 0; // all segments
    this.peakReservedBytes = 0;
    this._pools = [new Pool(true, SEGMENT_BYTES), new Pool(false, LARGE_SEGMENT_BYTES)];
    this._used = []; // by key
    this._taken = []; // ranges of addresses, [first, the one behind the last], from the top down
    this._order = 0;
    this._deviceBytes = 0; // taken from the device: segments, rounded up to its pages
    this._expands = expandable;
    this._capacity = capacity;
    this._space = capacity === Infinity ? SPACE_BYTES : capacity + Math.floor(capacity / 8);
  }

  /**
   * Allocate `size` bytes under the name `key`. Throws OutOfMemory if there is no room even after freeing the cache.
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

  /** Free a block, and merge it with its free neighbours. A key without bytes is ignored. */
  free(key) {
    const block = this._used[key];
    if (block === undefined) return;
    this._used[key] = undefined;
    this.allocatedBytes -= block.size;
    block.isFree = true;
    block.pool.join(block);
  }

  /** Return unused segments, and unused pages of expandable segments, to the device. */
  emptyCache() {
    for (const pool of [this._pools[1], this._pools[0]]) {
      for (const block of [...pool.free]) {
        if (this._expands) this._unmap(block);
        else if (block.isWhole) this._release(block);
      }
    }
  }

  /** Reset the peaks to the current values. */
  resetPeaks() {
    this.peakReservedBytes = this.reservedBytes;
  }

  /** Take the smallest free block that is large enough out of its pool. */
  _cached(pool, size) {
    const free = pool.free;
    let index = position(free, size, (part, wanted) => part.size - wanted);
    if (index === free.length) return null;
    if (this._expands) {
      // The size of a block includes the addresses behind it, into which it can grow.
      while (index + 1 < free.length && free[index + 1].reach() < free[index].reach()) index += 1;
    }
    return free.splice(index, 1)[0];
  }

  /** Return a block of memory newly taken from the device. */
  _new(pool, size) {
    let block = this._takenNow(pool, size);
    if (block === null) {
      this.emptyCache();
      block = this._takenNow(pool, size);
    }
    if (block === null) throw new OutOfMemory(`no room for ${size} bytes`);
    return block;
  }

  /** Return a block of a new or a growing segment; null if there is no room. */
  _takenNow(pool, size) {
    if (this._expands) return this._expanded(pool, size);
    const isOwn = size <= MIB || size >= 10 * MIB;
    const segment = isOwn ? nextMultiple(size, SEGMENT_BYTES) : LARGE_SEGMENT_BYTES;
    if (this._deviceBytes + segment > this._capacity) return null;
    this._reserve(segment);
    return this._newSegment(pool, segment);
  }

  /** Return a new segment in the highest free range of addresses. */
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

  /** Return a segment that is one free block to the device. */
  _release(block) {
    block.pool.remove(block);
    this._giveAddresses(block);
    this._reserve(-block.size);
  }

  _giveAddresses(block) {
    this._taken = this._taken.filter(([first]) => first !== block.address);
  }

  // ---- expandable segments: addresses are reserved once, and memory is mapped to them page by page

  /** Return a free block that was grown to the requested size and taken out of its pool; null if there is no room. */
  _expanded(pool, size) {
    if (size > nextMultiple(this._space, pool.page)) return null; // older torch takes a new segment in vain
    let block = this._expandable(pool, size);
    if (!block.isMapped) block = this._map(block, Math.min(block.size, size));
    while (block !== null && block.size < size) {
      block = block.next === null ? null : this._map(block.next, Math.min(size - block.size, block.next.size));
    }
    if (block !== null) pool.remove(block);
    return block;
  }

  /** Return the block with the lowest address that can grow to the requested size. */
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

  /** Map memory to the first addresses of an unmapped block; return the free block with this memory, or null. */
  _map(block, size) {
    size = nextMultiple(size, block.pool.page);
    if (this._deviceBytes + size > this._capacity) return null;
    block.pool.remove(block);
    if (size < block.size) block.pool.add(block.cut(size));
    block.isMapped = true;
    this._reserve(size);
    return block.pool.join(block);
  }

  /** Return the whole pages of a free block to the device, and its segment if nothing is left of it. */
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
 * Replay the allocations and frees of a training on the allocator.
 * @param {{sizes: ArrayLike<number>, events: ArrayLike<number>, start: number, emptied: number[]}} log bytes of each
 *   block; n is the allocation of block n and ~n its free; the number of events before the first forward pass, and
 *   before each time that the cache is freed
 * @param {{expandable?: boolean, capacity?: number}} options see `CachingAllocator`
 * @returns {{allocated: Float64Array, reservedPeak: number, isTooLarge: boolean}} bytes in use before the first event
 *   and after each; the most reserved bytes since the first forward pass; whether the training was too large for the
 *   capacity, in which case these are the figures without a limit
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
