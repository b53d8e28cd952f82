// What the page's allocator counts: traces come in on standard input, and go out as bytes allocated and reserved after
// each event, -1 where there was no room.
import { readFileSync } from "node:fs";
import { CachingAllocator, OutOfMemory } from "../../website/_static/allocator.js";

function counted({ events, expandable, capacity }) {
  const allocator = new CachingAllocator({ expandable, capacity: capacity ?? Infinity });
  return events.map((event) => {
    let full = 0;
    try {
      if (event === null) allocator.emptyCache();
      else if (event[1]) allocator.allocate(...event);
      else allocator.free(event[0]);
    } catch (error) {
      if (!(error instanceof OutOfMemory)) throw error;
      full = -1;
    }
    return [allocator.allocatedBytes, allocator.reservedBytes, allocator.peakReservedBytes, full];
  });
}

process.stdout.write(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map(counted)));
