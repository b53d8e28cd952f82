"""The caching allocator's segments compared with segments counted by hand; also known sizes of workspaces and CUDA
contexts.

`benchmarks/measure_allocator.py` compares the model with torch's own allocator in rehearsals; this file only checks the
results that it recorded.
"""

import importlib.metadata
import itertools
import json
import pickle
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from trainmem.core import releases
from trainmem.estimate import allocator, allocator_settings
from trainmem.estimate.allocator import MIB, CachingAllocator, OutOfMemory
from trainmem.estimate.allocator_settings import Settings, is_tested, newest, release

RECORD = Path(__file__).parents[2] / "results" / "allocator.json"


def filled(text="", *sizes_mib, **options):
    """Return an allocator with the settings `text` and blocks of the given MiB, whose keys are 0, 1, 2, ...

    `text`: as in PYTORCH_CUDA_ALLOC_CONF; `options`: further arguments of `CachingAllocator`.
    """
    memory = CachingAllocator(Settings.parse(text), **options)
    for key, size in enumerate(sizes_mib):
        memory.allocate(key, size * MIB)
    return memory


def address(memory, key):
    return next(block.address for segment in memory.segments() for block in segment.blocks if block.key == key)


def large_segments(memory):
    return sum(not segment.is_small for segment in memory.segments())


def requested(memory):
    """Return the requested bytes of all blocks in use of a `CachingAllocator`."""
    return sum(block.requested for segment in memory.segments() for block in segment.blocks)


def reserved(*sizes):
    return reserved_after((key, size, 1) for key, size in enumerate(sizes))


def reserved_after(log):
    """Return the reserved bytes after a series of events.

    `log`: (key of a block, bytes, +1 for an allocation or -1 for a free) of each event.
    """
    memory = CachingAllocator()
    for key, size, sign in log:
        if sign > 0:
            memory.allocate(key, size)
        else:
            memory.free(key)
    return memory.reserved_bytes


def test_blocks_are_multiples_of_512_bytes():
    assert [allocator.rounded(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1], 2 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB, MIB, 1], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([10 * MIB - 512], 20 * MIB),
        ([10 * MIB], 10 * MIB),
        ([10 * MIB + 1], 12 * MIB),
        ([9 * MIB, 9 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 2 * MIB], 20 * MIB),
        ([9 * MIB, 10 * MIB - 512, MIB + 512], 20 * MIB),  # a rest of more than 1 MiB is split off,
        ([9 * MIB, 10 * MIB, MIB + 512], 40 * MIB),  # one of 1 MiB stays with its block,
        ([9 * MIB, 10 * MIB - 512, MIB], 22 * MIB),  # and a small request never looks there
        ([0], 0),
    ],
)
def test_the_segments_of_requests_are_those_counted_by_hand(sizes, expected):
    assert reserved(*sizes) == expected


def test_a_rest_of_1_mib_counts_with_its_block():
    memory = CachingAllocator()
    memory.allocate("first", 9 * MIB)
    memory.allocate("second", 10 * MIB)
    assert memory.allocated_bytes == 20 * MIB


def test_the_smallest_free_block_that_fits_is_taken():
    log = [("a", 30 * MIB, 1), ("b", 20 * MIB, 1), ("a", 0, -1), ("b", 0, -1), ("c", 18 * MIB, 1), ("d", 30 * MIB, 1)]
    assert reserved_after(log) == 50 * MIB


def test_free_neighbours_are_joined():
    log = [(key, 5 * MIB, 1) for key in "abcd"] + [("b", 0, -1), ("c", 0, -1), ("e", 9 * MIB, 1)]
    assert reserved_after(log) == 20 * MIB
    log[4:6] = [("a", 0, -1), ("c", 0, -1)]
    assert reserved_after(log) == 40 * MIB


def test_what_a_stream_gives_back_only_that_stream_gets_again():
    memory = filled("", 20)
    memory.free(0)
    memory.allocate("gathered", 20 * MIB, stream=1)
    assert (memory.reserved_bytes, large_segments(memory)) == (40 * MIB, 2)
    memory.free("gathered")
    memory.allocate("again", 20 * MIB)
    memory.allocate("gathered again", 20 * MIB, stream=1)
    assert (memory.reserved_bytes, large_segments(memory)) == (40 * MIB, 2)
    memory.free("again")
    memory.free("gathered again")
    memory.empty_cache()
    assert (memory.reserved_bytes, memory.segments()) == (0, []), "a full device gets the segments of all streams"


