"""Compare our model of torch's caching allocator with the allocator itself, on random traces of allocations and frees.

    python benchmarks/measure_allocator.py [--traces 500] [--seed 0]

torch's CUDA build runs in a rehearsal, in one process per configuration with its PYTORCH_CUDA_ALLOC_CONF. After every
event, the script compares the allocated, reserved and requested bytes, the numbers of small and large segments, the
address of the new block, and whether there was no room. After every trace it compares the peaks, the retries and each
block of each segment.

An address is compared as (segment, offset), because the driver chooses the addresses of segments. These addresses
affect which free block torch takes only up to torch 2.11.
"""

import bisect
import os
import random
import sys
from unittest.mock import patch

import cloudpickle
from runner import Measurement

from trainmem.cards import CONTEXT_BYTES
from trainmem.estimate.allocator import MIB, CachingAllocator, OutOfMemory
from trainmem.estimate.allocator_settings import Settings, release
from trainmem.rehearsal import CARDS, Card, Rehearsal

ROOM = CARDS["a100"]
FULL = Card("1 GiB", (8, 0), 1024 * MIB + CONTEXT_BYTES)  # 1 GiB without its context
BARE = Card("1 GB", (8, 0), 10**9, context_bytes=0)  # without a context: its bytes are the capacity
CONFIGURATIONS = [
    (ROOM, ""),
    (ROOM, "expandable_segments:True"),
    (ROOM, "max_split_size_mb:20"),
    (ROOM, "max_split_size_mb:64"),
    (ROOM, "max_split_size_mb:40,max_non_split_rounding_mb:50,large_segment_size_mb:32"),
    (ROOM, "large_segment_size_mb:64"),
    (ROOM, "large_segment_size_mb:11,expandable_segments:False"),
    (ROOM, "roundup_power2_divisions:4"),
    (ROOM, "roundup_power2_divisions:[1:2,4:8,16:0,32:1,>:4]"),
    (ROOM, "roundup_power2_divisions:8,expandable_segments:True"),
    (FULL, ""),
    (BARE, "expandable_segments:True"),
    (BARE, "expandable_segments:True,large_segment_size_mb:32"),
    (FULL, "max_split_size_mb:20"),
    (FULL, "max_split_size_mb:32,max_non_split_rounding_mb:100"),
    (BARE, ""),
    (FULL, "garbage_collection_threshold:0.4,max_split_size_mb:48,"
           "max_non_split_rounding_mb:64,large_segment_size_mb:26,roundup_power2_divisions:[2:4,>:2]"),
]  # fmt: skip
EDGES = [512, 4096, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 32 * MIB, 48 * MIB, 64 * MIB]

cloudpickle.register_pickle_by_value(sys.modules[__name__])
Event = tuple[int, int] | None  # (key, bytes): allocation; (key, 0): free; None: the cache is emptied


def at_random(chance: random.Random, least: float, most: float, live_bytes: float) -> list[Event]:
    """Return random allocations of 2^least to 2^most bytes, with repeated sizes, and frees.

    Args:
        chance: the random generator.
        least, most: exponents of the smallest and the largest size, as powers of 2.
        live_bytes: if more bytes are in use, the next event is a free.
    """
    events, live, sizes, total, emptied = [], {}, [], 0, chance.choice([0, 0, 0.02])
    for key in range(chance.randint(50, 300)):
        if live and (total > live_bytes or chance.random() < 0.42):
            gone = chance.choice([*live]) if chance.random() < 0.6 else [*live][-1]
            total -= live.pop(gone)
            events.append((gone, 0))
        elif chance.random() < emptied:
            events.append(None)
        else:
            size = int(2 ** chance.uniform(least, most))
            if sizes and chance.random() < 0.5:
                size = chance.choice(sizes)
            elif chance.random() < 0.1:
                size = max(1, min(chance.choice(EDGES), int(2**most)) + chance.choice([-512, -1, 0, 1, 512]))
            sizes.append(size)
            live[key] = size
            total += size
            events.append((key, size))
    return events