def test_a_key_is_born_once():
    with pytest.raises(ValueError, match="key='a'"):
        reserved_after([("a", 1, 1), ("a", 1, 1)])


def test_the_numbers_of_segments_requested_bytes_and_peaks():
    memory = CachingAllocator()
    for key, size in enumerate([1, 3 * MIB, MIB, 1000, 30 * MIB]):
        memory.allocate(key, size)
    assert sorted(segment.is_small for segment in memory.segments()) == [False, False, True]
    assert memory.reserved_bytes == 52 * MIB
    assert requested(memory) == 34 * MIB + 1001 and memory.allocated_bytes == 34 * MIB + 512 + 1024
    memory.free(4)
    assert memory.peak_allocated_bytes == 34 * MIB + 512 + 1024 and requested(memory) == 4 * MIB + 1001
    memory.empty_cache()
    assert memory.peak_reserved_bytes == 52 * MIB and memory.reserved_bytes == 22 * MIB and large_segments(memory) == 1
    memory.reset_peaks()
    assert memory.peak_allocated_bytes == memory.allocated_bytes == 4 * MIB + 512 + 1024
    assert memory.peak_reserved_bytes == 22 * MIB


def test_what_there_is_is_shown_by_address():
    memory = filled("", 5, 16)
    second, first = memory.segments()  # the driver's addresses fall
    assert [(block.size // MIB, block.requested // MIB, block.key) for block in first.blocks] == [
        (5, 5, 0),
        (15, 0, None),
    ]
    assert [(block.address, block.size // MIB, block.key) for block in second.blocks] == [(second.address, 16, 1)]
    assert first.blocks[1].address == first.address + 5 * MIB and not first.is_small and not first.is_expandable


TIES = {"2.10": "a", "2.11": "a", "2.12": "b", "2.13": "c", "2.14": "c", "2.15": "c"}


@pytest.mark.parametrize("torch_version", allocator_settings.RELEASES)
def test_of_equal_blocks_each_release_takes_its_own(torch_version):
    """Of three free blocks of 4 MiB, the allocator must take the one that each torch release takes, see `TIES`.

    Block "a" has the lowest address, and is in the youngest segment. Block "b" has the oldest Block object. Block "c"
    is in the oldest segment; this segment was merged and split again, so the Block object of "c" is the youngest.
    """
    memory = filled("", 4, 16, 4, 16, 4, 16, rules=release(torch_version))
    addresses = {"c": address(memory, 0), "b": address(memory, 2), "a": address(memory, 4)}
    assert addresses["a"] < addresses["b"] < addresses["c"]
    memory.free(0)
    memory.free(1)
    memory.allocate("again", 4 * MIB)
    memory.allocate("behind it", 16 * MIB)
    for key in (4, 2, "again"):
        memory.free(key)
    memory.allocate("new", 4 * MIB)
    assert address(memory, "new") == addresses[TIES[torch_version]]


def test_where_the_lowest_address_is_taken_the_same_training_reserves_more():
    """Torch 2.11 takes the free block with the lowest address, which is in the younger segment. The blocks of that
    segment then cannot merge, so a later large request needs one more segment. Torch 2.13 takes a block of the same
    size in the older segment, and needs no more segments.
    """
    reserved = {}
    for torch_version in ("2.11", "2.13"):
        memory = filled("", 9, 10, 9, 10, rules=release(torch_version))
        memory.free(0)
        memory.free(2)
        memory.allocate("kept", 9 * MIB)
        memory.free(3)
        memory.allocate("large", 19 * MIB)
        reserved[torch_version] = memory.reserved_bytes // MIB
    assert reserved == {"2.11": 60, "2.13": 40}


def test_a_segment_that_was_given_back_leaves_a_gap_for_the_next():
    memory = filled("", 30, 40, 20)
    gap = address(memory, 1)
    memory.free(1)
    memory.empty_cache()
    memory.allocate("fits", 40 * MIB)
    memory.allocate("below", 20 * MIB)
    assert address(memory, "fits") == gap and address(memory, "below") < address(memory, 2)


def test_a_release_is_known_by_its_number_and_the_installed_one_without(monkeypatch):
    installed = importlib.metadata.version("torch")
    assert release() == release(installed) == release(".".join(installed.split(".")[:2]))
    assert release("2.11.0+cu130").ties == "address" and not release("2.11").shares_workspace
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
    assert release("2.11").shares_workspace
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")
    assert not release("2.14").shares_workspace


@pytest.mark.parametrize("torch_version", ["2.9.1", "2.1", "3", ""])
def test_a_release_without_known_rules_is_refused_with_those_that_are_known(torch_version):
    with pytest.raises(ValueError, match=f"torch_version='{torch_version}': .*2.10, 2.11, 2.12, 2.13, 2.14"):
        release(torch_version)


@pytest.mark.parametrize("torch_version", ["2.9", "2.1.0", "1.13.1+cu117"])
def test_an_older_release_is_answered_with_the_nearest_by_number_and_not_by_spelling(torch_version):
    with pytest.raises(ValueError, match=r"Did you mean '2\.10'\? Choose from"):
        release(torch_version)


@pytest.mark.parametrize("version", ["2.99", "2.99.0a0+git", "2.99.1rc2", "3.0"])
def test_a_newer_release_has_the_newest_rules_and_warns_once(version):
    allocator_settings._warn_of_untested.cache_clear()
    name = version[:4].rstrip(".")
    with pytest.warns(UserWarning, match=rf"torch {name} .*torch {newest()}\b") as warned:
        rules = [release(version), release(version)]
    assert len(warned) == 1 and rules == 2 * [replace(release(newest()), torch=name)]
    assert not is_tested(rules[0]) and is_tested(release(newest()))


def test_a_known_release_warns_of_nothing(recwarn):
    allocator_settings._warn_of_untested.cache_clear()
    assert all(release(name).torch == name for name in allocator_settings.RELEASES) and not recwarn.list


def test_the_newest_release_that_the_doctor_calls_tested_is_no_older_than_the_rules():
    numbers = [[*map(int, name.split("."))] for name in (releases.NEWEST_TORCH, newest())]
    assert numbers[0] >= numbers[1], "set releases.NEWEST_TORCH"


def test_options_exist_by_release():
    both = "expandable_segments_reserve:4G,expandable_segments_reserve_by_class:[a:0.5,b:4G],expandable_segments:True"
    pinned = "pinned_max_cached_size_mb:64,pinned_max_round_threshold_mb:64"
    assert Settings.parse(both, "2.15").expandable_segments_reserve == 4
    assert Settings.parse(both, "2.99.0a0+git") == Settings.parse(both)
    assert Settings.parse(pinned, "2.13") == Settings(), "memory of the host"
    reserve, by_class, _ = re.split(r",(?=expandable)", both)
    older = ((reserve, "2.14", "2.15"), (by_class, "2.14", "2.15"))
    older += tuple((option, "2.12", "2.13") for option in pinned.split(","))
    for text, torch_version, since in older:
        with pytest.raises(ValueError, match=rf"torch {since} .*{torch_version}"):
            Settings.parse(text, torch_version)


RULES_OF_2_15 = replace(release("2.14"), torch="2.15")


@pytest.mark.parametrize(("torch_version", "in_vain"), [("2.13", True), ("2.15", False)])
def test_of_what_no_expandable_segment_holds_only_older_torches_take_one(torch_version, in_vain):
    """An expandable segment reserves addresses for 9/8 of the device's memory. A larger request fails in every release.
    Before torch 2.15 the allocator makes a new segment and then fails; since 2.15 it fails at once.
    """
    rules = replace(release("2.13"), torch=torch_version)
    memory = filled("expandable_segments:True", capacity=100 * MIB, rules=rules)
    with pytest.raises(OutOfMemory):
        memory.allocate("more than a segment", 130 * MIB)
    assert (memory._order > 0) is in_vain  # segments so far


def test_an_expandable_segment_ends_where_its_reserve_does():
    text = "expandable_segments:True,expandable_segments_reserve:0.0625G"  # 64 MiB: 4 pages of 20 MiB
    memory = filled(text, 40, 30, 20, rules=RULES_OF_2_15)
    assert len(memory._heads) == 2 and memory.reserved_bytes == 100 * MIB
    assert len(filled("expandable_segments:True", 40, 30, 20)._heads) == 1
    with pytest.raises(OutOfMemory):
        memory.allocate("larger than a segment", 81 * MIB)
    assert memory.peak_reserved_bytes == 100 * MIB, "no segment was taken in vain"
    memory.allocate("as large as a segment", 80 * MIB)


@pytest.mark.parametrize("value", ["xG", "0", "-1G", "inf", "nanG", "G"])
def test_a_reserve_that_torch_ignores_is_ignored(value):
    text = f"expandable_segments:True,expandable_segments_reserve:{value}"
    assert Settings.parse(text) == Settings(expandable_segments=True)


def test_a_reserve_as_a_share_of_the_card_is_refused_where_it_would_count():
    with pytest.raises(ValueError, match="expandable_segments_reserve:40G"):
        Settings.parse("expandable_segments:True,expandable_segments_reserve:0.5")
    assert Settings.parse("expandable_segments_reserve:0.5") == Settings()


def test_a_full_device_gets_unused_segments_back():
    memory = filled("", 40, 40, capacity=100 * MIB)
    memory.free(1)
    memory.allocate(2, 50 * MIB)
    assert memory.reserved_bytes == 90 * MIB and memory.retries == 1
    with pytest.raises(OutOfMemory) as raised:
        memory.allocate(3, 11 * MIB)
    sizes = 11 * MIB, 90 * MIB, 90 * MIB
    assert re.findall(r"\d+", str(raised.value)) == [*map(str, sizes)]
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    memory.free(2)
    memory.allocate(3, 11 * MIB)  # of the 50 that are free


def test_a_segment_in_use_is_never_given_back():
    memory = filled("", 5, 5, 12, capacity=34 * MIB)
    memory.free(0)
    memory.free(2)
    memory.empty_cache()
    assert memory.reserved_bytes == 20 * MIB and memory.allocated_bytes == 5 * MIB


def test_a_segment_takes_whole_pages_of_the_device():
    sizes = [5, 5, 5, 5, 5]  # three segments of 21 MiB, each in 22 of the device
    assert filled("large_segment_size_mb:21", *sizes, capacity=44 * MIB).reserved_bytes == 42 * MIB
    with pytest.raises(OutOfMemory):
        filled("large_segment_size_mb:21", *sizes, capacity=43 * MIB)


def test_blocks_above_the_largest_that_is_split():
    memory = filled("max_split_size_mb:32", 64)
    memory.free(0)
    memory.allocate("small", 20 * MIB)  # never of so large a block
    assert memory.reserved_bytes == 84 * MIB
    memory.allocate("much smaller", 44 * MIB)  # 20 MiB less than the block are too little
    assert memory.reserved_bytes == 128 * MIB
    memory.allocate("near", 46 * MIB)
    assert memory.reserved_bytes == 128 * MIB and memory.allocated_bytes == 128 * MIB


def test_how_much_larger_an_unsplit_block_may_be():
    memory = filled("max_split_size_mb:32,max_non_split_rounding_mb:30", 64)
    memory.free(0)
    memory.allocate("a", 35 * MIB)
    assert memory.reserved_bytes == memory.allocated_bytes == 64 * MIB


def test_large_blocks_are_given_back_first_and_no_more_than_needed():
    memory = filled("max_split_size_mb:32", 60, 100, 12, capacity=172 * MIB)
    for key in (0, 1, 2):
        memory.free(key)
    memory.allocate("a", 35 * MIB)  # the smallest that holds it goes
    assert memory.reserved_bytes == (100 + 12 + 36) * MIB and memory.retries == 0
    memory.allocate("b", 125 * MIB)  # 100 MiB are less than that, so all goes
    assert memory.reserved_bytes == (36 + 126) * MIB and memory.retries == 1


def test_several_large_blocks_are_given_back_from_the_largest_on():
    memory = filled("max_split_size_mb:32", 40, 60, 50, capacity=160 * MIB)
    for key in (0, 1, 2):
        memory.free(key)
    memory.allocate("a", 110 * MIB)  # 60 and 50
    assert memory.reserved_bytes == 150 * MIB and memory.retries == 0


def test_sizes_are_rounded_to_steps_between_powers_of_two():
    memory = CachingAllocator(Settings.parse("roundup_power2_divisions:4"))
    for key, size in enumerate([5 * MIB, 5 * MIB + 1, 10 * MIB + 1, 2048, 2049, 700]):
        memory.allocate(key, size)
    held = {block.key: block.size for segment in memory.segments() for block in segment.blocks}
    assert [held[key] for key in range(6)] == [5 * MIB, 6 * MIB, 12 * MIB, 2048, 2560, 1024]


def test_each_interval_has_steps_of_its_own():
    settings = Settings.parse("roundup_power2_divisions:[2:8, 8:2, 16:0, >:1]")
    assert settings.roundup_power2_divisions == (8, 8, 0, 2, 0, *11 * [1])
    assert Settings.parse("roundup_power2_divisions:[256:1,>:4]").roundup_power2_divisions == (*9 * [1], *7 * [4])
    assert Settings.parse("roundup_power2_divisions:2").roundup_power2_divisions == 16 * (2,)


def test_a_size_has_the_steps_of_its_interval():
    memory = CachingAllocator(Settings.parse("roundup_power2_divisions:[2:4,>:0],expandable_segments:True"))
    memory.allocate("2 to 4 MiB", 3 * MIB + 1)
    memory.allocate("4 to 8 MiB", 5 * MIB + 1)
    assert memory.allocated_bytes == 3.5 * MIB + 5 * MIB + 512


def test_expandable_segments_grow_by_pages():
    memory = filled("expandable_segments:True", 30, 5)
    assert memory.reserved_bytes == 40 * MIB and memory.allocated_bytes == 35 * MIB
    base = address(memory, 0)
    memory.free(0)
    memory.empty_cache()  # of two pages one is unused
    assert memory.reserved_bytes == 20 * MIB
    (segment,) = memory.segments()
    assert (segment.address, segment.size, segment.is_expandable) == (base + 20 * MIB, 20 * MIB, True)
    memory.allocate("a", 12 * MIB)  # the page is mapped again, and joins the 10 MiB behind it
    assert memory.reserved_bytes == 40 * MIB and address(memory, "a") == base
    assert [block.size // MIB for block in memory.segments()[0].blocks] == [12, 18, 5, 5]
    memory.allocate("b", MIB)
    assert memory.reserved_bytes == 42 * MIB, "small blocks have pages of 2 MiB"


def test_an_expandable_segment_grows_from_its_last_free_block_on():
    assert filled("expandable_segments:True", 30, 25).reserved_bytes == 60 * MIB


def test_an_expandable_segment_leaves_no_rest_with_a_block():
    memory = filled("expandable_segments:True", 19)
    assert (memory.allocated_bytes, memory.reserved_bytes) == (19 * MIB, 20 * MIB)


def test_a_page_that_the_device_does_not_have():
    memory = filled("expandable_segments:True", 30, 20, capacity=90 * MIB)
    memory.free(0)
    with pytest.raises(OutOfMemory):
        memory.allocate("a", 60 * MIB)  # behind the 20: it has the addresses, up to 120 MiB, and lacks a page
    assert memory.reserved_bytes == 40 * MIB, "the unused page went back"
    memory.allocate("a", 30 * MIB)
    assert memory.reserved_bytes == 60 * MIB


def test_an_expandable_segment_has_an_eighth_more_addresses_than_the_device_has_bytes():
    memory = filled("expandable_segments:True", 30, 20, capacity=70 * MIB)
    memory.free(0)
    with pytest.raises(OutOfMemory):
        memory.allocate("a", 50 * MIB)  # 30 are left of 80 MiB: it would be the first of another segment
    with pytest.raises(OutOfMemory):
        memory.allocate("a", 30 * MIB)  # which comes first now, and needs two pages more
    assert memory.reserved_bytes == 40 * MIB


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "max_split_size_mb:20,roundup_power2_divisions:4"])
@pytest.mark.parametrize("seed", range(10))
def test_blocks_fill_their_segments_and_everything_joins_again(seed, text):
    chance, live = random.Random(seed), {}
    memory = CachingAllocator(Settings.parse(text), capacity=700 * MIB)
    for key in range(300):
        if live and chance.random() < 0.45:
            memory.free(gone := chance.choice([*live]))
            del live[gone]
        else:
            size = int(2 ** chance.uniform(0, 26))
            try:
                memory.allocate(key, size)
            except OutOfMemory:
                continue
            live[key] = size
        segments = memory.segments()
        blocks = [block for segment in segments for block in segment.blocks]
        assert all(a.address + a.size <= b.address for a, b in itertools.pairwise(segments))
        for segment in segments:
            assert all(a.address + a.size == b.address for a, b in itertools.pairwise(segment.blocks))
            assert all(a.key is not None or b.key is not None for a, b in itertools.pairwise(segment.blocks))
            assert sum(block.size for block in segment.blocks) == segment.size
            assert segment.blocks[0].address == segment.address
        assert {block.key: block.requested for block in blocks if block.key is not None} == live
        assert memory.allocated_bytes == sum(block.size for block in blocks if block.key is not None)
        assert memory.reserved_bytes == sum(segment.size for segment in segments) <= 700 * MIB
    for key in live:
        memory.free(key)
    assert all(len(segment.blocks) == 1 for segment in memory.segments())
    memory.empty_cache()
    assert memory.segments() == [] and memory.reserved_bytes == memory.allocated_bytes == 0


def test_settings_are_read_as_torch_reads_them():
    text = " max_split_size_mb:128, expandable_segments:True,backend:native,pinned_use_background_threads:True"
    assert Settings.parse(text) == Settings(expandable_segments=True, max_split_size_mb=128)
    assert Settings.parse("") == Settings()
    assert Settings.parse("garbage_collection_threshold:0.6") == Settings(), "torch collects under a fraction only"
    assert Settings.parse("max_split_size_mb:20,max_split_size_mb:40").max_split_size_mb == 40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size:128", "max_split_size_mb"),
        ("expandable_segments", "name:value"),
        ("expandable_segments:yes", "True or False"),
        ("max_split_size_mb:16", "at least 20"),
        ("large_segment_size_mb:40,max_split_size_mb:32", "at least 40"),
        ("large_segment_size_mb:10", "more than 10"),
        ("max_non_split_rounding_mb:-1", "at least 20"),
        ("max_split_size_mb:0", "at least 20"),
        ("max_split_size_mb:many", "a whole number"),
        ("roundup_power2_divisions:0", "power of two"),
        ("per_process_memory_fraction:0.5", "give device_memory="),
        ("throw_on_cudamalloc_oom:True", "leave it out"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[3:1]", "power of two"),
        ("roundup_power2_divisions:[4:6]", "power of two"),
        ("backend:cudaMallocAsync", "leave it out"),
    ],
)
def test_settings_that_torch_refuses_or_nobody_follows_are_refused_with_what_to_write(text, message):
    with pytest.raises(ValueError, match=message):
        Settings.parse(text)


def test_the_double_was_never_found_to_differ_from_torch():
    record = json.loads(RECORD.read_text())
    rows = record["configurations"]
    assert record["traces"] == sum(row["traces"] for row in rows) >= 10_000 and record["events"] > 1_000_000
    assert record["mismatches"] == 0 and all(row["mismatches"] == 0 for row in rows)
    gone = "per_process_memory_fraction", "throw_on_cudamalloc_oom"  # followed when this was recorded
    settings = [Settings.parse(row["settings"]) for row in rows if not any(name in row["settings"] for name in gone)]
    newer = {"expandable_segments_reserve"}  # than this record; see tests/rehearsal/test_allocator_rehearsed.py
    for name in Settings.__dataclass_fields__.keys() - newer:
        assert any(getattr(each, name) != getattr(Settings(), name) for each in settings), f"{name}: never compared"
    assert record["out_of_memory"] > 1000 < record["retries"] and record["versions"]["torch"].startswith("2.13")


def test_a_workspace_of_cublas_is_larger_on_newer_gpus_unless_the_variable_says_its_size(monkeypatch):
    assert allocator.workspace_bytes((8, 0)) == allocator.workspace_bytes((7, 5)) == 8_519_680
    assert allocator.workspace_bytes((9, 0)) == 32 * MIB
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert allocator.workspace_bytes((9, 0)) == 8_519_680