def of_a_training(chance: random.Random, live_bytes: float) -> list[Event]:
    """Return the events of two or three training steps of a transformer.

    Weights, activations of each layer, gradients and optimizer states are allocated and freed.

    Args:
        chance: the random generator.
        live_bytes: bytes of memory for weights, activations, gradients and optimizer states together. The activations
            of the largest batch take 0.3 to 1.5 times the bytes that the others leave, so the memory may run out.
    """
    hidden, layers, words = (
        chance.choice([128, 256, 384, 768]),
        chance.randint(2, 5),
        chance.choice([1000, 8192, 30522]),
    )
    size, count, events = chance.choice([2, 4]), iter(range(10**6)), []
    free = live_bytes - 16 * (layers * 12 * hidden**2 + words * hidden)
    rows = max(1, int(free * chance.uniform(0.3, 1.5) / (size * (layers * 30 * hidden + 2 * words))))

    def allocate(*sizes: int) -> list[int]:
        keys = [next(count) for _ in sizes]
        events.extend(zip(keys, sizes, strict=True))
        return keys

    def free_blocks(keys: list[int]) -> None:
        events.extend((key, 0) for key in keys)

    shapes = [words * hidden] + layers * [3 * hidden**2, 3 * hidden, hidden**2, hidden, *2 * [4 * hidden**2]]
    weights = allocate(*(4 * shape for shape in shapes))
    for step in range(chance.randint(2, 3)):
        now = rows if chance.random() < 0.5 else chance.randint(1, rows)
        saved = [allocate(8 * now)]
        for _ in range(layers):
            qkv, scratch = allocate(3 * now * hidden * size), allocate(now * hidden * size, now * hidden * size)
            saved.append(qkv + allocate(now * hidden * size, 4 * now, 4 * now * hidden * size))
            free_blocks(scratch)
        logits = allocate(now * words * size, now * words * 4)
        gradients = []
        for layer in reversed(saved):
            flowing = allocate(now * hidden * size, 4 * now * hidden * size)
            free_blocks(layer)
            gradients += allocate(*(4 * shape for shape in chance.sample(shapes[1:], 2)))
            free_blocks(flowing)
        free_blocks(logits)
        if not step:
            weights += allocate(*(4 * shape for shape in shapes), *(4 * shape for shape in shapes))
        free_blocks(allocate(*(4 * shape for shape in shapes[:3])))
        free_blocks(gradients)
        if chance.random() < 0.2:
            events.append(None)
    return events


def trace(seed: str, room: int) -> list[Event]:
    """Return the events of a random trace of one of several kinds; some traces run out of memory.

    Args:
        seed: determines the trace.
        room: bytes that the card has for segments.
    """
    chance = random.Random(seed)
    family = chance.choice(["small", "large", "mixed", "edges", "training", "training"])
    live = chance.uniform(0.1, 2.5) * room if room < 2048 * MIB else chance.uniform(0.1, 8) * 1024 * MIB
    if family == "training":
        return of_a_training(chance, live)
    least, most = {"small": (0, 20.2), "large": (20, 27), "mixed": (0, 27), "edges": (19, 24)}[family]
    return at_random(chance, least, most, live)


def compare(text: str, seeds: list[str], torch_version: str | None = None) -> dict:
    """Run traces on torch's allocator and on our model of it, and return where they differ.

    Args:
        text: the model's settings, as in PYTORCH_CUDA_ALLOC_CONF. This process's torch must have the same settings.
        seeds: one per trace.
        torch_version: selects the rules of the model; None: the running torch's rules.

    Returns:
        {"traces", "events", "out_of_memory", "retries": their numbers, "mismatches": the first mismatch of each trace}.
    """
    import torch

    torch.empty(1, device="cuda")
    torch.cuda.empty_cache()
    capacity, _ = torch.cuda.mem_get_info()
    settings = Settings.parse(text)
    found = dict.fromkeys(("traces", "events", "out_of_memory", "retries"), 0) | {"mismatches": []}
    for seed in seeds:
        live, places = {}, {}
        double = CachingAllocator(settings, capacity, rules=release(torch_version))
        torch.cuda.reset_peak_memory_stats()
        retries = torch._C._cuda_memoryStats(0)["num_alloc_retries"]
        for number, event in enumerate(trace(seed, capacity)):
            reference = performed(torch, live, event)
            modelled = answered(double, event, places, reference[-1])
            found["events"] += 1
            found["out_of_memory"] += reference[-2]
            if modelled != reference:
                found["mismatches"].append((seed, number, event, reference, modelled))
                break
        else:
            reference, modelled = after(torch, retries), double_after(double, places)
            found["retries"] += reference[1]
            if reference != modelled:
                found["mismatches"].append((seed, "at the end", reference, modelled))
        found["traces"] += 1
        live.clear()
        torch.cuda.empty_cache()
    return found


def performed(torch, live: dict, event: Event) -> tuple:
    """Let torch perform an event (allocate, free or empty the cache), and return its statistics after the event.

    Args:
        torch: the module.
        live: {number of a block: its tensor} of the allocated blocks; it is updated.

    Returns:
        (allocated bytes, reserved bytes, requested bytes, number of small segments, number of large segments, whether
        torch ran out of memory, address of the new block or 0).
    """
    full, address = False, 0
    if event is None:
        torch.cuda.empty_cache()
    elif event[1]:
        try:
            live[event[0]] = torch.empty(event[1], dtype=torch.uint8, device="cuda")
            address = live[event[0]].data_ptr()
        except torch.OutOfMemoryError:
            full = True
    else:
        live.pop(event[0], None)
    stats = torch._C._cuda_memoryStats(0)
    counts = (stats[f"{name}_bytes"]["all"]["current"] for name in ("allocated", "reserved", "requested"))
    return *counts, *(stats["segment"][f"{pool}_pool"]["current"] for pool in ("small", "large")), full, address


def answered(double: CachingAllocator, event: Event, places: dict[int, int], address_of_block: int) -> tuple:
    """Let our model of the allocator perform an event (allocate, free or empty the cache).

    Args:
        double: the model.
        event: the event.
        places: {number of a segment of the model: address of the same segment in torch}; when the first block of a
            segment is allocated, this function adds the segment.
        address_of_block: torch's address of the new block.

    Returns:
        (allocated bytes, reserved bytes, requested bytes, number of small segments, number of large segments, whether
            the model ran out of memory, address of the new block in torch or 0).
    """
    full, address = False, 0
    if event is None:
        double.empty_cache()
    elif event[1]:
        try:
            double.allocate(*event)
            part = double._used[event[0]]
            address = places.setdefault(part.order, address_of_block) + part.address - part.base
        except OutOfMemory:
            full = True
    else:
        double.free(event[0])
    requested = sum(part.requested for part in double._used.values())
    small = [segment.is_small for segment in double.segments() if not segment.is_expandable]  # torch counts no others
    counts = double.allocated_bytes, double.reserved_bytes, requested
    return *counts, small.count(True), small.count(False), full, address


def after(torch, retries: int) -> tuple:
    """Return the state of torch's allocator at the end of a trace: (peaks, retries, segments).

    The peaks are [of allocated bytes, of reserved bytes]; the retries are those during the trace. A segment is
    (address, bytes, "small" or "large", whether it is expandable, [(address, bytes, state) of each block]).

    `torch`: the module; `retries`: torch's count of retries at the start of the trace.
    """
    stats = torch._C._cuda_memoryStats(0)
    peaks = [stats[f"{name}_bytes"]["all"]["peak"] for name in ("allocated", "reserved")]
    segments = [
        (
            *(segment[name] for name in ("address", "total_size", "segment_type", "is_expandable")),
            [(block["address"], block["size"], block["state"]) for block in segment["blocks"]],
        )
        for segment in torch.cuda.memory_snapshot()
    ]
    return peaks, stats["num_alloc_retries"] - retries, sorted(segments)


def double_after(double: CachingAllocator, places: dict[int, int]) -> tuple:
    """Return the state of our model of the allocator at the end of a trace: (peaks, retries, segments).

    The peaks are [of allocated bytes, of reserved bytes], and the retries a number. A segment is (address, bytes,
    "small" or "large", whether it is expandable, [(address, bytes, state) of each block]). Addresses are translated to
    torch's, so that the result can be compared with the result of `after`, torch's state.

    `double`: the model; `places`: {number of a segment of the model: address of the same segment in torch}.
    """
    states = {True: "inactive", False: "active_allocated"}
    bases = sorted((base, places[head.order] - base) for base, head in double._heads.items() if head.order in places)

    def mapped(address: int) -> int:
        return address + bases[bisect.bisect(bases, (address + 1,)) - 1][1]

    segments = [
        (
            *(mapped(segment.address), segment.size, "small" if segment.is_small else "large", segment.is_expandable),
            [(mapped(block.address), block.size, states[block.is_free]) for block in segment.blocks],
        )
        for segment in double.segments()
    ]
    return [double.peak_allocated_bytes, double.peak_reserved_bytes], double.retries, sorted(segments)


def rehearsed(card: Card, text: str, seeds: list[str]) -> dict:
    """Run `compare` in a rehearsal on a card, and return its result.

    `text`: the settings, as in PYTORCH_CUDA_ALLOC_CONF; `seeds`: one per trace.
    """
    with patch.dict(os.environ, PYTORCH_CUDA_ALLOC_CONF=text), Rehearsal(card) as stage:
        return stage.submit(compare, text, seeds).result()


def named(card_bytes: int, settings: str) -> str:
    return f"{card_bytes} bytes, {settings or 'default settings'}"


def measure(cases, options):
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # otherwise torch warns of each refused request
    for name, (number, card, text) in cases.items():
        found = rehearsed(card, text, [f"{options.seed}-{number}-{index}" for index in range(options.traces)])
        for mismatch in found["mismatches"][:3]:
            print(mismatch, file=sys.stderr)
        about = {"settings": text, "card_bytes": card.memory_bytes}
        yield name, about | found | {"mismatches": len(found["mismatches"])}


def conclude(rows: list[dict], options) -> dict:
    names = ("traces", "events", "out_of_memory", "retries", "mismatches")
    sums = {name: sum(row[name] for row in rows) for name in names}
    return {"what": "torch's caching allocator in a rehearsal against its double, compared after every event"} | sums


ALLOCATOR = Measurement(
    __doc__,
    "allocator.json",
    lambda options: {named(card.memory_bytes, text): (n, card, text) for n, (card, text) in enumerate(CONFIGURATIONS)},
    measure,
    conclude,
    {"traces": 500, "seed": 0},
    rows="configurations",
    name_of=lambda number, row: named(row["card_bytes"], row["settings"]),
    rehearsed=True,
)

if __name__ == "__main__":
    sys.exit(ALLOCATOR.main())
